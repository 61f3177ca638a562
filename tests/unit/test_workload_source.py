"""What a model's URI makes the pod mount and reach."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from conch.api.inferenceservice import InvalidSpec
from conch.storage.remote import content_digest
from conch.workload.deployment import model_plan
from conch.workload.source import fetch_mounts, source_of, source_volumes
from makers import SHA256, make_model, make_spec


def claim(name: str) -> dict[str, Any]:
    return {"persistentVolumeClaim": {"claimName": name, "readOnly": True}}


def image(reference: str) -> dict[str, Any]:
    return {"image": {"reference": reference, "pullPolicy": "IfNotPresent"}}


@pytest.mark.parametrize(
    ("uri", "volume", "path", "ports"),
    [
        ("pvc://models/resnet50", claim("models"), "/resnet50", ()),
        ("pvc://models/a/b.onnx", claim("models"), "/a/b.onnx", ()),
        ("image://registry.example:5000/m:1#/model.onnx", image("registry.example:5000/m:1"), "/model.onnx", ()),
        (f"image://r.example/m@{SHA256}#/a/b", image(f"r.example/m@{SHA256}"), "/a/b", ()),
        ("image://m#/", image("m"), "/", ()),
        ("https://models.example/m.onnx", None, "", (443,)),
        ("https://models.example:9443/m.onnx", None, "", (9443,)),
    ],
)
def test_a_uri_is_split_into_volume_path_and_ports(
    uri: str, volume: dict[str, Any] | None, path: str, ports: tuple[int, ...]
) -> None:
    source = source_of(make_spec(models=[make_model(source={"uri": uri, "digest": SHA256})]).models[0])
    assert (source.volume, source.path, source.ports) == (volume, path, ports)
    assert (source.model, source.uri) == ("resnet50", uri)


HTTP_STORE = {"endpoint": "http://minio.storage:9000", "digest": SHA256}
PROXY = {"proxy": "http://proxy.example:3128"}


@pytest.mark.parametrize(
    ("source", "ports"),
    [
        ({"uri": "s3://models/m"}, (443,)),
        ({"uri": "s3://models/m", **HTTP_STORE}, (9000,)),
        ({"uri": "s3://models/m", "endpoint": "https://minio.example"}, (443,)),
        ({"uri": "s3://models/m", "endpoint": "http://minio.example", "digest": SHA256}, (80,)),
        ({"uri": "s3://models/m", "endpoint": "https://s.example:9000", "identity": "ServiceAccount"}, (443, 9000)),
        ({"uri": "gs://models/m"}, (443,)),
        ({"uri": "gs://models/m", **HTTP_STORE}, (9000,)),
        ({"uri": "gs://models/m", "endpoint": "https://s.example:4443", "secretRef": {"name": "k"}}, (443, 4443)),
        ({"uri": f"oci://registry.example/m@{SHA256}"}, (443,)),
        ({"uri": "oci://registry.example:5000/m:v1", "digest": SHA256}, (443, 5000)),
        ({"uri": "https://models.example:9443/m", "digest": SHA256, **PROXY}, (3128,)),
        ({"uri": f"oci://registry.example:5000/m@{SHA256}", **PROXY}, (3128,)),
        ({"uri": "s3://models/m", **PROXY}, (3128,)),
    ],
)
def test_a_download_opens_the_ports_that_it_needs(source: dict[str, Any], ports: tuple[int, ...]) -> None:
    assert source_of(make_spec(models=[make_model(source=source)]).models[0]).ports == ports


SECRET = make_model(
    name="secured",
    source={
        "uri": "s3://models/m",
        "secretRef": {"name": "store-keys"},
        "caRef": {"name": "authorities", "key": "ours.pem"},
        "region": "eu-west-1",
        "endpoint": "https://minio.example:9000",
        **PROXY,
        "engine": {"tensorRT": "10.5"},
    },
)


def test_credentials_and_authorities_are_mounted_as_files_for_the_init_container() -> None:
    sources = [source_of(model) for model in make_spec(models=[make_model(), SECRET]).models]
    assert source_volumes(sources) == [
        {"name": "source-0", **claim("models")},
        {"name": "secret-1", "secret": {"secretName": "store-keys", "defaultMode": 0o440}},
        {"name": "authority-1", "configMap": {"name": "authorities", "items": [{"key": "ours.pem", "path": "ca.crt"}]}},
    ]
    assert fetch_mounts(sources) == [
        {"name": "source-0", "mountPath": "/sources/0", "readOnly": True},
        {"name": "secret-1", "mountPath": "/etc/conch/secrets/1", "readOnly": True},
        {"name": "authority-1", "mountPath": "/etc/conch/authorities/1", "readOnly": True},
    ]


def test_the_plan_says_where_the_source_its_credentials_and_its_authorities_are() -> None:
    planned = model_plan(make_spec(models=[make_model(), SECRET])).models[1]
    assert planned.field == "spec.models[1]"
    assert (planned.uri, planned.secret, planned.ca) == (
        "s3://models/m", "/etc/conch/secrets/1", "/etc/conch/authorities/1/ca.crt",
    )  # fmt: skip
    assert (planned.region, planned.endpoint, planned.proxy, planned.identity) == (
        "eu-west-1", "https://minio.example:9000", "http://proxy.example:3128", "Anonymous",
    )  # fmt: skip
    assert planned.engine is not None
    assert planned.engine.tensor_rt == "10.5"


def test_the_same_secret_is_mounted_for_each_model_that_names_it() -> None:
    twin = {**SECRET, "name": "twin"}
    names = [volume["name"] for volume in source_volumes(map(source_of, make_spec(models=[SECRET, twin]).models))]
    assert names == ["secret-0", "authority-0", "secret-1", "authority-1"]


URIS = st.one_of(
    *(
        st.from_regex(pattern, fullmatch=True)
        for pattern in (
            r"s3://[a-z0-9][a-z0-9.-]{1,20}[a-z0-9](/[A-Za-z0-9._~!$&'()*+,;=:@%-]{1,20}){1,3}/?",
            r"gs://[a-z0-9][a-z0-9._-]{1,20}[a-z0-9](/[A-Za-z0-9._~!$&'()*+,;=:@%-]{1,20}){1,3}/?",
            r"https://[A-Za-z0-9][A-Za-z0-9.-]{0,20}(:[0-9]{1,5})?(/[A-Za-z0-9._~!$&'()*+,;=:@%-]{1,20}){1,3}",
            (
                r"oci://[A-Za-z0-9][A-Za-z0-9.-]{0,20}(:[0-9]{1,5})?(/[a-z0-9]{1,5}([._]|__|-)?[a-z0-9]{1,5}){1,3}"
                r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}|@sha256:[0-9a-f]{64})"
            ),
        )
    )
)


@given(uri=URIS, endpoint=st.sampled_from([None, "https://minio.example", "https://minio.example:9000"]))
def test_every_source_that_the_resource_takes_is_one_that_the_plan_takes(uri: str, endpoint: str | None) -> None:
    source: dict[str, Any] = {"uri": uri}
    if not uri.startswith("oci://") or "@" not in uri:
        source["digest"] = SHA256
    if endpoint is not None and uri.startswith(("s3://", "gs://")):
        source["endpoint"] = endpoint
    try:
        spec = make_spec(models=[make_model(source=source)])
    except InvalidSpec:
        reject()
    (planned,) = model_plan(spec).models
    assert planned.remote
    assert all(0 < port < 65536 for port in source_of(spec.models[0]).ports)
    assert content_digest(planned)
