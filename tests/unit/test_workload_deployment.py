"""The Deployment: its pod, what an upgrade leaves alone, and how pods are replaced."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from child_makers import make_deployment, make_live, make_wanted
from conch import names
from conch.api.inferenceservice import InferenceServiceSpec
from conch.api.runtime import Runtime
from conch.storage.plan import Plan
from conch.triton import server
from conch.workload import deployment as module
from conch.workload.deployment import (
    RENDERING,
    SURGE_ON_CREATE,
    Images,
    Strategy,
    choose_strategy,
    keeps_template,
    template_inputs,
)
from conch.workload.desired import digest, first_difference
from makers import IMAGES, SHA256, make_model, make_service, make_spec, stored
from pod_security import violations

NEWER = Images(fetch="conch.example/conch:2", triton="triton.example/server:2", pull_policy="Always")
DEPLOYMENT = "Deployment vision-server"
REPLACE = Strategy("Replace", 0, 1, "None is free.")

PVC = make_model(name="a")
IMAGE = make_model(name="b", source={"uri": "image://registry.example/m:1#/model.onnx"})
HTTPS = make_model(name="c", source={"uri": "https://models.example/m.onnx", "digest": SHA256})


def service_of(fields: dict[str, Any] | None = None, **overrides: Any) -> dict[str, Any]:
    return stored(make_service(fields, **overrides))


def wanted_of(
    service: dict[str, Any] | None = None, *, live: dict[str, Any] | None = None, images: Images = IMAGES,
    strategy: Strategy = SURGE_ON_CREATE, allow_code: bool = True,
) -> dict[str, Any]:  # fmt: skip
    service = service_of() if service is None else service
    return make_wanted(service, live=live, images=images, strategy=strategy, allow_code=allow_code)[DEPLOYMENT]


def pod_of(fields: dict[str, Any] | None = None, **overrides: Any) -> dict[str, Any]:
    pod: dict[str, Any] = wanted_of(service_of(fields, **overrides))["spec"]["template"]["spec"]
    return pod


def containers_of(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {container["name"]: container for container in [*pod["initContainers"], *pod["containers"]]}


def images_of(child: dict[str, Any]) -> tuple[str, str]:
    containers = containers_of(child["spec"]["template"]["spec"])
    return containers["fetch"]["image"], containers["triton"]["image"]


# --- security


@pytest.mark.parametrize("models", [[PVC], [IMAGE], [HTTPS], [PVC, IMAGE, HTTPS]])
@pytest.mark.parametrize("gpus", [0, 1, 4])
def test_the_pod_meets_the_restricted_pod_security_standard(models: list[dict[str, Any]], gpus: int) -> None:
    assert violations(pod_of({"accelerator.count": gpus}, models=models)) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"hostNetwork": True}, "hostNetwork"),
        ({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}, "volume v: hostPath"),
        ({"securityContext": {"runAsUser": 0}}, "pod: runAsUser 0"),
        ({"containers": [{"name": "c"}]}, "c: runAsNonRoot"),
        ({"containers": [{"name": "c", "securityContext": {"privileged": True}}]}, "c: privileged"),
        ({"containers": [{"name": "c", "ports": [{"hostPort": 1}]}]}, "c: hostPort"),
    ],
)
def test_the_check_of_the_standard_finds_faults(change: dict[str, Any], fault: str) -> None:
    assert fault in violations(change)


def test_both_containers_run_as_a_user_on_a_read_only_root() -> None:
    pod = pod_of()
    assert set(containers_of(pod)) == {"fetch", "triton"}
    for container in containers_of(pod).values():
        context = container["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] > 0
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}


def test_a_large_volume_is_not_given_to_the_user_anew_at_each_start() -> None:
    assert pod_of()["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_no_token_reaches_a_pod() -> None:
    children = make_wanted(service_of())
    pod = children[DEPLOYMENT]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["serviceAccountName"] == "vision-identity"
    assert children["ServiceAccount vision-identity"]["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False


def test_the_cloud_identity_for_fetching_is_not_given_to_the_code_of_the_models() -> None:
    def annotations(**source: Any) -> dict[str, str]:
        fields = {"models[0].source": {"uri": "s3://models/m", **source}, "runtime.serviceAccountName": "reader"}
        template = make_wanted(service_of(fields))[DEPLOYMENT]["spec"]["template"]
        found: dict[str, str] = template["metadata"]["annotations"]
        return found

    assert annotations(identity="ServiceAccount")["eks.amazonaws.com/skip-containers"] == "triton"
    # Without such a source the account was named for Triton's own sake.
    assert "eks.amazonaws.com/skip-containers" not in annotations()


HOSTILE = "';$(reboot)`{{x}}`"


def test_no_users_text_reaches_a_command() -> None:
    plain = containers_of(pod_of(models=[PVC]))
    loud = containers_of(
        pod_of(
            {"runtime.image": "other.example/server:9", "placement.nodeSelector": {"pool": "other"}},
            models=[
                make_model(
                    name="other",
                    source={"uri": "pvc://other-claim/some/other=path"},
                    parameters={"key": HOSTILE},
                    inputs=[{"name": "in[0]", "dataType": "FP32", "dims": [1]}],
                )
            ],
        )
    )
    for name in ("fetch", "triton"):
        assert loud[name]["command"] == plain[name]["command"]
        assert loud[name].get("args") == plain[name].get("args")
        assert loud[name].get("lifecycle") == plain[name].get("lifecycle")
        assert loud[name].get("env") == plain[name].get("env")


def test_a_users_text_stands_in_the_plan_as_data_only() -> None:
    template = wanted_of(service_of(models=[make_model(parameters={"key": HOSTILE})]))["spec"]["template"]
    annotations = template["metadata"]["annotations"]
    plan = Plan.from_json(annotations.pop(names.PLAN_ANNOTATION))
    assert "reboot" in plan.models[0].config
    assert "reboot" not in json.dumps(template)


# --- the pod


def test_row_7_the_gpu_is_a_limit_of_the_container() -> None:
    assert containers_of(pod_of({"accelerator.count": 2}))["triton"]["resources"]["limits"]["nvidia.com/gpu"] == "2"


def test_row_83_a_mig_slice_is_asked_for_by_its_own_resource() -> None:
    pod = pod_of({"accelerator.resource": "nvidia.com/mig-1g.5gb"})
    assert containers_of(pod)["triton"]["resources"]["limits"]["nvidia.com/mig-1g.5gb"] == "1"
    assert "nvidia.com/gpu" not in json.dumps([container["resources"] for container in containers_of(pod).values()])


CLAIM: dict[str, Any] = {
    "deviceClass": "gpu.nvidia.com",
    "count": 2,
    "selectors": ["device.attributes['gpu.nvidia.com'].productName == 'NVIDIA L4' && {{ x }}"],
}


def test_row_83_a_claim_is_a_template_of_its_own_to_which_the_pod_refers() -> None:
    children = make_wanted(service_of({"accelerator.claim": CLAIM}))
    template = next(child for child in children.values() if child["kind"] == "ResourceClaimTemplate")
    request = template["spec"]["spec"]["devices"]["requests"][0]
    assert request["exactly"] == {
        "deviceClassName": "gpu.nvidia.com",
        "allocationMode": "ExactCount",
        "count": 2,
        "selectors": [{"cel": {"expression": CLAIM["selectors"][0]}}],
    }
    pod = children["Deployment vision-server"]["spec"]["template"]["spec"]
    assert pod["resourceClaims"] == [
        {"name": "accelerators", "resourceClaimTemplateName": template["metadata"]["name"]}
    ]
    resources = containers_of(pod)["triton"]["resources"]
    assert resources["claims"] == [{"name": "accelerators"}]
    assert not any("/" in name for part in ("requests", "limits") for name in resources[part])
    assert next(iter(children)) == f"ResourceClaimTemplate {template['metadata']['name']}"


def test_row_83_another_claim_has_another_name_and_the_same_one_the_same() -> None:
    def name_of(**changes: Any) -> str:
        return str(
            pod_of({"accelerator.claim": {**CLAIM, **changes}})["resourceClaims"][0]["resourceClaimTemplateName"]
        )

    assert name_of() == name_of()
    assert len({name_of(), name_of(count=1), name_of(deviceClass="mig.nvidia.com"), name_of(selectors=["true"])}) == 4
    longest = make_wanted({**service_of({"accelerator.claim": CLAIM}), "metadata": {
        "name": "a" * names.MAX_SERVICE_NAME, "namespace": "default", "uid": "u",
    }})  # fmt: skip
    assert all(len(child["metadata"]["name"]) <= 63 for child in longest.values())


def test_a_service_without_an_accelerator_asks_for_none_and_needs_no_product() -> None:
    pod = pod_of({"accelerator.count": 0, "accelerator.products": ["NVIDIA-L4"]})
    assert "nvidia.com/gpu" not in json.dumps([container["resources"] for container in containers_of(pod).values()])
    assert "affinity" not in pod


def test_row_72_the_grace_outlasts_the_drain_and_tritons_exit() -> None:
    pod = pod_of()
    triton = containers_of(pod)["triton"]
    drain = triton["lifecycle"]["preStop"]["exec"]["command"]
    bound_s = int(drain[drain.index("--bound") + 1])
    removal_s = int(drain[drain.index("--endpoint-removal") + 1])
    exit_s = next(int(arg.partition("=")[2]) for arg in triton["args"] if arg.startswith("--exit-timeout-secs="))
    assert pod["terminationGracePeriodSeconds"] >= removal_s + bound_s + exit_s + 5
    assert pod["terminationGracePeriodSeconds"] == server.GRACE_S


def test_every_mount_has_a_volume_and_every_volume_a_mount() -> None:
    pod = pod_of(models=[PVC, IMAGE, HTTPS])
    volumes = {volume["name"] for volume in pod["volumes"]}
    mounts = [mount for container in containers_of(pod).values() for mount in container["volumeMounts"]]
    assert {mount["name"] for mount in mounts} == volumes
    for container in containers_of(pod).values():
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert len(paths) == len(set(paths))


def test_a_users_service_account_gives_no_token_and_triton_alone_has_the_authorities_of_redis() -> None:
    redis = {"host": "redis", "caRef": {"name": "ca"}, "secretRef": {"name": "auth"}}
    pod = pod_of({"runtime": {"serviceAccountName": "team-a", "responseCache": {"redis": redis}}})
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("team-a", False)
    assert violations(pod) == []
    assert "redis-authorities" in {volume["name"] for volume in pod["volumes"]}
    fetch, triton = pod["initContainers"][0], pod["containers"][0]
    assert "redis-authorities" in {mount["name"] for mount in triton["volumeMounts"]}
    assert "redis-authorities" not in {mount["name"] for mount in fetch["volumeMounts"]}
    assert not any("REDIS" in variable["name"] for variable in fetch.get("env", []))


def test_volume_sources_are_mounted_read_only_at_the_same_place_in_both_containers() -> None:
    pod = pod_of(models=[PVC, HTTPS, IMAGE])
    for container in containers_of(pod).values():
        sources = {m["name"]: m for m in container["volumeMounts"] if m["name"].startswith("source-")}
        assert {name: mount["mountPath"] for name, mount in sources.items()} == {
            "source-0": "/sources/0",
            "source-2": "/sources/2",
        }
        assert all(mount["readOnly"] for mount in sources.values())
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["source-0"]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert volumes["source-2"]["image"] == {"reference": "registry.example/m:1", "pullPolicy": "IfNotPresent"}


def test_row_79_the_plan_in_the_template_names_source_digest_and_place() -> None:
    template = wanted_of(service_of(models=[PVC, HTTPS, IMAGE]))["spec"]["template"]
    plan = Plan.from_json(template["metadata"]["annotations"][names.PLAN_ANNOTATION])
    assert [(m.name, m.mount, m.path, m.digest) for m in plan.models] == [
        ("a", "/sources/0", "/resnet50", None),
        ("c", None, None, SHA256),
        ("b", "/sources/2", "/model.onnx", None),
    ]


def test_the_plan_file_is_where_fetch_reads_it() -> None:
    pod = pod_of()
    fetch = containers_of(pod)["fetch"]
    mount = next(m["mountPath"] for m in fetch["volumeMounts"] if m["name"] == "plan")
    item = next(v for v in pod["volumes"] if v["name"] == "plan")["downwardAPI"]["items"][0]
    assert fetch["args"][fetch["args"].index("--plan") + 1] == f"{mount}/{item['path']}"
    assert item["fieldRef"]["fieldPath"] == f"metadata.annotations['{names.PLAN_ANNOTATION}']"


@pytest.mark.parametrize(
    ("fields", "keys"),
    [
        ({}, ["nvidia.com/gpu"]),
        ({"accelerator.resource": "nvidia.com/mig-1g.5gb"}, ["nvidia.com/gpu", "nvidia.com/mig-1g.5gb"]),
        ({"accelerator.resource": "amd.com/gpu"}, ["nvidia.com/gpu", "amd.com/gpu"]),
        ({"accelerator.claim": CLAIM}, ["nvidia.com/gpu"]),
        ({"accelerator.count": 0}, []),
        ({"placement.tolerateAcceleratorTaints": False}, []),
    ],
)
def test_the_usual_taints_are_tolerated_with_an_accelerator_and_only_then(
    fields: dict[str, Any], keys: list[str]
) -> None:
    assert pod_of(fields).get("tolerations", []) == [
        {"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in keys
    ]


MAJOR, MINOR = "nvidia.com/gpu.compute.major", "nvidia.com/gpu.compute.minor"
UNSAID: list[tuple[str, str, list[str]]] = [(MAJOR, "DoesNotExist", [])]
BUILT_FOR_89 = {"models[0].source.engine": {"computeCapability": "8.9"}}
TERMS: list[tuple[dict[str, Any], list[list[tuple[str, str, list[str]]]]]] = [
    ({}, []),
    ({"accelerator.products": ["A", "B"]}, [[("nvidia.com/gpu.product", "In", ["A", "B"])]]),
    ({"accelerator.memory": "24Gi"}, [[("nvidia.com/gpu.memory", "Gt", ["24575"])]]),
    ({"accelerator.memory": "24G"}, [[("nvidia.com/gpu.memory", "Gt", ["22888"])]]),
    (
        {"accelerator": {"resource": "nvidia.com/mig-1g.5gb", "memory": "4Gi"}},
        [[("nvidia.com/mig-1g.5gb.memory", "Gt", ["4095"])]],
    ),
    (
        {"accelerator": {"resource": "nvidia.com/gpu.shared", "memory": "4Gi"}},
        [[("nvidia.com/gpu.memory", "Gt", ["4095"])]],
    ),
    ({"accelerator.computeCapability": "8.0"}, [[(MAJOR, "Gt", ["7"])]]),
    (
        {"accelerator.computeCapability": "8.6"},
        [[(MAJOR, "Gt", ["8"])], [(MAJOR, "In", ["8"]), (MINOR, "Gt", ["5"])]],
    ),
    (
        {"accelerator": {"products": ["A"], "memory": "1Gi", "computeCapability": "8.6"}},
        [
            [("nvidia.com/gpu.product", "In", ["A"]), ("nvidia.com/gpu.memory", "Gt", ["1023"]), (MAJOR, "Gt", ["8"])],
            [
                ("nvidia.com/gpu.product", "In", ["A"]),
                ("nvidia.com/gpu.memory", "Gt", ["1023"]),
                (MAJOR, "In", ["8"]),
                (MINOR, "Gt", ["5"]),
            ],
        ],
    ),
    # What only an engine asks for, a node that says nothing may have.
    (BUILT_FOR_89, [[(MAJOR, "In", ["8"]), (MINOR, "In", ["9"])], UNSAID]),
    ({**BUILT_FOR_89, "accelerator.computeCapability": "8.0"}, [[(MAJOR, "In", ["8"]), (MINOR, "In", ["9"])]]),
    (
        {"models[0].source.engine": {"computeCapability": "8.9", "hardwareCompatibility": "AmperePlus"}},
        [[(MAJOR, "Gt", ["7"])], UNSAID],
    ),
    ({"models[0].source.engine": {"platform": "linux/arm64"}}, [[("kubernetes.io/arch", "In", ["arm64"])]]),
    ({"accelerator": {"count": 0, "memory": "1Gi"}}, []),
    ({**BUILT_FOR_89, "accelerator.claim": CLAIM}, []),
]


@pytest.mark.parametrize(("fields", "terms"), TERMS)
def test_row_80_and_83_what_an_accelerator_must_have_is_asked_of_the_nodes_labels(
    fields: dict[str, Any], terms: list[list[tuple[str, str, list[str]]]]
) -> None:
    required = {
        "nodeSelectorTerms": [
            {
                "matchExpressions": [
                    {"key": key, "operator": how, **({"values": values} if values else {})} for key, how, values in term
                ]
            }
            for term in terms
        ]
    }
    wanted = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}} if terms else None
    assert pod_of(fields).get("affinity") == wanted


def test_placement_is_carried_over_and_leaves_nothing_empty() -> None:
    pod = pod_of(
        {"accelerator.products": ["NVIDIA-L4", "NVIDIA-A10"]},
        placement={
            "nodeSelector": {"pool": "gpu"},
            "tolerations": [
                {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
                {"key": "pool", "value": "gpu"},
                {"operator": "Exists"},
            ],
            "topologySpread": "Node",
            "priorityClassName": "high",
            "runtimeClassName": "nvidia",
        },
    )
    assert pod["nodeSelector"] == {"pool": "gpu"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "pool", "value": "gpu"},
        {"operator": "Exists"},
    ]
    assert (pod["priorityClassName"], pod["runtimeClassName"]) == ("high", "nvidia")
    assert pod["topologySpreadConstraints"][0]["topologyKey"] == "kubernetes.io/hostname"
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms[0]["matchExpressions"][0]["values"] == ["NVIDIA-L4", "NVIDIA-A10"]
    assert "topologySpreadConstraints" not in pod_of({"placement.topologySpread": "None"})


@pytest.mark.parametrize(("startup", "at_least"), [("1s", 603), ("60s", 780), ("20m", 4200)])
def test_row_45_the_progress_deadline_outlasts_start_up_and_a_new_node(startup: str, at_least: int) -> None:
    spec = wanted_of(service_of({"scaling.startup": startup}))["spec"]
    assert spec["progressDeadlineSeconds"] >= at_least
    triton = containers_of(spec["template"]["spec"])["triton"]
    probe = triton["startupProbe"]
    assert spec["progressDeadlineSeconds"] > probe["periodSeconds"] * probe["failureThreshold"]


# --- replicas


def test_r1_row_35_row_38_row_40_the_builder_never_says_replicas() -> None:
    live = make_deployment(wanted=7)
    for child in (wanted_of(), wanted_of(live=live), wanted_of(service_of({"scaling.minReplicas": 3}), live=live)):
        assert "replicas" not in child["spec"]


def test_row_32_scaling_alters_neither_template_nor_inputs() -> None:
    before = wanted_of()
    after = wanted_of(service_of(scaling={"minReplicas": 3, "maxReplicas": 9, "mode": "External"}))
    assert digest(before) == digest(after)


# --- upgrades


def test_r7_a_new_operator_version_with_other_images_leaves_the_template_alone() -> None:
    live = make_deployment()
    after = wanted_of(live=live, images=NEWER)
    assert images_of(after) == (IMAGES.fetch, IMAGES.triton)
    assert after["spec"]["template"] == wanted_of()["spec"]["template"]
    assert first_difference(live, after) is None


def test_r7_another_rendering_keeps_the_live_template(monkeypatch: pytest.MonkeyPatch) -> None:
    live = make_deployment()
    live["spec"]["template"]["spec"]["containers"][0]["env"] = [{"name": "OLD", "value": "1"}]
    monkeypatch.setattr(module, "RENDERING", "next")
    after = wanted_of(live=live, images=NEWER)
    assert after["spec"]["template"] == live["spec"]["template"]
    assert after["metadata"]["annotations"][names.RENDERING_ANNOTATION] == RENDERING
    again = wanted_of(live=make_live(after), images=NEWER)
    assert again["spec"]["template"] == live["spec"]["template"]


def test_r7_a_changed_spec_takes_the_new_images_and_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    live = make_deployment()
    monkeypatch.setattr(module, "RENDERING", "next")
    after = wanted_of(service_of({"resources.memory": "8Gi"}), live=live, images=NEWER)
    assert images_of(after) == (NEWER.fetch, NEWER.triton)
    assert after["metadata"]["annotations"][names.RENDERING_ANNOTATION] == "next"


@pytest.mark.parametrize(
    ("overrides", "rolls"),
    [
        ({"scaling.minReplicas": 2}, False),
        ({"scaling.scaleDown": {"hold": "1m"}}, False),
        ({"scaling.mode": "External"}, False),
        ({"paused": True}, False),
        ({"accelerator.count": 1}, False),
        ({"resources": {"cpu": "1"}}, False),
        ({"models[0].maxBatchSize": 8}, True),
        ({"models[0].parameters": {"a": "b"}}, True),
        ({"models[0].source.digest": SHA256}, True),
        ({"runtime.image": "own.example/server:1"}, True),
        ({"runtime.sharedMemory": "1Gi"}, True),
        ({"accelerator.count": 2}, True),
        ({"accelerator.products": ["NVIDIA-L4"]}, True),
        ({"accelerator.memory": "8Gi"}, True),
        ({"accelerator.claim": CLAIM}, True),
        ({"placement.tolerateAcceleratorTaints": False}, True),
        ({"resources.cpu": "2"}, True),
        ({"placement.nodeSelector": {"pool": "gpu"}}, True),
        ({"scaling.startup": "2m"}, True),
    ],
)
def test_r7_only_what_the_template_is_made_from_counts_as_a_change(overrides: dict[str, Any], *, rolls: bool) -> None:
    assert keeps_template(make_spec(overrides), make_deployment()) is not rolls


def test_r7_a_default_that_is_written_out_is_no_change() -> None:
    # A later version's CRD fills in a field that this one doesn't know; neither may roll the pods.
    written = make_spec(
        runtime={"sharedMemory": "256Mi"}, accelerator={"resource": "nvidia.com/gpu", "count": 1, "products": []}
    )
    assert template_inputs(written) == template_inputs(make_spec())


class NextRuntime(Runtime):
    """The runtime of a later version, with a field that this one doesn't have."""

    warm_pages: bool = Field(True, description="A new field.")


