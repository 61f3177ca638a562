"""What the model cache adds to a pod, and that it adds nothing where nothing is downloaded."""

from typing import Any

import pytest

from conch.storage.plan import Plan
from conch.workload.deployment import Images, pod_template
from conch.workload.modelcache import FOLDER, cache_environment, cache_mounts, cache_volumes, planned_cache
from makers import SHA256, make_model, make_spec
from pod_security import violations

DOWNLOAD = make_model(source={"uri": "https://models.example/m.onnx", "digest": SHA256})
CLAIM: dict[str, Any] = {"claimName": "models", "size": "1Gi"}
HOST: dict[str, Any] = {"hostPath": "/var/lib/conch", "size": "500Mi"}
IMAGES = Images("fetch:1", "triton:1")


def template(cache: dict[str, Any] | None, model: dict[str, Any] = DOWNLOAD) -> dict[str, Any]:
    return pod_template("vision", make_spec({"runtime.modelCache": cache}, models=[model]), IMAGES)


def test_a_claim_is_mounted_by_the_init_container_only_and_stays_restricted() -> None:
    pod = template(CLAIM)["spec"]
    volumes = [volume for volume in pod["volumes"] if volume["name"] == "model-cache"]
    assert volumes == [{"name": "model-cache", "persistentVolumeClaim": {"claimName": "models"}}]
    assert {"name": "model-cache", "mountPath": FOLDER} in pod["initContainers"][0]["volumeMounts"]
    assert "model-cache" not in str(pod["containers"])
    assert violations(pod) == []


def test_a_node_s_folder_breaks_restricted_and_keeps_namespaces_apart() -> None:
    pod = template(HOST)["spec"]
    volume = next(volume for volume in pod["volumes"] if volume["name"] == "model-cache")
    assert volume["hostPath"] == {"path": "/var/lib/conch", "type": "DirectoryOrCreate"}
    assert violations(pod) == ["volume model-cache: hostPath"]
    assert pod["initContainers"][0]["env"] == [
        {"name": "CONCH_CACHE_TENANT", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}
    ]


def test_the_plan_says_where_it_is_and_how_large_it_may_be() -> None:
    plan = Plan.from_json(template(HOST)["metadata"]["annotations"]["conch.dev/model-plan"])
    assert plan.cache is not None
    assert (plan.cache.path, plan.cache.size_bytes) == (FOLDER, 500 << 20)


@pytest.mark.parametrize(
    ("cache", "model"),
    [(None, DOWNLOAD), (CLAIM, make_model()), (HOST, make_model())],
)
def test_nothing_is_added_without_a_cache_or_without_a_download(
    cache: dict[str, Any] | None, model: dict[str, Any]
) -> None:
    spec = make_spec({"runtime.modelCache": cache}, models=[model])
    assert planned_cache(spec) is None
    assert cache_volumes(spec) == cache_mounts(spec) == cache_environment(spec) == []
    assert template(cache, model)["spec"] == template(None, model)["spec"]
