"""The plan: what the operator writes is what the init container reads, and nothing else is accepted."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from conch.storage.errors import MESSAGE_MAX_BYTES, DigestMismatchError, termination_message
from conch.storage.plan import Plan, PlanError, PlannedCache, PlannedEngine, PlannedModel

DIGEST = "sha256:" + "a" * 64


def model(**changes: Any) -> dict[str, Any]:
    fields = {
        "name": "filetype",
        "uri": "https://models.example/filetype.onnx",
        "digest": DIGEST,
        "fileName": "model.onnx",
        "config": 'name: "filetype"\n',
    }
    return fields | changes


def plan(*models: dict[str, Any], **changes: Any) -> str:
    return json.dumps({"models": list(models), "stallTimeoutSeconds": 60} | changes)


def test_a_plan_survives_the_annotation() -> None:
    written = Plan(
        models=(
            PlannedModel(
                name="filetype",
                uri="pvc://models/filetype",
                file_name="model.onnx",
                mount="/sources/filetype",
                path="/filetype",
                config='name: "filetype"\nparameters { key: "a" value { string_value: "\\"{{ }}\\n" } }\n',
            ),
            PlannedModel(name="b", uri="https://h/b?sig=1", digest=DIGEST, file_name="model.py", config=""),
            PlannedModel(
                name="c",
                uri="s3://models/c/",
                file_name="model.plan",
                expects="FileOrFolder",
                field="spec.models[2]",
                versions=(1, 3),
                extra_files=("labels/top.txt",),
                config="",
                endpoint="http://minio:9000",
                region="eu-west-1",
                identity="ServiceAccount",
                secret="/etc/conch/secrets/2",
                ca="/etc/conch/authorities/2/ca.crt",
                proxy="http://proxy:3128",
                engine=PlannedEngine(tensor_rt="10.5", compute_capability="8.6", platform="linux/amd64"),
            ),
            PlannedModel(name="d", expects="Nothing", config=""),
        ),
        stall_timeout_seconds=30,
        cache=PlannedCache(path="/cache", size_bytes=1 << 40),
        tensor_rt="10.5.0",
    )
    text = written.to_json()
    assert "\n" not in text
    assert Plan.from_json(text) == written
    assert Plan.from_json(text).to_json() == text


def test_the_wire_names_are_those_of_the_plan_file() -> None:
    fields = model(
        uri="s3://m/k", expects="Folder", field="spec.models[0]", versions=[3], extraFiles=["labels.txt"],
        endpoint="https://minio", region="eu-west-1", identity="ServiceAccount", secret="/s", ca="/ca.crt",
        proxy="http://proxy:3128", engine={"tensorRT": "10.5", "computeCapability": "8.6", "platform": "linux/amd64"},
    )  # fmt: skip
    written = {"models": [fields], "stallTimeoutSeconds": 30.0, "cache": {"path": "/c", "sizeBytes": 1}}
    written["tensorRT"] = "10.5"
    assert json.loads(Plan.from_json(json.dumps(written)).to_json()) == written


def test_what_a_plan_leaves_out_is_not_written_so_that_a_new_field_rolls_no_pod() -> None:
    assert json.loads(Plan.from_json(plan(model())).to_json()) == {"models": [model()]}


def test_a_message_can_name_the_field_of_the_resource() -> None:
    made = Plan.from_json(plan(model(field="spec.models[3]"), model(name="b"))).models
    assert [one.at("source.uri") for one in made] == ["spec.models[3].source.uri", "source.uri"]


def test_a_plan_does_not_change_once_made() -> None:
    made = Plan.from_json(plan(model()))
    with pytest.raises(ValidationError, match="frozen"):
        made.models[0].name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "plan: Invalid JSON"),
        ("[]", "plan: Input should be an object"),
        (plan(), "plan.models: Tuple should have at least 1 item"),
        (plan(model(), model()), "plan: models: two are named 'filetype'; rename one"),
        (plan(model(name="../escape")), "plan.models[0].name: '../escape' must be one path segment"),
        (plan(model(name=".hidden")), "plan.models[0].name: '.hidden' must be one path segment"),
        (plan(model(name="a\n")), "plan.models[0].name: 'a\\n' must be one path segment"),
        (plan(model(fileName="1/model.onnx")), "plan.models[0].fileName: '1/model.onnx' must be one path segment"),
        (plan(model(digest="sha256:abc")), "plan.models[0].digest: 'sha256:abc' must be sha256: and 64"),
        (plan(model(digest=DIGEST + "\n")), "must be sha256: and 64"),
        (plan(model(digest=None)), "plan.models[0]: digest: missing; https sources need one"),
        (plan(model(uri="ftp://h/f")), "uri: 'ftp://h/f' has no supported scheme; use gs, https, oci, s3, image, pvc"),
        (plan(model(uri="http://h/f")), "uri: 'http://h/f' has no supported scheme"),
        (plan(model(uri="https:///f")), "is no https URL; give host and path"),
        (plan(model(uri="https://h/a b")), "is no https URL"),
        (plan(model(uri="https://h:99999/f")), "Port out of range"),
        (plan(model(uri="https://me:secret@h/f")), "credentials in a URL end up in logs"),
        (plan(model(mount="/sources/x")), "mount: '/sources/x' is set for a source that is downloaded; remove it"),
        (plan(model(uri="oci://r/m:1", digest=None)), "digest: missing; a tag can be moved"),
        (plan(model(uri=f"oci://r/m@{DIGEST}", digest="sha256:" + "b" * 64)), "digest: differs from the digest in uri"),
        (plan(model(uri="s3:///k")), "is no s3 URL; give host and path"),
        (plan(model(uri="s3://me:secret@b/k")), "credentials in a URL end up in logs"),
        (plan(model(uri=None)), "uri: missing although expects is File; set source.uri"),
        (plan(model(fileName=None)), "fileName: missing although expects is File"),
        (plan(model(versions=[0])), "plan.models[0].versions[0]: 0 Input should be greater than or equal to 1"),
        (plan(model(extraFiles=["../x"])), "plan.models[0].extraFiles[0]: '../x' must be a relative path"),
        (plan(model(extraFiles=["/x"])), "must be a relative path"),
        (plan(model(endpoint="ftp://h")), "plan.models[0].endpoint: 'ftp://h' must be http://HOST:PORT or https://"),
        (plan(model(endpoint="https://a:b@h")), "credentials in a URL end up in logs"),
        (plan(model(proxy="http://h/x")), "must be http://HOST:PORT or https://HOST:PORT"),
        (plan(model(secret="secrets")), "plan.models[0].secret: 'secrets' must be an absolute path"),
        (plan(model(), cache={"path": "/c", "sizeBytes": 0}), "plan.cache.sizeBytes: 0 Input should be greater than 0"),
        (plan(model(uri="pvc://c/p")), "mount: missing for 'pvc://c/p'"),
        (plan(model(uri="pvc://c/p", mount="sources")), "mount: 'sources' must be an absolute path"),
        (plan(model(uri="pvc://c/p", mount="/s", path="/a/../../b")), "path: '/a/../../b' must not contain '..'"),
        (plan(model(extra=1)), "plan.models[0].extra: 1 Extra inputs are not permitted"),
        (plan(model(), stallTimeoutSeconds=0), "plan.stallTimeoutSeconds: 0 Input should be greater than 0"),
    ],
)
def test_a_wrong_plan_is_refused_with_field_value_and_fix(text: str, message: str) -> None:
    with pytest.raises(PlanError) as refusal:
        Plan.from_json(text)
    assert message in str(refusal.value)


def test_no_secret_of_a_refused_address_is_repeated() -> None:
    with pytest.raises(PlanError) as refusal:
        Plan.from_json(plan(model(uri="https://me:secret@h/f")))
    assert "secret" not in str(refusal.value)


def test_a_termination_message_is_one_printable_line_that_the_kubelet_keeps_whole() -> None:
    message = termination_message(str(DigestMismatchError("é" * 5000 + "\n\x1b[31m", "fix", model="m")))
    assert len(message) <= MESSAGE_MAX_BYTES
    assert message.decode().startswith('model "m": éé')
    assert message.decode().endswith("…")
    assert termination_message("a\nb\x1b") == b"a?b?"