class NextSpec(InferenceServiceSpec):
    """The spec of a later version."""

    runtime: NextRuntime = NextRuntime()


def test_r7_a_field_that_a_later_version_adds_is_no_change() -> None:
    for fields in ({}, {"runtime.sharedMemory": "1Gi"}):
        later = NextSpec.model_validate(make_service(fields)["spec"])
        assert later.runtime.warm_pages
        assert template_inputs(later) == template_inputs(make_spec(fields))


def test_a_users_own_image_stays_the_users() -> None:
    service = service_of({"runtime.image": "own.example/server:1"})
    live = make_deployment(service)
    assert images_of(wanted_of(service, live=live, images=NEWER)) == (IMAGES.fetch, "own.example/server:1")
    # Dropping the field is a change of the spec: then the setting of today counts.
    assert images_of(wanted_of(live=live, images=NEWER)) == (NEWER.fetch, NEWER.triton)


@pytest.mark.parametrize("container", ["fetch", "triton"])
def test_r8_row_42_an_image_edited_by_hand_is_put_back(container: str) -> None:
    live = make_deployment()
    containers_of(live["spec"]["template"]["spec"])[container]["image"] = "edited.example/x:9"
    after = wanted_of(live=live, images=NEWER)
    assert images_of(after) == (IMAGES.fetch, IMAGES.triton)
    kind = "initContainers" if container == "fetch" else "containers"
    assert first_difference(live, after) == f"spec.template.spec.{kind}[{container}].image"
    assert after["metadata"]["annotations"][names.DESIRED_ANNOTATION] == digest_of(live)


