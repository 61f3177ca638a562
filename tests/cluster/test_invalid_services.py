"""The API server refuses what the offline validation refuses, with words that name field and fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from apiserver import ApiServer, Refused

from conch.api import crd
from conch.api.inferenceservice import parse_service
from conch.kube.client import INFERENCE_SERVICES
from invalid_services import INVALID, VALID, Invalid, valid_service

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sandbox import Region

pytestmark = pytest.mark.cluster

SAMPLES = Path(__file__).parents[2] / "manifests" / "samples"


def create(api: ApiServer, service: Mapping[str, Any]) -> tuple[Any, str]:
    """What the API server returns and what it says, without storing anything; strict, as kubectl asks."""
    path = INFERENCE_SERVICES.path((service.get("metadata") or {}).get("namespace") or "default")
    try:
        return api.call("POST", f"{path}?dryRun=All&fieldValidation=Strict", dict(service)), ""
    except Refused as error:
        return "", error.message


@pytest.fixture(scope="module")
def with_crd(control_plane: Region) -> Region:
    """The control plane with the CRD of this checkout."""
    control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=crd.to_yaml())
    control_plane.kubectl("wait", "--for=condition=Established", f"crd/{crd.CRD_NAME}", "--timeout=30s")
    return control_plane


@pytest.fixture(scope="module")
def answers(with_crd: Region, api: ApiServer) -> dict[str, tuple[Any, str]]:
    """The API server's answer to each invalid service, by name."""
    del with_crd
    return {case.name: create(api, case.service()) for case in INVALID}


@pytest.mark.parametrize("case", INVALID, ids=lambda case: case.name)
def test_the_api_server_refuses_an_invalid_service_with_the_field_and_the_fix(
    case: Invalid, answers: dict[str, tuple[Any, str]]
) -> None:
    stored, said = answers[case.name]
    assert stored == ""
    assert all(words in said for words in case.server), said


@pytest.mark.parametrize("name", VALID)
@pytest.mark.usefixtures("with_crd")
def test_the_api_server_accepts_a_valid_service_and_its_defaults_are_the_models(name: str, api: ApiServer) -> None:
    stored, said = create(api, valid_service(name))
    assert said == ""
    assert parse_service(stored) == parse_service(valid_service(name))


def test_row_40_and_57_applying_a_stored_service_again_changes_nothing(with_crd: Region) -> None:
    text = (SAMPLES / "filetype.yaml").read_text()
    arguments = ("apply", "--server-side", "--field-manager=gitops", "-o", "json", "-f", "-")
    try:
        first = json.loads(with_crd.kubectl(*arguments, input=text))
        again = json.loads(with_crd.kubectl(*arguments, input=text))
        # An operator may run and tell of it under status, which is no user's.
        assert again["spec"] == first["spec"]
        assert again["metadata"]["generation"] == first["metadata"]["generation"] == 1
        assert "replicas" not in first["spec"]
    finally:
        with_crd.kubectl("delete", "cisvc", "filetype", "--ignore-not-found")


@pytest.mark.parametrize("sample", sorted(SAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_api_server_accepts_a_sample(sample: Path, with_crd: Region) -> None:
    arguments = ("apply", "--server-side", "--dry-run=server", "-o", "name", "-f", str(sample))
    assert with_crd.kubectl(*arguments).startswith("inferenceservice.conch.dev/")


def test_kubectl_explain_tells_what_a_field_does_its_unit_and_its_default(with_crd: Region) -> None:
    models = with_crd.kubectl("explain", "cisvc.spec.models")
    assert "The name that clients use." in models
    hold = with_crd.kubectl("explain", "cisvc.spec.scaling.scaleDown.hold")
    assert "How long fewer replicas must suffice before one goes" in hold
    assert "Default: 5m." in " ".join(hold.split())
