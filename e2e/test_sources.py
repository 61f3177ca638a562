"""Models from an S3 store, an OCI registry and a node's cache into real Triton pods, and what is said of faults."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import trustme
import yaml

from conch import names
from conch.storage.digest import lines_digest
from oci_registry import TITLE, Registry, registry
from operators import OPERATOR_IMAGE, ROOT, wait_until
from services import Service, condition, restricted_namespace
from store_servers import Reply, S3Server, as_large_as_promised, between, s3_server, silent_for_ever

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sandbox import AnyRegion
    from store_servers import Between, BetweenHandler

pytestmark = pytest.mark.sandbox

MODEL = ROOT / "e2e" / "sandbox" / "images" / "filetype" / "models" / "greeting"
FILES = {str(path.relative_to(MODEL)): path.read_bytes() for path in MODEL.rglob("*.py")}
DIGEST = lines_digest({name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()})
BUCKET = "models"
LARGEST = 10**15
DENIAL = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


def model(source: dict[str, Any], name: str = "greeting") -> dict[str, Any]:
    tensor = {"dataType": "STRING", "dims": [1]}
    return {
        "name": name,
        "format": "Python",
        "source": source,
        "inputs": [{"name": "name", **tensor}],
        "outputs": [{"name": "words", **tensor}],
        "instances": {"kind": "CPU"},
    }


def deny(handler: BetweenHandler, _reply: Reply) -> None:
    handler.send(Reply(403, {"Content-Length": str(len(DENIAL))}, DENIAL))


class Stores(NamedTuple):
    """All on the node, where pods reach them by its address."""

    store: S3Server
    images: Registry
    denying: Between
    boundless: Between
    """The same store, but its objects are larger than any disk."""


@pytest.fixture
def stores(quick_operator: AnyRegion, tmp_path: Path) -> Iterator[Stores]:
    """Two hold the model, two stand before the first and spoil it."""
    region = quick_operator
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    certificate = authority.issue_cert(region.address)
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "server.crt"))
    certificate.private_key_pem.write_to_path(str(tmp_path / "server.key"))
    with contextlib.ExitStack() as servers:
        with region.network():
            store = servers.enter_context(s3_server(listen="0.0.0.0"))
            images = servers.enter_context(
                registry(tmp_path, tmp_path / "registry", address=region.address, listen="0.0.0.0")
            )
            denying = servers.enter_context(between(store, every=deny, listen="0.0.0.0"))
            boundless = servers.enter_context(between(store, every=as_large_as_promised(LARGEST), listen="0.0.0.0"))
            store.make_bucket(BUCKET)
            for name, data in FILES.items():
                store.put(BUCKET, f"greeting/{name}", data)
        yield Stores(store, images, denying, boundless)


def test_models_come_from_an_s3_store_and_a_registry_and_a_fault_is_told_while_they_serve(
    quick_operator: AnyRegion, stores: Stores
) -> None:
    region, (store, images, denying, boundless) = quick_operator, stores
    namespace = f"t-sources-{uuid.uuid4().hex[:6]}"
    restricted_namespace(region, namespace)
    try:
        with region.network():
            layers = [(data, {"annotations": {TITLE: name}}) for name, data in FILES.items()]
            manifest = images.push("vision/greeting", layers)
        keys = {"accessKeyId": "reader", "secretAccessKey": "made-up"}
        secret = {"kind": "Secret", "metadata": {"name": "model-store"}, "stringData": keys}
        authority = {
            "kind": "ConfigMap",
            "metadata": {"name": "our-authority"},
            "data": {"ca.crt": images.ca_file.read_text()},
        }
        region.apply([{"apiVersion": "v1", **item} for item in (secret, authority)], namespace=namespace)
        s3 = {
            "uri": f"s3://{BUCKET}/greeting",
            "endpoint": f"http://{region.address}:{store.port}",
            "digest": DIGEST,
            "secretRef": {"name": "model-store"},
        }
        oci = {"uri": f"oci://{images.host}/vision/greeting@{manifest}", "caRef": {"name": "our-authority"}}
        service = Service(
            region,
            namespace,
            "sources",
            {
                "models": [model(s3), model(oci, "greeting_oci")],
                "accelerator": {"count": 0},
                "resources": {"cpu": "100m", "memory": "512Mi"},
                "scaling.maxReplicas": 1,
            },
        )
        service.apply().wait_ready()
        (pod,) = service.pods()
        fetch = next(each for each in pod["status"]["initContainerStatuses"] if each["name"] == names.FETCH_CONTAINER)
        arrivals = json.loads(fetch["state"]["terminated"]["message"])["fetched"]
        assert {arrival["model"]: (arrival["origin"], arrival["bytes"]) for arrival in arrivals} == {
            "greeting": ("Download", sum(map(len, FILES.values()))),
            "greeting_oci": ("Download", sum(map(len, FILES.values()))),
        }
        triton = next(each for each in pod["spec"]["containers"] if each["name"] == names.SERVER_CONTAINER)
        assert not [mount for mount in triton["volumeMounts"] if "secret" in mount["name"]]

        faults: dict[str, tuple[dict[str, Any], str]] = {
            f"s3://{BUCKET}/absent is no object": (
                {"models[0].source.uri": f"s3://{BUCKET}/absent"},
                "correct spec.models[0].source.uri",
            ),
            f"s3://{BUCKET}/absent answered 403 (AccessDenied)": (
                {"models[0].source.endpoint": f"http://{region.address}:{denying.server_port}"},
                "allow the keys in the Secret of spec.models[0].source.secretRef",
            ),
            "2 PB more are needed and": (
                {
                    "models[0].source.uri": f"s3://{BUCKET}/greeting",
                    "models[0].source.endpoint": f"http://{region.address}:{boundless.server_port}",
                },
                "free space on the node, on whose disk it lies, or use a pvc or image source",
            ),
        }
        for cause, (fields, fix) in faults.items():
            service.apply(fields)
            words = ['model "greeting"', cause, fix]
            blocked = service.wait("the fault to be told", partial(says, words=words))
            print(condition(blocked, "RolloutBlocked")["message"])
            assert condition(blocked, "Ready")["status"] == "True"
        assert condition(blocked, "RolloutBlocked")["reason"] == "DiskFull"
    finally:
        region.kubectl("delete", "namespace", namespace, "--wait=false", "--ignore-not-found")


def says(status: dict[str, Any], words: list[str]) -> bool:
    return all(word in str(condition(status, "RolloutBlocked").get("message")) for word in words)


@pytest.mark.long  # its attempts take seven minutes
@pytest.mark.timeout(1200)
def test_row_76_a_source_that_sends_nothing_is_an_event_and_then_a_condition_while_the_old_pods_serve(
    quick_operator: AnyRegion, stores: Stores
) -> None:
    region, namespace = quick_operator, f"t-silent-{uuid.uuid4().hex[:6]}"
    restricted_namespace(region, namespace)
    try:
        with region.network(), between(stores.store, every=silent_for_ever, listen="0.0.0.0") as silent:
            uri = f"s3://{BUCKET}/greeting"
            source = {"uri": uri, "endpoint": f"http://{region.address}:{stores.store.port}", "digest": DIGEST}
            service = Service(
                region,
                namespace,
                "silent",
                {
                    "models": [model(source)],
                    "accelerator": {"count": 0},
                    "resources": {"cpu": "50m", "memory": "256Mi"},
                    "scaling.maxReplicas": 1,
                },
            )
            service.apply().wait_ready()
            service.apply({"models[0].source.endpoint": f"http://{region.address}:{silent.server_port}"})
            cause = "no byte came for 60 s"

            def told() -> list[str]:
                return [event for event in service.events("FetchingModels") if cause in event]

            print(wait_until(told, 300, "the Event about the stall", 1))
            words = ['model "greeting"', uri, "failed 6 times in a row", cause, "NetworkPolicy, DNS, proxy"]
            status = service.wait("the stall to be told", partial(says, words=words), 500)
            blocked = condition(status, "RolloutBlocked")
            print(blocked["message"])
            assert blocked["reason"] == "FetchFailed"
            assert condition(status, "Ready")["status"] == "True"
            assert status["replicas"]["ready"] == 1
    finally:
        region.kubectl("delete", "namespace", namespace, "--wait=false", "--ignore-not-found")


# --- the cache on a node

WEIGHTS = {"1/weights.bin": os.urandom(48 << 20)}
LARGE = {name: data for name, data in FILES.items() if name.startswith("1/")} | WEIGHTS
LARGE_DIGEST = lines_digest({name: hashlib.sha256(data).hexdigest() for name, data in LARGE.items()})
ALLOWED = Path("/var/cache/conch")


@pytest.fixture
def large_store(quick_operator: AnyRegion) -> Iterator[Between]:
    """A store with a model of 48 MiB, where pods reach it; it notes what it is asked for."""
    with quick_operator.network(), s3_server() as store, between(store, listen="0.0.0.0") as noting:
        store.make_bucket(BUCKET)
        for name, data in LARGE.items():
            store.put(BUCKET, f"large/{name}", data)
        yield noting


@pytest.fixture
def privileged(quick_operator: AnyRegion) -> Iterator[tuple[str, Path]]:
    """A namespace whose pods may mount a node's folder, and a folder that no node has yet."""
    namespace = f"t-cache-{uuid.uuid4().hex[:6]}"
    folder = ALLOWED / namespace
    labels = {"pod-security.kubernetes.io/enforce": "privileged"}
    quick_operator.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}})
    yield namespace, folder
    quick_operator.kubectl("delete", "namespace", namespace, "--wait=false", "--ignore-not-found")
    # The sandbox's node has this machine's disk; kind's has its own, and goes with it.
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        ALLOWED.rmdir()