def test_r8_rollout_numbers_edited_by_hand_are_put_back() -> None:
    live = make_deployment(strategy=REPLACE)
    live["spec"]["strategy"]["rollingUpdate"] = {"maxSurge": "50%", "maxUnavailable": 0}
    assert first_difference(live, wanted_of(live=live)) == "spec.strategy.rollingUpdate.maxSurge"


def test_r7_row_80_the_images_tensorrt_version_travels_in_the_plan_and_stays_with_the_template() -> None:
    def version(deployment: dict[str, Any]) -> str | None:
        annotations = deployment["spec"]["template"]["metadata"]["annotations"]
        return Plan.from_json(annotations[names.PLAN_ANNOTATION]).tensor_rt

    october = Images("conch.example/conch:1", "nvcr.io/nvidia/tritonserver:24.10-py3")
    august = Images("conch.example/conch:2", "nvcr.io/nvidia/tritonserver:24.08-py3")
    service = service_of({"models[0].format": "TensorRT"})
    first = wanted_of(service, images=october)
    assert version(first) == "10.5.0"
    assert version(wanted_of(images=october)) is None, "only an engine needs it"
    live = make_live(first)
    assert wanted_of(service, live=live, images=august)["spec"]["template"] == first["spec"]["template"]
    del live["metadata"]["annotations"][names.CHOSEN_ANNOTATION]
    assert wanted_of(service, live=live, images=august)["spec"]["template"] == first["spec"]["template"]


