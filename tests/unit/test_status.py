"""The status: what users, GitOps controllers and the next reconcile conclude from it."""

from __future__ import annotations

import copy
import itertools
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from child_makers import make_deployment, make_pod
from conch.api.conditions import MAX_MESSAGE, Condition, ConditionType, Reason
from conch.api.status import InferenceServiceStatus
from conch.reconcile.errors import ReconcileError, Retryable, Stalled, Waiting
from conch.reconcile.observation import Observation, Problem, observe
from conch.reconcile.status import StatusInputs, build_status, first_sight
from conch.workload.deployment import Strategy, template_inputs
from conch.workload.fit import Fit
from kstatus import compute
from makers import make_model, make_service, make_spec, stored

if TYPE_CHECKING:
    from conch.api.inferenceservice import InferenceServiceSpec

NOW, LATER = "2026-11-30T10:00:00Z", "2026-11-30T11:00:00Z"
SPEC = make_spec()
INPUTS = template_inputs(SPEC)
OTHER_SPEC = make_spec({"resources.memory": "8Gi"})

SERVING = Observation(True, 2, 2, True, INPUTS, (), 0)
ROLLING = replace(SERVING, rolled_out=False)
OLD_SERVES = replace(SERVING, template_inputs=template_inputs(OTHER_SPEC))
NOTHING = Observation(False, 0, 0, False, "", (), 0)
STARTING = Observation(True, 1, 0, False, INPUTS, (), 0)
NO_GPU = Problem(Reason.NO_FREE_ACCELERATOR, "A pod waits for 1 nvidia.com/gpu and none is free.")
CRASH = Problem(Reason.SERVER_FAILED, "Triton exited with code 1: bad model")
INVALID = Stalled(Reason.INVALID_SPEC, "spec.models[0].format: is not supported")
CONFLICT = Stalled(Reason.NAME_CONFLICT, "Service vision exists and isn't Conch's")
PREDECESSOR = Waiting(Reason.NAME_CONFLICT, "Service vision belongs to a deleted InferenceService")
REFUSED = Waiting(Reason.API_ERROR, "The API server refuses a child: quota")


@dataclass(frozen=True)
class FakeScaling:
    """A decision as the autoscaler records it."""

    limited: bool = False

    @property
    def metrics_stale(self) -> Condition:
        return Condition(ConditionType.METRICS_STALE, False, Reason.FRESH, "The metrics are fresh.")

    @property
    def scaling_limited(self) -> Condition:
        return Condition(ConditionType.SCALING_LIMITED, self.limited, Reason.MAX_REPLICAS, "The maximum is reached.")

    def to_status(self) -> dict[str, Any]:
        return {"decision": "Hold", "replicas": 2, "message": "Nothing waits."}


def service_at(generation: int = 1, status: dict[str, Any] | None = None) -> dict[str, Any]:
    service = stored(make_service(), generation=generation)
    return service if status is None else {**service, "status": status}


def inputs_of(
    observation: Observation = SERVING,
    *,
    generation: int = 1,
    status: dict[str, Any] | None = None,
    spec: InferenceServiceSpec | None = SPEC,
    error: ReconcileError | None = None,
    **more: Any,
) -> StatusInputs:
    invalid = isinstance(error, Stalled) and error.reason == Reason.INVALID_SPEC
    given_spec = None if invalid else spec
    fields: dict[str, Any] = {"scaling": None, "strategy": None, "free_accelerators": None, **more}
    return StatusInputs(
        service=service_at(generation, status),
        spec=given_spec,
        template_inputs=template_inputs(given_spec) if given_spec else None,
        observation=observation,
        error=error,
        **fields,
    )


def status_of(observation: Observation = SERVING, **fields: Any) -> dict[str, Any]:
    return build_status(inputs_of(observation, **fields), NOW)


