"""The samples: valid, rendered, and together an example of everything that a spec can say."""

from __future__ import annotations

import functools
import inspect
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from pydantic import BaseModel

from conch.api.inferenceservice import InferenceServiceSpec, parse_service
from conch.cli.documents import read_documents
from conch.cli.validate import problems_of
from conch.triton.backends import BACKENDS
from conch.triton.modelconfig import from_pbtxt, to_pbtxt
from conch.workload import offline
from conch.workload.deployment import Images
from conch.workload.offline import Surroundings

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parents[2] / "manifests" / "samples"
SAMPLES = sorted(FOLDER.glob("*.yaml"))
AROUND = Surroundings(Images("conch.example/conch:1", "nvcr.io/nvidia/tritonserver:25.06-py3"), with_pod_monitor=True)

NO_SAMPLE: dict[str, str] = {}
"""Fields without a sample, each with the reason."""

each_sample = pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)


@functools.cache
def sample(path: Path) -> dict[str, Any]:
    service: dict[str, Any] = yaml.safe_load(path.read_text())
    return service


@functools.cache
def rendered(path: Path) -> offline.Rendered:
    return offline.render(sample(path), AROUND)


@each_sample
def test_a_sample_is_one_valid_document(path: Path) -> None:
    (document,), faults = read_documents(path.read_text(), path.name)
    assert faults == []
    assert [str(problem.place) + problem.message for problem in problems_of(document, AROUND)] == []


@each_sample
def test_a_sample_says_what_it_shows_in_lines_that_fit_a_screen(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ") or path.stem == "minimal"
    assert max(map(len, lines)) <= 120
    assert len(lines) <= 60


@each_sample
def test_a_sample_renders_objects_of_its_own_name_and_configurations_that_the_parser_reads(path: Path) -> None:
    name = sample(path)["metadata"]["name"]
    for item in rendered(path).objects:
        assert item["metadata"]["name"].startswith(name)
    spec = parse_service(sample(path))
    assert set(rendered(path).configs) == {model.name for model in spec.models}
    for model, text in rendered(path).configs.items():
        config = from_pbtxt(text)
        assert (config.name, to_pbtxt(config)) == (model, text)


def test_services_and_models_have_names_of_their_own() -> None:
    names = [sample(path)["metadata"]["name"] for path in SAMPLES]
    assert len(set(names)) == len(names)


def test_every_format_has_a_sample() -> None:
    used = {model["format"] for path in SAMPLES for model in sample(path)["spec"]["models"]}
    assert used == set(BACKENDS)


def test_every_field_of_a_service_is_in_a_sample() -> None:
    used: set[str] = set()
    for path in SAMPLES:
        used |= set(set_in(parse_service(sample(path))))
    assert set(fields_of(InferenceServiceSpec)) - used == set(NO_SAMPLE)


def test_every_choice_that_changes_how_triton_works_is_in_a_sample() -> None:
    said: dict[str, set[Any]] = {}
    for path in SAMPLES:
        for where, value in values_of(sample(path)["spec"]):
            said.setdefault(where, set()).add(value)
    assert said["models.sequence.strategy"] == {"Direct", "Oldest"}
    assert said["models.queue.levels.timeoutAction"] | said["models.queue.timeoutAction"] == {"Reject", "Delay"}
    assert said["models.sequence.controls.kind"] == {"Start", "End", "Ready", "CorrelationID"}
    assert said["models.versions.policy"] >= {"Latest", "Specific"}
    assert said["models.instances.kind"] >= {"GPU", "CPU", "Model"}
    schemes = {uri.partition("://")[0] for uri in said["models.source.uri"]}
    assert schemes == {"s3", "gs", "https", "oci", "pvc", "image"}


# --- fields of the API, and of a sample


def declared(model: type[BaseModel], name: str) -> str:
    """CLASS.FIELD with the class that declares it: what two lists of one kind share is shown once."""
    owner = next(cls for cls in reversed(model.__mro__) if name in inspect.get_annotations(cls))
    return f"{owner.__name__}.{name}"


def fields_of(model: type[BaseModel]) -> Iterator[str]:
    """Every field of a part of the spec and below it."""
    for name, field in model.model_fields.items():
        yield declared(model, name)
        for part in parts(field.annotation):
            yield from fields_of(part)


def parts(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        if inner is not None:
            yield from parts(inner)


def set_in(value: Any) -> Iterator[str]:
    """Every field that somebody wrote."""
    if isinstance(value, BaseModel):
        for name in value.model_fields_set:
            yield declared(type(value), name)
            yield from set_in(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from set_in(item)


def values_of(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        path = f"{prefix}.{key}".lstrip(".")
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                yield from values_of(item, path)
            elif not isinstance(item, list):
                yield path, item