def test_r7_whether_models_may_bring_code_travels_in_the_plan_and_stays_with_the_template() -> None:
    def allowed(deployment: dict[str, Any]) -> bool:
        annotations = deployment["spec"]["template"]["metadata"]["annotations"]
        return Plan.from_json(annotations[names.PLAN_ANNOTATION]).allow_code

    for before in (True, False):
        first = wanted_of(allow_code=before)
        assert allowed(first) is before
        live = make_live(first)
        after = not before
        assert wanted_of(live=live, allow_code=after)["spec"]["template"] == first["spec"]["template"]
        changed = service_of({"resources.cpu": "2"})
        assert allowed(wanted_of(changed, live=live, allow_code=after)) is after
        del live["metadata"]["annotations"][names.CHOSEN_ANNOTATION]
        assert wanted_of(live=live, allow_code=after)["spec"]["template"] == first["spec"]["template"]


@pytest.mark.parametrize("kept", [None, "", "no json", "[]", '{"images": 3}', '{"images": {}, "max_surge": 1}'])
def test_row_61_a_lost_annotation_rolls_nothing(kept: str | None) -> None:
    live = make_deployment(strategy=REPLACE)
    if kept is None:
        del live["metadata"]["annotations"][names.CHOSEN_ANNOTATION]
    else:
        live["metadata"]["annotations"][names.CHOSEN_ANNOTATION] = kept
    after = wanted_of(live=live, images=NEWER)
    assert after["spec"]["template"] == wanted_of()["spec"]["template"]
    assert after["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_row_61_an_object_replaced_without_its_annotations_gets_the_same_template_again() -> None:
    live = make_deployment()
    del live["metadata"]["annotations"]
    assert wanted_of(live=live)["spec"]["template"] == wanted_of()["spec"]["template"]


@pytest.mark.parametrize("rolling_update", [None, {"maxSurge": "25%", "maxUnavailable": "25%"}, {"maxSurge": 0}])
def test_a_foreign_strategy_is_replaced_by_a_chosen_one(rolling_update: dict[str, Any] | None) -> None:
    live = make_deployment()
    del live["metadata"]["annotations"][names.CHOSEN_ANNOTATION]
    live["spec"]["strategy"] = {"type": "Recreate", "rollingUpdate": rolling_update}
    assert wanted_of(live=live)["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def digest_of(child: dict[str, Any]) -> str:
    return str(child["metadata"]["annotations"][names.DESIRED_ANNOTATION])


# --- replacing pods


@pytest.mark.parametrize(
    ("count", "replicas", "free", "name", "says"),
    [
        (1, 3, 1, "Surge", "A matching nvidia.com/gpu is free"),
        (1, 3, 0, "Replace", "one at a time"),
        (2, 3, 1, "Replace", "one at a time"),
        (2, 3, 2, "Surge", "is free"),
        (1, 3, None, "Surge", "unknown"),
        (1, 1, None, "Surge", "unknown"),
        (1, 1, 0, "Surge", "only one replica"),
        (1, 1, 1, "Surge", "is free"),
        (0, 1, None, "Surge", "no accelerator"),
        (0, 5, 0, "Surge", "no accelerator"),
    ],
)
def test_r12_row_66_the_strategy_follows_what_is_free_and_says_why(
    count: int, replicas: int, free: int | None, name: str, says: str
) -> None:
    chosen = choose_strategy(make_spec({"accelerator.count": count}), replicas=replicas, free=free)
    assert chosen.name == name
    assert says in chosen.reason
    assert (chosen.max_surge, chosen.max_unavailable) == ((1, 0) if name == "Surge" else (0, 1))


@given(count=st.integers(0, 16), replicas=st.integers(0, 1000), free=st.none() | st.integers(0, 64))
def test_r12_a_strategy_is_never_refused_and_never_takes_the_last_pod(
    count: int, replicas: int, free: int | None
) -> None:
    chosen = choose_strategy(make_spec({"accelerator.count": count}), replicas=replicas, free=free)
    # The API server answers 422 to surge 0 with unavailable 0.
    assert chosen.max_surge + chosen.max_unavailable == 1
    assert chosen.max_unavailable == 0 or replicas > 1


def test_r12_the_numbers_stay_during_a_rollout() -> None:
    live = make_deployment(strategy=REPLACE)
    after = wanted_of(live=live, strategy=dataclasses.replace(SURGE_ON_CREATE))
    assert after["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
    }
    assert first_difference(live, after) is None


def test_row_68_a_revert_is_a_rollout_under_the_rules_of_its_own_moment() -> None:
    first = make_deployment()
    changed = make_live(wanted_of(service_of({"resources.memory": "8Gi"}), live=first, strategy=SURGE_ON_CREATE))
    back = wanted_of(live=changed, strategy=REPLACE)
    assert back["spec"]["template"] == wanted_of()["spec"]["template"]
    assert back["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_the_builder_leaves_its_inputs_alone() -> None:
    live = make_deployment()
    before = copy.deepcopy(live)
    wanted_of(live=live, images=NEWER)
    assert live == before
