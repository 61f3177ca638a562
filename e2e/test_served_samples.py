"""The samples whose backends are here run on real Triton as they are written, and do what their comments say.

The models of several samples run in one pod, so that the whole takes few of them; each keeps the spec of its sample.
"""

from __future__ import annotations

import copy
import functools
import json
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import yaml
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2 as pb

import demo
from conch.triton.fragments import to_data
from conch.triton.modelconfig import from_pbtxt
from conch.workload import offline
from conch.workload.deployment import Images
from conch.workload.offline import Surroundings
from operators import OPERATOR_IMAGE, ROOT, TRITON_IMAGE, wait_until
from services import SCRIPT, Service, restricted_namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from clusters import Clusters
    from sandbox import AnyRegion

pytestmark = pytest.mark.sandbox

FOLDER = ROOT / "manifests" / "samples"
NAMESPACE = f"t-samples-{uuid.uuid4().hex[:6]}"
TOGETHER = (
    "batching", "sequence", "decoupled", "warmup", "response-cache", "rate-limiter", "instance-groups", "versions",
)  # fmt: skip
"""Samples whose models run in one pod."""
START_LIMIT_S = 120.0


def sample(name: str) -> dict[str, Any]:
    """A sample as it is written."""
    found: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return found


def together() -> dict[str, Any]:
    """One service of all models of several samples, with what these say of the server."""
    service: dict[str, Any] = copy.deepcopy(sample(TOGETHER[0]))
    spec = service["spec"]
    for name in TOGETHER[1:]:
        other = sample(name)["spec"]
        spec["models"] += other["models"]
        spec["runtime"] |= other["runtime"]
    spec["resources"] = {"cpu": "500m", "memory": "3Gi"}
    spec["scaling"] = {"maxReplicas": 1, "startup": f"{START_LIMIT_S:g}s"}
    return service


@dataclass(frozen=True)
class Running:
    """The services of this module, ready."""

    models: Service
    ensemble: Service

    @property
    def services(self) -> tuple[Service, Service]:
        """Both."""
        return self.models, self.ensemble

    def url(self, model: str) -> str:
        """The address of a model."""
        return self._urls()[model]

    @functools.cache  # noqa: B019 - one object, as long as the module's tests
    def _urls(self) -> dict[str, str]:
        bases = {service: service.url().rpartition("/v2/")[0] for service in self.services}
        return {
            model["name"]: f"{base}/v2/models/{model['name']}"
            for service, base in bases.items()
            for model in service.object["spec"]["models"]
        }

    def get(self, model: str, path: str = "") -> dict[str, Any]:
        """What Triton says of a model."""
        return json.loads(ask(self.url(model) + path))  # type: ignore[no-any-return]

    def wait_counted(self, model: str, right: Callable[[dict[str, Any]], bool]) -> None:
        """Until a model's statistics are right: Triton counts a request after it has answered it."""
        wait_until(
            lambda: right(self.get(model, "/stats")["model_stats"][0]), 10, f"the statistics of {model} to be right"
        )

    def infer(self, model: str, inputs: Mapping[str, Any], path: str = "", **parameters: Any) -> dict[str, list[Any]]:
        """Outputs by name, as flat lists; inputs are (data type, array)."""
        described = [
            {"name": name, "datatype": kind, "shape": list(array.shape), "data": array.reshape(-1).tolist()}
            for name, (kind, array) in inputs.items()
        ]
        body = json.dumps({"inputs": described, "parameters": parameters}).encode()
        answer = json.loads(ask(f"{self.url(model)}{path}/infer", body))
        return {output["name"]: output["data"] for output in answer["outputs"]}


