"""The API server refuses what the offline validation refuses, with words that name field and fix."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from conch.api import crd
from conch.api.inferenceservice import parse_service
from invalid_services import INVALID, VALID, Invalid, valid_service
from sandbox.errors import SandboxError

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.cluster

SAMPLES = Path(__file__).parents[2] / "manifests" / "samples"


class Cluster(Protocol):
    """What these tests need of the cluster."""

    def kubectl(self, *arguments: str, input: str | None = None) -> str:  # noqa: A002 - subprocess' own word
        """Standard output; raises SandboxError with standard error when kubectl fails."""


def create(cluster: Cluster, service: Mapping[str, Any]) -> tuple[str, str]:
    """What the API server returns and what it says, without storing anything."""
    try:
        arguments = ("create", "--dry-run=server", "-o", "json", "-f", "-")
        return cluster.kubectl(*arguments, input=json.dumps(service)), ""
    except SandboxError as error:
        return "", str(error)


@pytest.fixture(scope="module")
def with_crd(cluster: Cluster) -> Cluster:
    """The cluster with the CRD of this checkout."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=crd.to_yaml())
    cluster.kubectl("wait", "--for=condition=Established", f"crd/{crd.CRD_NAME}", "--timeout=30s")
    return cluster


@pytest.fixture(scope="module")
def answers(with_crd: Cluster) -> dict[str, tuple[str, str]]:
    """The API server's answer to each invalid service, by name."""
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda case: create(with_crd, case.service()), INVALID)
        return {case.name: answer for case, answer in zip(INVALID, found, strict=True)}


@pytest.mark.parametrize("case", INVALID, ids=lambda case: case.name)
def test_the_api_server_refuses_an_invalid_service_with_the_field_and_the_fix(
    case: Invalid, answers: dict[str, tuple[str, str]]
) -> None:
    stored, said = answers[case.name]
    assert stored == ""
    assert all(words in said for words in case.server), said


@pytest.mark.parametrize("name", VALID)
def test_the_api_server_accepts_a_valid_service_and_its_defaults_are_the_models(name: str, with_crd: Cluster) -> None:
    stored, said = create(with_crd, valid_service(name))
    assert said == ""
    assert parse_service(json.loads(stored)) == parse_service(valid_service(name))


def test_row_40_and_57_applying_a_stored_service_again_changes_nothing(with_crd: Cluster) -> None:
    text = (SAMPLES / "filetype.yaml").read_text()
    arguments = ("apply", "--server-side", "--field-manager=gitops", "-o", "json", "-f", "-")
    try:
        first = json.loads(with_crd.kubectl(*arguments, input=text))
        again = json.loads(with_crd.kubectl(*arguments, input=text))
        assert first["metadata"]["resourceVersion"] == again["metadata"]["resourceVersion"]
        assert first["metadata"]["generation"] == again["metadata"]["generation"] == 1
        assert "replicas" not in first["spec"]
    finally:
        with_crd.kubectl("delete", "cisvc", "filetype", "--ignore-not-found")


@pytest.mark.parametrize("sample", sorted(SAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_api_server_accepts_a_sample(sample: Path, with_crd: Cluster) -> None:
    arguments = ("apply", "--server-side", "--dry-run=server", "-o", "name", "-f", str(sample))
    assert with_crd.kubectl(*arguments).startswith("inferenceservice.conch.dev/")


def test_kubectl_explain_tells_what_a_field_does_its_unit_and_its_default(with_crd: Cluster) -> None:
    models = with_crd.kubectl("explain", "cisvc.spec.models")
    assert "The name that clients use." in models
    hold = with_crd.kubectl("explain", "cisvc.spec.scaling.scaleDown.hold")
    assert "How long fewer replicas must suffice before one goes" in hold
    assert "Default: 5m." in " ".join(hold.split())