def conditions_of(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {condition["type"]: condition for condition in status["conditions"]}


def said(status: dict[str, Any], type_: str) -> tuple[str, str]:
    condition = conditions_of(status)[type_]
    return condition["status"], condition["reason"]


def concluded(status: dict[str, Any], generation: int = 1) -> str:
    return compute(service_at(generation, status))


SETTLED = status_of()


# --- kstatus (rows 56, 58, 59, 60)


@pytest.mark.parametrize(
    ("observation", "fields", "outcome"),
    [
        (SERVING, {}, "Current"),
        (replace(SERVING, ready=1), {}, "Current"),
        (NOTHING, {}, "InProgress"),
        (STARTING, {}, "InProgress"),
        (replace(STARTING, problems=(CRASH,)), {}, "InProgress"),
        (replace(STARTING, problems=(NO_GPU,), pending_pods=1), {}, "InProgress"),
        (ROLLING, {}, "InProgress"),
        (OLD_SERVES, {}, "InProgress"),
        (replace(ROLLING, problems=(NO_GPU,), pending_pods=1), {}, "InProgress"),
        (NOTHING, {"error": INVALID}, "Failed"),
        (SERVING, {"error": INVALID}, "Failed"),
        (NOTHING, {"error": CONFLICT}, "Failed"),
        (NOTHING, {"error": PREDECESSOR}, "InProgress"),
        (SERVING, {"error": REFUSED}, "InProgress"),
        (NOTHING, {"error": Retryable(Reason.API_ERROR, "x")}, "InProgress"),
        (SERVING, {"spec": make_spec(paused=True)}, "Current"),
        (NOTHING, {"spec": make_spec(paused=True)}, "InProgress"),
    ],
)
def test_row_56_row_59_row_60_kstatus_reads_a_new_generation_right(
    observation: Observation, fields: dict[str, Any], outcome: str
) -> None:
    assert concluded(status_of(observation, **fields)) == outcome


@pytest.mark.parametrize(
    ("observation", "fields", "outcome"),
    [
        (replace(SERVING, wanted=9), {}, "Current"),
        (replace(SERVING, wanted=9, problems=(NO_GPU,), pending_pods=7), {}, "Current"),
        (replace(SERVING, rolled_out=False, template_inputs=INPUTS), {}, "Current"),
        (replace(SERVING, ready=0, rolled_out=False, problems=(CRASH,)), {}, "InProgress"),
        (SERVING, {"error": REFUSED}, "Current"),
    ],
)
def test_r10_kstatus_stays_when_scaling_repair_or_failures_come_after_the_rollout(
    observation: Observation, fields: dict[str, Any], outcome: str
) -> None:
    status = status_of(observation, status=SETTLED, **fields)
    assert concluded(status) == outcome
    assert said(status, "Reconciling") == ("False", "Settled")


@pytest.mark.parametrize("old", [SETTLED, status_of(error=INVALID), status_of(NOTHING, error=CONFLICT), {}, None])
def test_r10_first_sight_of_a_generation_is_in_progress_whatever_was_before(old: dict[str, Any] | None) -> None:
    assert concluded(old or {}, generation=2) in {"InProgress", "Current"}
    status = first_sight(service_at(2, old), NOW)
    assert concluded(status, generation=2) == "InProgress"
    assert status["observedGeneration"] == 2
    assert said(status, "Stalled")[0] == "False"


def test_r10_first_sight_leaves_the_rest_of_the_status_and_its_input_alone() -> None:
    old = {**SETTLED, "scaling": {"replicas": 3}}
    before = copy.deepcopy(old)
    status = first_sight(service_at(2, old), LATER)
    assert old == before
    assert status["scaling"] == {"replicas": 3}
    assert status["replicas"] == SETTLED["replicas"]
    assert conditions_of(status)["Ready"] == conditions_of(SETTLED)["Ready"]
    assert conditions_of(status)["Stalled"]["lastTransitionTime"] == NOW
    assert len(status["conditions"]) == len(SETTLED["conditions"])


@given(
    observation=st.sampled_from([SERVING, ROLLING, OLD_SERVES, NOTHING, STARTING]),
    error=st.sampled_from([None, INVALID, CONFLICT, PREDECESSOR, REFUSED]),
    old=st.sampled_from([None, SETTLED]),
    generation=st.integers(1, 3),
    paused=st.booleans(),
)
def test_row_58_observed_generation_is_the_services_own_and_the_two_verdicts_exclude_each_other(
    observation: Observation,
    error: ReconcileError | None,
    old: dict[str, Any] | None,
    generation: int,
    *,
    paused: bool,
) -> None:
    spec = make_spec(paused=paused)
    status = status_of(observation, generation=generation, status=old, error=error, spec=spec)
    assert status["observedGeneration"] == generation
    reconciling, stalled = said(status, "Reconciling")[0], said(status, "Stalled")[0]
    assert (reconciling, stalled) != ("True", "True")
    for type_, condition in conditions_of(status).items():
        if type_ != "Ready":
            assert condition["observedGeneration"] == generation
    assert conditions_of(status)["Ready"]["observedGeneration"] <= generation


# --- Ready


def test_row_59_ready_is_false_in_a_crash_loop_and_says_why() -> None:
    ready = conditions_of(status_of(replace(STARTING, problems=(CRASH,))))["Ready"]
    assert (ready["status"], ready["reason"], ready["message"]) == ("False", "ServerFailed", CRASH.message)


def test_r10_ready_names_the_last_generation_that_is_served() -> None:
    status = status_of()
    assert conditions_of(status)["Ready"]["observedGeneration"] == 1
    rolling = status_of(OLD_SERVES, generation=2, status=status)
    assert said(rolling, "Ready") == ("True", "RollingOut")
    assert conditions_of(rolling)["Ready"]["observedGeneration"] == 1
    down = status_of(replace(OLD_SERVES, ready=0), generation=2, status=rolling)
    assert conditions_of(down)["Ready"]["observedGeneration"] == 1
    back = status_of(OLD_SERVES, generation=2, status=down)
    assert (said(back, "Ready")[0], conditions_of(back)["Ready"]["observedGeneration"]) == ("True", 1)
    served = status_of(SERVING, generation=2, status=back)
    assert conditions_of(served)["Ready"]["observedGeneration"] == 2


def test_r10_a_served_generation_stays_served_through_a_conflict() -> None:
    conflict = status_of(replace(SERVING, rolled_out=False), status=SETTLED, error=CONFLICT)
    assert concluded(conflict) == "Failed"
    after = status_of(replace(SERVING, rolled_out=False), status=conflict)
    assert said(after, "Reconciling") == ("False", "Settled")


def test_r10_nothing_served_yet_is_generation_0() -> None:
    assert conditions_of(status_of(STARTING))["Ready"]["observedGeneration"] == 0


@pytest.mark.parametrize("error", [INVALID, CONFLICT])
def test_r9_an_invalid_spec_leaves_the_old_pods_serving_and_ready(error: Stalled) -> None:
    status = status_of(OLD_SERVES, generation=2, status=SETTLED, error=error)
    assert said(status, "Ready") == ("True", error.reason)
    assert conditions_of(status)["Ready"]["observedGeneration"] == 1
    assert conditions_of(status)["Stalled"]["message"] == error.message
    assert concluded(status, generation=2) == "Failed"


def test_r9_what_heals_without_a_new_spec_is_not_stalled() -> None:
    for error in (PREDECESSOR, REFUSED, Retryable(Reason.API_ERROR, "x")):
        assert said(status_of(NOTHING, error=error), "Stalled") == ("False", "Valid")


def test_a_refused_child_of_a_serving_service_is_told_in_ready() -> None:
    ready = conditions_of(status_of(status=SETTLED, error=REFUSED))["Ready"]
    assert (ready["status"], ready["reason"]) == ("True", "ApiError")
    assert "quota" in ready["message"]


@pytest.mark.parametrize(
    ("observation", "fields", "ready"),
    [
        (SERVING, {}, ("True", "Ready")),
        (ROLLING, {}, ("True", "RollingOut")),
        (NOTHING, {}, ("False", "Starting")),
        (NOTHING, {"error": INVALID}, ("False", "InvalidSpec")),
        (NOTHING, {"error": PREDECESSOR}, ("False", "NameConflict")),
        (NOTHING, {"spec": make_spec(paused=True)}, ("False", "Paused")),
        (replace(SERVING, ready=0, rolled_out=False), {"status": SETTLED}, ("False", "NoReadyReplicas")),
        (replace(STARTING, problems=(NO_GPU,)), {}, ("False", "NoFreeAccelerator")),
    ],
)
def test_ready_has_the_reason_that_helps(
    observation: Observation, fields: dict[str, Any], ready: tuple[str, str]
) -> None:
    assert said(status_of(observation, **fields), "Ready") == ready


def test_row_41_conditions_are_made_anew_each_time() -> None:
    paused = status_of(spec=make_spec(paused=True), generation=2, status=SETTLED)
    assert said(paused, "Reconciling") == ("False", "Paused")
    again = status_of(generation=3, status=paused)
    assert "Paused" not in {condition["reason"] for condition in again["conditions"]}
    foreign = {"type": "Suspended", "status": "True", "reason": "X", "lastTransitionTime": NOW}
    odd = {**SETTLED, "conditions": [*SETTLED["conditions"], foreign]}
    assert set(conditions_of(status_of(status=odd))) == set(ConditionType)


# --- rollouts


def test_r12_row_66_a_rollout_that_finds_no_gpu_is_blocked_and_says_why() -> None:
    strategy = Strategy("Surge", 1, 0, "Only one replica serves.")
    waiting = replace(ROLLING, problems=(NO_GPU,), pending_pods=1)
    status = status_of(waiting, generation=2, status=SETTLED, strategy=strategy)
    blocked = conditions_of(status)["RolloutBlocked"]
    assert (blocked["status"], blocked["reason"]) == ("True", "NoFreeAccelerator")
    assert blocked["message"] == f"The old pods serve on. {NO_GPU.message}"
    assert status["rollout"] == {"strategy": "Surge", "reason": "Only one replica serves."}
    assert said(status, "Ready")[0] == "True"


@pytest.mark.parametrize(
    "observation",
    [
        SERVING,
        ROLLING,
        NOTHING,
        replace(STARTING, problems=(NO_GPU,)),
        replace(SERVING, wanted=3, problems=(NO_GPU,), pending_pods=1),
    ],
)
def test_nothing_else_blocks_a_rollout(observation: Observation) -> None:
    assert said(status_of(observation), "RolloutBlocked") == ("False", "NotBlocked")


def test_the_strategys_reason_stays_after_the_rollout() -> None:
    rollout = {"strategy": "Replace", "reason": "None was free."}
    assert status_of(status={**SETTLED, "rollout": rollout})["rollout"] == rollout


# --- accelerators


def test_row_82_waiting_pods_say_what_they_wait_for_and_what_is_free() -> None:
    waiting = replace(SERVING, wanted=3, problems=(NO_GPU,), pending_pods=1)
    assert status_of(waiting, free_accelerators=0)["gpus"] == {
        "resource": "nvidia.com/gpu",
        "perReplica": 1,
        "waiting": [{"reason": "NoFreeAccelerator", "message": NO_GPU.message}],
        "free": 0,
    }
    assert "free" not in status_of(waiting)["gpus"]


def test_without_waiting_pods_or_an_accelerator_there_is_little_to_say() -> None:
    assert status_of(free_accelerators=4)["gpus"] == {"resource": "nvidia.com/gpu", "perReplica": 1}
    assert "gpus" not in status_of(spec=make_spec({"accelerator.count": 0}))
    assert "gpus" not in status_of(error=INVALID)


# --- models


def test_the_model_that_broke_is_shown_and_the_others_are_not_blamed() -> None:
    spec = make_spec(models=[make_model(name="good"), make_model(name="bad")])
    broken = Problem(Reason.MODEL_LOAD_FAILED, "Model bad …", (("bad", "its file isn't a valid ONNX model"),))
    status = status_of(replace(STARTING, problems=(broken,)), spec=spec)
    assert status["models"] == [
        {"name": "good", "ready": False},
        {"name": "bad", "ready": False, "message": "its file isn't a valid ONNX model"},
    ]
    # While the old pods serve, only the one that broke is known of in the new template.
    rolling = status_of(replace(ROLLING, problems=(broken,)), spec=spec)
    assert rolling["models"] == [{"name": "good"}, {"name": "bad", "ready": False, "message": broken.models[0][1]}]


def test_an_invalid_spec_leaves_what_is_known_of_the_models() -> None:
    old = {**SETTLED, "models": [{"name": "resnet50", "ready": True}], "modelsRevision": "abc"}
    status = status_of(status=old, error=INVALID, generation=2)
    assert (status["models"], status["modelsRevision"]) == (old["models"], "abc")


# --- scaling


def test_the_autoscalers_conditions_and_words_are_carried_over() -> None:
    status = status_of(scaling=FakeScaling(limited=True))
    assert said(status, "ScalingLimited") == ("True", "MaxReplicas")
    assert said(status, "MetricsStale") == ("False", "Fresh")
    assert status["scaling"]["decision"] == "Hold"


def test_row_24_the_last_decision_survives_a_restart_of_the_operator() -> None:
    before = status_of(scaling=FakeScaling())
    after = status_of(status=before)
    assert after == before


# --- churn

OBSERVATIONS = [
    SERVING, ROLLING, OLD_SERVES, NOTHING, STARTING,
    replace(STARTING, problems=(CRASH, NO_GPU), pending_pods=1),
    replace(ROLLING, problems=(NO_GPU,), pending_pods=1),
    replace(SERVING, wanted=5, problems=(NO_GPU,), pending_pods=3),
]  # fmt: skip
ERRORS: list[ReconcileError | None] = [None, INVALID, CONFLICT, PREDECESSOR, REFUSED]
any_inputs = st.builds(
    inputs_of,
    st.sampled_from(OBSERVATIONS),
    generation=st.integers(1, 3),
    status=st.sampled_from(
        [None, {}, SETTLED, *(status_of(o, error=e) for o, e in itertools.product(OBSERVATIONS, ERRORS))]
    ),
    spec=st.sampled_from([SPEC, make_spec(paused=True), make_spec({"accelerator.count": 0}), OTHER_SPEC]),
    error=st.sampled_from(ERRORS),
    scaling=st.sampled_from([None, FakeScaling(), FakeScaling(limited=True)]),
    strategy=st.sampled_from([None, Strategy("Replace", 0, 1, "None is free.")]),
    free_accelerators=st.none() | st.integers(0, 9),
)


@given(any_inputs)
def test_r11_equal_inputs_give_an_equal_status(inputs: StatusInputs) -> None:
    assert build_status(inputs, NOW) == build_status(replace(inputs, service=copy.deepcopy(inputs.service)), NOW)


@given(any_inputs)
def test_r11_a_status_fed_back_is_itself_even_later(inputs: StatusInputs) -> None:
    first = build_status(inputs, NOW)
    fed = replace(inputs, service={**inputs.service, "status": first})
    assert build_status(fed, LATER) == first


@given(any_inputs)
def test_a_status_fits_the_crd(inputs: StatusInputs) -> None:
    InferenceServiceStatus.model_validate(build_status(inputs, NOW), by_alias=True, by_name=False)
    InferenceServiceStatus.model_validate(first_sight(inputs.service, NOW), by_alias=True, by_name=False)


@given(any_inputs)
def test_r11_no_message_holds_a_count_or_an_instant(inputs: StatusInputs) -> None:
    for condition in build_status(inputs, NOW)["conditions"]:
        words = condition["message"].replace("code 1", "").replace("models[0]", "").replace("for 1 nvidia", "")
        assert not re.search(r"\d", words), words


@given(any_inputs)
def test_building_leaves_the_service_alone(inputs: StatusInputs) -> None:
    before = copy.deepcopy(inputs.service)
    build_status(inputs, NOW)
    first_sight(inputs.service, NOW)
    assert inputs.service == before


def test_r11_a_transition_time_moves_with_the_status_only() -> None:
    first = status_of(STARTING)
    crashed = build_status(inputs_of(replace(STARTING, problems=(CRASH,)), status=first), LATER)
    assert conditions_of(crashed)["Ready"]["lastTransitionTime"] == NOW
    served = build_status(inputs_of(SERVING, status=crashed), LATER)
    assert conditions_of(served)["Ready"]["lastTransitionTime"] == LATER
    assert conditions_of(served)["Stalled"]["lastTransitionTime"] == NOW


def test_r11_many_pods_and_many_nodes_write_one_status() -> None:
    def status(nodes: int, pods: int) -> dict[str, Any]:
        scheduler = f"0/{nodes} nodes are available: {nodes} Insufficient nvidia.com/gpu. preemption: 0/{nodes}."
        waiting = [make_pod(f"p{i}", unschedulable=scheduler) for i in range(pods)]
        observation = observe({"Deployment": [make_deployment(wanted=9, ready=1)], "Pod": waiting}, "vision", SPEC)
        return status_of(observation)

    assert status(1, 3) == status(250, 8)


def test_a_message_is_cut_to_what_the_crd_allows() -> None:
    long = Stalled(Reason.INVALID_SPEC, "x" * 5000)
    assert all(len(c["message"]) <= MAX_MESSAGE for c in status_of(error=long)["conditions"])


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_can_come_with_an_error(reason: Reason) -> None:
    for error in (Stalled(reason, "x"), Waiting(reason, "x"), Retryable(reason, "x")):
        status_of(NOTHING, error=error)


# --- capacity


@pytest.mark.parametrize(
    ("verdict", "status"),
    [
        (Fit(True, Reason.SUITABLE_NODES, "The cluster has suitable nodes."), "False"),
        (Fit(False, Reason.NO_SUITABLE_NODE, "No node has x."), "True"),
        (Fit(None, Reason.NODES_UNKNOWN, "It sees no nodes."), "Unknown"),
        (Fit(True, Reason.NODES_AWAITED, "One may come."), "False"),
    ],
)
def test_row_82_whether_a_node_suits_is_a_condition_in_which_unknown_is_a_value(verdict: Fit, status: str) -> None:
    told = status_of(fit=verdict)
    found = conditions_of(told)["CapacityConstrained"]
    assert (found["status"], found["reason"], found["message"]) == (status, str(verdict.reason), verdict.message)
    # A spec that can't be read says nothing of nodes: the last word stands.
    after = conditions_of(status_of(error=INVALID, status=told))["CapacityConstrained"]
    assert (after["status"], after["message"]) == (status, verdict.message)


def test_what_replicas_use_of_an_accelerator_is_told_and_kept_for_the_same_models() -> None:
    told = status_of(memory_used=3 * 2**30 + 5, models_digest="a")
    assert (told["gpus"]["memoryUsed"], told["gpus"]["memoryOf"]) == ("3072Mi", "a")
    InferenceServiceStatus.model_validate({"gpus": told["gpus"]})
    assert status_of(models_digest="a", status=told)["gpus"]["memoryUsed"] == "3072Mi"
    assert "memoryUsed" not in status_of(models_digest="b", status=told)["gpus"]
