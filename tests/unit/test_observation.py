"""What a service's children show: replicas, rollout, and why a pod doesn't serve."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from child_makers import make_deployment, make_pod
from conch.api.conditions import Reason
from conch.reconcile.observation import MAX_EXPLAINED, MAX_QUOTE, Observation, Problem, observe
from conch.workload.deployment import template_inputs
from makers import make_model, make_service, make_spec, stored

SPEC = make_spec()


def seen(
    *pods: dict[str, Any], deployment: dict[str, Any] | None = None, fields: dict[str, Any] | None = None
) -> Observation:
    children = {"Deployment": [deployment or make_deployment(ready=0)], "Pod": list(pods)}
    return observe(children, "vision", make_spec(fields))


def problem_of(pod: dict[str, Any], fields: dict[str, Any] | None = None) -> Problem:
    (problem,) = seen(pod, fields=fields).problems
    return problem


def crashed(message: str | None, code: int = 1, reason: str = "Error") -> dict[str, Any]:
    return {
        "ready": False,
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 1m20s restarting failed container"}},
        "lastState": {"terminated": {"exitCode": code, "reason": reason, "message": message}},
    }


def waits(reason: str, message: str = "") -> dict[str, Any]:
    return {"ready": False, "state": {"waiting": {"reason": reason, "message": message}}}


# --- replicas and rollout


def test_without_a_deployment_nothing_runs() -> None:
    assert observe({}, "vision", SPEC) == Observation(False, 0, 0, False, "", (), 0)


def test_another_deployment_with_the_services_labels_is_not_looked_at() -> None:
    other = make_deployment(stored(make_service(name="other")))
    assert not observe({"Deployment": [other]}, "vision", SPEC).exists


def test_counts_and_the_templates_inputs_come_from_the_deployment() -> None:
    found = seen(deployment=make_deployment(wanted=3, ready=2))
    assert (found.exists, found.wanted, found.ready) == (True, 3, 2)
    assert found.template_inputs == template_inputs(SPEC)


@pytest.mark.parametrize(
    ("deployment", "rolled_out"),
    [
        ({"wanted": 2}, True),
        ({"wanted": 2, "ready": 1}, True),
        ({"wanted": 2, "ready": 0}, False),
        ({"wanted": 2, "replicas": 0}, False),
        ({"wanted": 2, "replicas": 3, "updated": 1, "ready": 2}, False),
        ({"wanted": 5, "replicas": 2, "updated": 2, "ready": 2}, True),
        ({"generation": 4, "seen": 3}, False),
        ({"generation": 4, "seen": 4}, True),
    ],
)
def test_row_59_rolled_out_means_that_every_pod_is_new_and_one_answers(
    deployment: dict[str, Any], *, rolled_out: bool
) -> None:
    assert seen(deployment=make_deployment(**deployment)).rolled_out is rolled_out


def test_a_deployment_without_status_is_not_rolled_out() -> None:
    deployment = make_deployment()
    del deployment["status"]
    found = seen(deployment=deployment)
    assert (found.ready, found.rolled_out) == (0, False)


# --- why a pod doesn't serve

NO_GPU = "0/{n} nodes are available: {n} Insufficient nvidia.com/gpu. preemption: 0/{n} nodes are available: {n} No."
TAINTED = "0/{n} nodes are available: {m} node(s) didn't match Pod's node affinity/selector, {n} node(s) had untolerated taint {{pool: a}}. preemption: 0/{n} nodes are available."  # noqa: E501 - the scheduler's own words


def test_row_82_a_pod_that_waits_for_a_gpu_says_for_which_and_what_helps() -> None:
    problem = problem_of(make_pod(unschedulable=NO_GPU.format(n=3)), {"accelerator.products": ["NVIDIA-L4"]})
    assert problem.reason == Reason.NO_FREE_ACCELERATOR
    assert "waits for 1 nvidia.com/gpu on a node labelled NVIDIA-L4" in problem.message
    assert "spec.scaling.minReplicas" in problem.message


@pytest.mark.parametrize("template", [NO_GPU, TAINTED])
def test_r11_the_schedulers_node_counts_do_not_alter_the_message(template: str) -> None:
    problems = {problem_of(make_pod(unschedulable=template.format(n=n, m=n + 1))) for n in (1, 2, 17, 250)}
    assert len(problems) == 1


def test_r11_the_order_of_the_schedulers_reasons_does_not_alter_the_message() -> None:
    one = "0/3 nodes are available: 1 Too many pods, 2 Insufficient memory."
    other = "0/5 nodes are available: 3 Insufficient memory, 2 Too many pods."
    assert problem_of(make_pod(unschedulable=one)) == problem_of(make_pod(unschedulable=other))
    assert problem_of(make_pod(unschedulable=one)).message == (
        "A pod can't be placed: Insufficient memory; Too many pods."
    )


@pytest.mark.parametrize(
    ("scheduler", "says"),
    [
        (TAINTED.format(n=1, m=2), "had untolerated taint {pool: a}"),
        ('persistentvolumeclaim "models" not found', 'persistentvolumeclaim "models" not found'),
        ('0/1 nodes are available: persistentvolumeclaim "models" not found. no new claims', '"models" not found'),
        ("", "no reason given"),
    ],
)
def test_any_other_reason_of_the_scheduler_is_quoted(scheduler: str, says: str) -> None:
    pod = make_pod(unschedulable="x")
    pod["status"]["conditions"][0]["message"] = scheduler
    problem = problem_of(pod)
    assert problem.reason == Reason.UNSCHEDULABLE
    assert says in problem.message


def test_row_82_a_pod_whose_claim_finds_no_device_waits_for_one() -> None:
    scheduler = (
        "0/1 nodes are available: 1 cannot allocate all claims. still not schedulable, preemption: 0/1 nodes are "
        "available: 1 Preemption is not helpful for scheduling."
    )
    problem = problem_of(make_pod(unschedulable=scheduler), {"accelerator.claim": {"deviceClass": "gpu.nvidia.com"}})
    assert problem.reason == Reason.NO_FREE_ACCELERATOR
    assert "waits for 1 device of class gpu.nvidia.com and none is free" in problem.message
    assert problem_of(make_pod(unschedulable=scheduler)).reason == Reason.UNSCHEDULABLE


def test_a_service_without_an_accelerator_never_waits_for_one() -> None:
    problem = problem_of(make_pod(unschedulable=NO_GPU.format(n=1)), {"accelerator.count": 0})
    assert problem.reason == Reason.UNSCHEDULABLE


@pytest.mark.parametrize(
    ("containers", "reason", "says"),
    [
        ({"fetch": crashed("the digest of x is y")}, Reason.FETCH_FAILED, "can't be fetched: the digest of x is y"),
        ({"triton": crashed("failed to load 'm'")}, Reason.SERVER_FAILED, "exited with code 1: failed to load 'm'"),
        ({"triton": crashed(None)}, Reason.SERVER_FAILED, "it gave no reason"),
        ({"triton": crashed(None, 0, "Completed")}, Reason.SERVER_FAILED, "exited with code 0"),
        ({"triton": crashed("x", 137, "OOMKilled")}, Reason.OUT_OF_MEMORY, "raise spec.resources.memory"),
        (
            {"triton": {"ready": False, "state": {"terminated": {"exitCode": 2, "message": "bad"}}}},
            Reason.SERVER_FAILED,
            "code 2: bad",
        ),
        (
            {"triton": {"ready": False, "state": {"running": {}}, "lastState": {"terminated": {"exitCode": 3}}}},
            Reason.SERVER_FAILED,
            "code 3",
        ),
        ({"triton": waits("CreateContainerConfigError", "no secret x")}, Reason.SERVER_FAILED, "no secret x"),
        ({"triton": crashed("still loading", 137)}, Reason.SERVER_FAILED, "spec.scaling.startup: raise that"),
        ({"fetch": crashed("x", 137, "OOMKilled")}, Reason.OUT_OF_MEMORY, "The fetching of the models was killed"),
        ({"fetch": crashed("the model volume is full; y", 7)}, Reason.DISK_FULL, "can't be fetched: the model volume"),
        (
            {"triton": crashed("unsatisfied condition: cuda>=12.8, please update your driver", 128, "StartError")},
            Reason.DRIVER_TOO_OLD,
            "needs cuda>=12.8",
        ),
        ({"triton": crashed("no such device /dev/x", 128, "StartError")}, Reason.SERVER_FAILED, "can't start: no such"),
        (
            {"triton": waits("RunContainerError", "unsatisfied condition: cuda>=12.8, please update your driver")},
            Reason.DRIVER_TOO_OLD,
            "update the node's driver",
        ),
        (
            {"fetch": waits("RunContainerError", "write /run/x: no space left on device")},
            Reason.SERVER_FAILED,
            "Container fetch can't start: write /run/x: no space left",
        ),
        (
            {"triton": waits("ImagePullBackOff", "failed to authorize: 401 Unauthorized")},
            Reason.IMAGE_PULL_FAILED,
            "can't be pulled, access is refused: check spec.runtime.image",
        ),
        (
            {"triton": waits("ErrImagePull", "dial tcp: lookup x: no such host")},
            Reason.IMAGE_PULL_FAILED,
            "its registry doesn't answer",
        ),
        ({"triton": waits("ImagePullBackOff")}, Reason.IMAGE_PULL_FAILED, "triton.example/server:1 can't be pulled"),
        ({"triton": waits("ErrImagePull")}, Reason.IMAGE_PULL_FAILED, "spec.runtime.image"),
        ({"fetch": waits("ErrImagePull")}, Reason.IMAGE_PULL_FAILED, "CONCH_FETCH_IMAGE"),
        (
            {"fetch": waits("ImagePullBackOff", 'Back-off pulling image "models.example/m:1": not found')},
            Reason.IMAGE_PULL_FAILED,
            "models.example/m:1 can't be pulled, its registry has no such image: check the spec.models[].source.uri",
        ),
    ],
)
def test_each_failure_of_a_container_has_a_reason_and_a_fix(
    containers: dict[str, Any], reason: Reason, says: str
) -> None:
    problem = problem_of(make_pod(**containers))
    assert problem.reason == reason
    assert says in problem.message


@pytest.mark.parametrize(
    "containers",
    [
        {},
        {"triton": {"ready": False, "state": {"running": {}}}},
        {"triton": waits("PodInitializing"), "fetch": {"ready": False, "state": {"running": {}}}},
        {"triton": waits("ContainerCreating")},
        {"triton": {"lastState": {"terminated": {"exitCode": 1}}}},
        {"fetch": {"lastState": {"terminated": {"exitCode": 1}}}},
        {"triton": {"ready": False, "state": {"running": {}}, "lastState": {"terminated": {"exitCode": 0}}}},
    ],
)
def test_starting_and_recovered_pods_have_no_problem(containers: dict[str, Any]) -> None:
    assert seen(make_pod(**containers)).problems == ()


LOAD = "2026-11-30T10:00:00Z E 17 model_lifecycle.cc:642] \"failed to load '{}' version 1: Internal: {}\""


def test_the_model_that_broke_is_named_with_cause_and_fix_and_known_by_name() -> None:
    fields = {"models": [make_model(name="good"), make_model(name="bad")]}
    said = LOAD.format("bad", "ModuleNotFoundError: No module named 'torch'")
    problem = problem_of(make_pod(triton=crashed(said)), fields)
    assert problem.reason == Reason.MODEL_LOAD_FAILED
    assert problem.message.startswith('Model "bad" can\'t be loaded: its Python code needs the module torch')
    assert "spec.models[1].parameters" in problem.message
    assert problem.models == (("bad", "its Python code needs the module torch, which the image lacks"),)


def evicted(message: str, created: str = "2026-01-01T00:00:00Z") -> dict[str, Any]:
    pod = make_pod("evicted", created=created, phase="Failed")
    pod["status"] |= {"reason": "Evicted", "message": message}
    return pod


@pytest.mark.parametrize(
    ("message", "reason", "says"),
    [
        (
            "Pod ephemeral local storage usage exceeds the total limit of containers 2Gi.",
            Reason.DISK_FULL,
            "out of disk",
        ),
        (
            "The node was low on resource: ephemeral-storage. Threshold quantity: 1",
            Reason.DISK_FULL,
            "pvc:// or image://",
        ),
        ("The node had condition: [DiskPressure].", Reason.DISK_FULL, "out of disk"),
        ("The node was low on resource: memory. Threshold quantity: 100Mi", Reason.EVICTED, "spec.resources.memory"),
        ("The node was low on resource: pids. Threshold quantity: 12", Reason.EVICTED, "low on resource: pids"),
    ],
)
def test_an_evicted_pod_is_told_of_while_no_other_serves(message: str, reason: Reason, says: str) -> None:
    (problem,) = seen(evicted(message), make_pod("next", triton={"ready": False, "state": {"running": {}}})).problems
    assert problem.reason == reason
    assert says in problem.message
    # Once another serves, it is history.
    assert seen(evicted(message), make_pod("next", ready_at="10.0.0.1")).problems == ()
    assert seen(evicted(message), make_pod("next", triton={"ready": False, "started": True})).problems == ()


def test_an_eviction_of_an_old_template_says_nothing_of_the_new_one() -> None:
    old, new = evicted("low on resource: ephemeral-storage"), make_pod("next", triton={"ready": False})
    for pod, revision in ((old, "a"), (new, "b")):
        pod["metadata"] = {**pod["metadata"], "labels": {"pod-template-hash": revision}}
    assert seen(old, new).problems == ()
    assert [problem.reason for problem in seen(old).problems] == [Reason.DISK_FULL]


def test_r11_an_evictions_figures_do_not_alter_the_message() -> None:
    message = "The node was low on resource: pids. Threshold quantity: {}, available: {}Ki."
    assert seen(evicted(message.format(12, 3))).problems == seen(evicted(message.format(14, 8))).problems


@pytest.mark.parametrize("pod", [make_pod(phase="Failed", triton=crashed("evicted")), make_pod(deleted=True)])
def test_pods_that_ended_or_go_say_nothing(pod: dict[str, Any]) -> None:
    pod["status"].setdefault("containerStatuses", []).append({"name": "x", **crashed("x")})
    assert seen(pod).problems == ()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "2026-11-30T10:00:00Z E 17 model_lifecycle.cc:642] failed to load 'm'",
            "2026-11-30T10:05:00Z E 23 model_lifecycle.cc:642] failed to load 'm'",
        ),
        (
            "E1130 10:00:00.123456 17 model_lifecycle.cc:642] failed to load 'm'",
            "E1130 10:05:01.654321 23 model_lifecycle.cc:642] failed to load 'm'",
        ),
        ("at 2026-11-30 10:00:00,123 it broke", "at 2026-11-30 10:05:00,456 it broke"),
        ("<Model object at 0x7f12aa>", "<Model object at 0x7faa12>"),
        ("/tmp/tmpab12_cd3/x is broken", "/tmp/tmpzz99zz99/x is broken"),
        (f'failed to start container "{"a" * 64}": x', f'failed to start container "{"b" * 64}": x'),
        ("pod 1b4e28ba-2fa1-11d2-883f-0016d3cca427 x", "pod 1b4e28ba-2fa1-11d2-883f-0016d3cca428 x"),
    ],
)
def test_r11_what_changes_from_try_to_try_does_not_alter_the_message(one: str, other: str) -> None:
    assert problem_of(make_pod(triton=crashed(one))) == problem_of(make_pod(triton=crashed(other)))
    assert problem_of(make_pod(triton=waits("RunContainerError", one))) == problem_of(
        make_pod(triton=waits("RunContainerError", other))
    )


def test_row_79_a_models_digests_stay_in_the_message() -> None:
    said = f"wanted sha256:{'a' * 64}, got sha256:{'b' * 64}"
    assert said in problem_of(make_pod(fetch=crashed(said))).message


def test_of_a_thousand_broken_pods_the_newest_are_explained_and_all_that_wait_are_counted() -> None:
    pods = [
        make_pod(
            f"p{number:04}", created=f"2026-01-01T00:{number // 60:02}:{number % 60:02}Z", triton=crashed(f"c{number}")
        )
        for number in range(1000)
    ]
    pods += [make_pod(f"w{number}", created="2025-01-01T00:00:00Z", unschedulable="no") for number in range(20)]
    seen_of_all = seen(*pods)
    assert len(seen_of_all.problems) == MAX_EXPLAINED
    assert "c999" in seen_of_all.problems[0].message
    assert seen_of_all.pending_pods == 20


def test_a_long_output_keeps_its_end_on_one_line() -> None:
    message = problem_of(make_pod(triton=crashed("noise\n" * 500 + "the cause"))).message
    assert message.endswith("the cause")
    assert "\n" not in message
    assert len(message) < MAX_QUOTE + 60


def test_the_newest_pods_problem_comes_first() -> None:
    old = make_pod("a", created="2026-01-01T00:00:00Z", triton=crashed("old"))
    new = make_pod("b", created="2026-01-02T00:00:00Z", triton=crashed("new"))
    for pods in ((old, new), (new, old)):
        assert [problem.message[-3:] for problem in seen(*pods).problems] == ["new", "old"]


@given(st.permutations(range(6)))
def test_r11_the_order_of_the_cache_does_not_matter(order: list[int]) -> None:
    pods = [make_pod(f"vision-server-{i}", triton=crashed(f"cause {i % 3}")) for i in range(6)]
    assert seen(*(pods[i] for i in order)) == seen(*pods)


def test_many_pods_with_one_cause_make_one_problem_and_are_counted_as_waiting() -> None:
    found = seen(*(make_pod(f"p{i}", unschedulable=NO_GPU.format(n=i + 1)) for i in range(9)))
    assert len(found.problems) == 1
    assert found.pending_pods == 9


@pytest.mark.parametrize(
    ("condition", "reason", "says"),
    [
        (
            {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "exceeded quota: gpus"},
            Reason.SERVER_FAILED,
            "Pods can't be created: exceeded quota: gpus",
        ),
        (
            {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "x"},
            Reason.CANNOT_BECOME_READY,
            "progress deadline",
        ),
    ],
)
@pytest.mark.parametrize("counts", [{"ready": 0}, {"replicas": 0}, {"replicas": 2, "ready": 1}])
def test_what_the_deployment_says_of_pods_it_lacks_is_a_problem(
    condition: dict[str, Any], reason: Reason, says: str, counts: dict[str, Any]
) -> None:
    (problem,) = seen(deployment=make_deployment(**counts, conditions=[condition])).problems
    assert problem.reason == reason
    assert says in problem.message


def test_an_old_word_of_the_deployment_is_no_problem_when_all_serve() -> None:
    deadline = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    assert seen(deployment=make_deployment(conditions=[deadline])).problems == ()


def test_r11_the_pod_that_was_refused_last_does_not_alter_the_message() -> None:
    def refused(pod: str) -> tuple[Problem, ...]:
        message = f'pods "{pod}" is forbidden: exceeded quota: gpus, requested: nvidia.com/gpu=1'
        condition = {"type": "ReplicaFailure", "status": "True", "message": message}
        return seen(deployment=make_deployment(ready=0, conditions=[condition])).problems

    assert refused("vision-server-6d4b75cb6d-hwz7x") == refused("vision-server-6d4b75cb6d-4kq2p")
    assert "exceeded quota: gpus" in refused("vision-server-6d4b75cb6d-hwz7x")[0].message


def test_an_invalid_spec_still_shows_what_runs() -> None:
    pods = [make_pod(unschedulable=NO_GPU.format(n=1))]
    found = observe({"Deployment": [make_deployment(ready=1)], "Pod": pods}, "vision", None)
    assert found.ready == 1
    assert found.problems[0].reason == Reason.UNSCHEDULABLE


def test_row_66_a_pod_that_waits_beside_serving_ones_is_seen() -> None:
    deployment = make_deployment(replicas=2, updated=1, ready=1)
    found = seen(make_pod("old"), make_pod("new", unschedulable=NO_GPU.format(n=1)), deployment=deployment)
    assert not found.rolled_out
    assert (found.ready, found.pending_pods) == (1, 1)
    assert found.problems[0].reason == Reason.NO_FREE_ACCELERATOR


def test_models_are_quoted_as_the_user_named_them() -> None:
    fields = {"models": [make_model(name="odd.name_1")]}
    problem = problem_of(make_pod(triton=crashed("failed to load 'odd.name_1' version 1")), fields)
    assert "'odd.name_1' version 1" in problem.message