def ask(url: str, body: bytes | None = None) -> bytes:
    """One request; an error carries Triton's words."""
    request = urllib.request.Request(url, data=body, headers={"Connection": "close"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url}: {error.code} {error.read().decode(errors='replace')}") from None


@dataclass
class Place:
    """The namespace of this module, and what runs in it once it does."""

    namespace: str
    running: Running | None = None


@pytest.fixture(scope="module")
def place(clusters: Clusters) -> Iterator[Place]:
    """A restricted namespace, deleted with all in it at the end."""
    region = clusters.region(nodes=True)
    restricted_namespace(region, NAMESPACE)
    yield Place(NAMESPACE)
    region.kubectl("delete", "namespace", NAMESPACE, "--wait=false", "--ignore-not-found")


@pytest.fixture
def running(operator: AnyRegion, place: Place) -> Running:
    """The samples, applied by the first test and ready."""
    if place.running is None:
        found = []
        for name, written in (("samples", together()), ("ensemble", sample("ensemble"))):
            service = Service(operator, place.namespace, name)
            service.object["spec"] = written["spec"]
            found.append(service.apply())
        place.running = Running(*(service.wait_ready(limit_s=START_LIMIT_S) for service in found))
    return place.running


def test_triton_has_loaded_every_configuration_as_it_was_rendered(running: Running) -> None:
    around = Surroundings(Images(OPERATOR_IMAGE, TRITON_IMAGE))
    for service in running.services:
        for model, text in offline.render(service.object, around).configs.items():
            wanted = to_data(from_pbtxt(text))
            loaded = json_format.ParseDict(running.get(model, "/config"), pb.ModelConfig(), ignore_unknown_fields=True)
            assert lacking(to_data(loaded), wanted) == [], model


def lacking(whole: Any, part: Any, path: str = "") -> list[str]:
    """Where data lacks what another has; Triton adds to a configuration, and numbers names of groups."""
    if isinstance(part, dict):
        return [
            found
            for key, value in part.items()
            for found in lacking(whole.get(key) if isinstance(whole, dict) else None, value, f"{path}.{key}")
        ]
    if isinstance(part, list) and isinstance(whole, list) and len(part) == len(whole):
        pairs = enumerate(zip(whole, part, strict=True))
        return [found for index, (there, value) in pairs for found in lacking(there, value, f"{path}[{index}]")]
    # A passing difference of form: a default that is written out is unset in the answer.
    return [] if whole == part or (whole is None and part in (0, "", False)) else [f"{path}: {part!r}, not {whole!r}"]


def test_an_ensemble_names_the_types_of_files_from_their_bytes(running: Running) -> None:
    for path, expected in demo.FILES.items():
        if expected is None:
            continue
        content = np.array([[(ROOT / path).read_text()]], np.object_)
        answer = running.infer("filetype_of_bytes", {"content": ("BYTES", content)})
        assert answer["label"] == [expected], path
        assert 0 < answer["score"][0] <= 1


def test_an_ensemble_answers_a_batch(running: Running) -> None:
    content = np.array([[SCRIPT.decode()], ['{"a": [1, 2, 3], "b": {"c": null}}'], [SCRIPT.decode()]], np.object_)
    answer = running.infer("filetype_of_bytes", {"content": ("BYTES", content)})
    assert answer["label"] == ["python", "json", "python"]


def script() -> dict[str, Any]:
    """The classifier's input for a Python script."""
    return {"bytes": ("INT32", demo.features(SCRIPT)[np.newaxis])}


def test_requests_of_any_priority_are_answered(running: Running) -> None:
    answers = [running.infer("filetype_batched", script(), priority=level) for level in (1, 2, 3)]
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0]["target_label"]) == 214


def test_a_sequence_is_added_up_and_two_of_them_keep_apart(running: Running) -> None:
    def send(sequence: int, number: int, *, start: bool = False, end: bool = False) -> int:
        inputs = {"number": ("INT32", np.array([[number]]))}
        answer = running.infer("running_total", inputs, sequence_id=sequence, sequence_start=start, sequence_end=end)
        return int(answer["total"][0])

    assert [send(1, 5, start=True), send(2, 100, start=True)] == [5, 100]
    assert [send(1, 6), send(2, 1), send(1, 7, end=True), send(2, 1, end=True)] == [11, 101, 18, 102]
    assert send(1, 1, start=True, end=True) == 1


def test_a_decoupled_model_answers_many_times(running: Running) -> None:
    content = ask(f"{running.url('countdown')}/generate_stream", json.dumps({"from": 3}).encode()).decode()
    events = [json.loads(line.removeprefix("data: ")) for line in content.splitlines() if line.startswith("data: ")]
    assert [event["number"] for event in events] == [3, 2, 1]


def test_a_model_has_answered_all_its_warm_up_requests_before_the_first_client(running: Running) -> None:
    # One made from the inputs, a batch of four twice, and one from a file: Triton's statistics count them.
    running.wait_counted("filetype_warm", lambda stats: stats["inference_count"] == 1 + 2 * 4 + 1)
    running.infer("filetype_warm", script())
    running.wait_counted("filetype_warm", lambda stats: stats["inference_count"] == 11)


def test_a_request_that_was_answered_before_comes_from_the_cache(running: Running) -> None:
    first, second = (running.infer("filetype_cached", script()) for _ in range(2))
    assert first == second

    def hit_once(stats: dict[str, Any]) -> bool:
        counts = stats["inference_stats"]
        return (counts["cache_miss"]["count"], counts["cache_hit"]["count"]) == (1, 1)

    running.wait_counted("filetype_cached", hit_once)


def test_models_that_take_turns_both_answer(running: Running) -> None:
    answers = [running.infer(model, script()) for model in ("filetype_first", "filetype_second") * 2]
    assert all(answer == answers[0] for answer in answers)


def test_copies_that_differ_are_loaded_as_groups(running: Running) -> None:
    groups = running.get("filetype_groups", "/config")["instance_group"]
    assert [(group["name"], group["count"], group["passive"]) for group in groups] == [
        ("serving", 2, False), ("spare", 1, True),
    ]  # fmt: skip
    assert len(running.infer("filetype_groups", script())["target_label"]) == 214


def test_versions_are_served_side_by_side_and_the_newest_is_the_default(running: Running) -> None:
    name = {"name": ("BYTES", np.array(["you"], np.object_))}
    assert running.get("greeting")["versions"] == ["1", "2"]
    assert running.infer("greeting", name, "/versions/1")["words"] == ["version 1"]
    assert running.infer("greeting", name)["words"] == ["version 2"]
    assert running.get("greeting_newest")["versions"] == ["2"]


def test_the_operator_reads_back_that_the_samples_serve_what_they_say(running: Running) -> None:
    for service in running.services:
        message = service.wait_condition("ModelConfigDrift", "False")
        assert message, service.name
