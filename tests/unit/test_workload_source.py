"""What a model's URI makes the pod mount and reach."""

from __future__ import annotations

from typing import Any

import pytest

from conch.workload.source import source_of
from makers import SHA256, make_model, make_spec


def claim(name: str) -> dict[str, Any]:
    return {"persistentVolumeClaim": {"claimName": name, "readOnly": True}}


def image(reference: str) -> dict[str, Any]:
    return {"image": {"reference": reference, "pullPolicy": "IfNotPresent"}}


@pytest.mark.parametrize(
    ("uri", "volume", "path", "port"),
    [
        ("pvc://models/resnet50", claim("models"), "/resnet50", None),
        ("pvc://models/a/b.onnx", claim("models"), "/a/b.onnx", None),
        ("image://registry.example:5000/m:1#/model.onnx", image("registry.example:5000/m:1"), "/model.onnx", None),
        (f"image://r.example/m@{SHA256}#/a/b", image(f"r.example/m@{SHA256}"), "/a/b", None),
        ("image://m#/", image("m"), "/", None),
        ("https://models.example/m.onnx", None, "", 443),
        ("https://models.example:9443/m.onnx", None, "", 9443),
    ],
)
def test_a_uri_is_split_into_volume_path_and_port(
    uri: str, volume: dict[str, Any] | None, path: str, port: int | None
) -> None:
    source = source_of(make_spec(models=[make_model(source={"uri": uri, "digest": SHA256})]).models[0])
    assert (source.volume, source.path, source.port) == (volume, path, port)
    assert (source.model, source.uri) == ("resnet50", uri)
