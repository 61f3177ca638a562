"""Models from an S3 store and an OCI registry into real Triton pods, and what is said when that can't be."""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
from typing import TYPE_CHECKING, Any

import pytest
import trustme

from conch import names
from conch.storage.digest import lines_digest
from oci_registry import TITLE, Registry, registry
from operators import ROOT
from services import Service, condition, restricted_namespace
from store_servers import S3Server, s3_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sandbox import AnyRegion

pytestmark = pytest.mark.sandbox

MODEL = ROOT / "e2e" / "sandbox" / "images" / "filetype" / "models" / "greeting"
FILES = {str(path.relative_to(MODEL)): path.read_bytes() for path in MODEL.rglob("*.py")}
DIGEST = lines_digest({name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()})
BUCKET = "models"


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


@pytest.fixture
def stores(quick_operator: AnyRegion, tmp_path: Path) -> Iterator[tuple[S3Server, Registry]]:
    """Both on the node, where pods reach them by its address; they hold the model."""
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
            store.make_bucket(BUCKET)
            for name, data in FILES.items():
                store.put(BUCKET, f"greeting/{name}", data)
        yield store, images


def test_models_come_from_an_s3_store_and_a_registry_and_a_fault_is_told_while_they_serve(
    quick_operator: AnyRegion, stores: tuple[S3Server, Registry]
) -> None:
    region, (store, images) = quick_operator, stores
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

        service.apply({"models[0].source.uri": f"s3://{BUCKET}/absent"})
        words = ['model "greeting"', f"s3://{BUCKET}/absent is no object", "correct spec.models[0].source.uri"]
        blocked = service.wait(
            "the fault to be told",
            lambda status: all(word in str(condition(status, "RolloutBlocked").get("message")) for word in words),
        )
        assert condition(blocked, "Ready")["status"] == "True"
    finally:
        region.kubectl("delete", "namespace", namespace, "--wait=false", "--ignore-not-found")