def documented_preparation(folder: Path) -> dict[str, Any]:
    """The DaemonSet of docs/models.md with this folder and an image that is here."""
    text = (ROOT / "docs" / "models.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    item: dict[str, Any] = yaml.safe_load(text)
    pod = item["spec"]["template"]["spec"]
    pod["containers"][0]["image"] = OPERATOR_IMAGE
    pod["volumes"][0]["hostPath"]["path"] = str(folder)
    return item


def arrived(service: Service, count: int) -> dict[str, dict[str, Any]]:
    """What the termination message of each pod's fetch says, by the pod's name, once there are so many."""

    def look() -> dict[str, dict[str, Any]]:
        said = {}
        for pod in service.pods():
            for status in pod["status"].get("initContainerStatuses", []):
                ended = status["state"].get("terminated")
                if status["name"] == names.FETCH_CONTAINER and ended:
                    assert ended["exitCode"] == 0, ended
                    said[pod["metadata"]["name"]] = json.loads(ended["message"])
        return said if len(said) == count else {}

    return wait_until(look, 60, f"{count} pods of {service.name} to have their models", 0.5)


def test_pods_of_a_node_download_a_model_once_when_its_folder_is_ready_and_an_event_says_when_it_is_not(
    quick_operator: AnyRegion, large_store: Between, privileged: tuple[str, Path]
) -> None:
    region, store, (namespace, folder) = quick_operator, large_store, privileged
    source = {
        "uri": f"s3://{BUCKET}/large",
        "endpoint": f"http://{region.address}:{store.server_port}",
        "digest": LARGE_DIGEST,
    }
    service = Service(
        region,
        namespace,
        "cached",
        {
            "models": [model(source)],
            "runtime.modelCache": {"hostPath": str(folder), "size": "1Gi"},
            "accelerator": {"count": 0},
            "resources": {"cpu": "50m", "memory": "256Mi"},
            "scaling.minReplicas": 1,
            "scaling.maxReplicas": 4,
        },
    )

    def more_pods(replicas: int, known: dict[str, Any]) -> list[tuple[str, float, str]]:
        """Origin, seconds and the trouble with the cache of each new pod's model."""
        service.apply({"scaling.minReplicas": replicas})
        said = arrived(service, replicas)
        fresh = [message for name, message in said.items() if name not in known]
        known.update(said)
        return sorted(
            (each["fetched"][0]["origin"], each["fetched"][0]["seconds"], each.get("cache", "")) for each in fresh
        )

    known: dict[str, Any] = {}
    # The kubelet makes the folder, for root; fsGroup doesn't apply to it.
    ((origin, seconds, trouble),) = more_pods(1, known)
    once = len(store.ranges)
    assert once > 0
    assert (origin, "Permission denied" in trouble) == ("Download", True), trouble
    assert "runtime.modelCache writable for user 1000 or group 1000" in trouble
    (told,) = wait_until(lambda: service.events("ModelCacheUnused"), 20, "the Event about the cache")
    assert told == f"On node {region.node_name}, {trouble}."
    figures = [f"not ready: {origin} {seconds} s"]

    region.apply(documented_preparation(folder), namespace=namespace)
    region.kubectl("-n", namespace, "rollout", "status", "daemonset/conch-model-cache", "--timeout=30s")

    # Of two at once one downloads, and the other waits for it.
    both = more_pods(3, known)
    assert [(origin, trouble) for origin, _, trouble in both] == [("Cache", ""), ("Download", "")]
    assert len(store.ranges) == 2 * once
    figures += [f"two at once: {origin} {seconds} s" for origin, seconds, _ in both]

    asked = len(store.asked)
    ((origin, seconds, trouble),) = more_pods(4, known)
    assert (origin, trouble) == ("Cache", "")
    assert len(store.asked) == asked
    figures.append(f"the next: {origin} {seconds} s")
    service.wait_ready(4)
    print(f"{sum(map(len, LARGE.values()))} bytes; {'; '.join(figures)}")  # pytest shows it with -s
