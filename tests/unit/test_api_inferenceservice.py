"""What a valid InferenceService means, and the field types it is made of."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from conch.api.fields import canonical_quantity, format_duration, parse_duration, parse_quantity
from conch.api.inferenceservice import InferenceServiceSpec, InvalidSpec, parse_service
from conch.api.shown import shown
from conch.api.status import InferenceServiceStatus
from invalid_services import VALID, valid_service
from makers import make_service, make_spec


@pytest.mark.parametrize("name", VALID)
def test_a_valid_service_at_a_rules_edge_is_accepted(name: str) -> None:
    assert isinstance(parse_service(valid_service(name)), InferenceServiceSpec)


def test_a_ten_line_service_gets_sensible_values() -> None:
    spec = make_spec()
    assert (spec.scaling.min_replicas, spec.scaling.max_replicas, spec.scaling.mode) == (1, 4, "Automatic")
    assert (spec.scaling.startup, spec.scaling.scale_down.hold) == (60.0, 300.0)
    assert (spec.accelerator.resource, spec.accelerator.count) == ("nvidia.com/gpu", 1)
    assert (spec.resources.memory, spec.runtime.shared_memory) == ("4Gi", "256Mi")
    assert (spec.models[0].instances.count, spec.models[0].instances.kind) == (1, None)


def test_a_spec_written_out_again_is_the_same_spec() -> None:
    spec = make_spec({"scaling.startup": "1h30m", "scaling.scaleDown.hold": "90s", "resources.cpu": 2})
    again = make_service()
    again["spec"] = spec.model_dump(mode="json", by_alias=True)
    assert parse_service(again) == spec


@pytest.mark.parametrize("name", VALID)
def test_every_kind_of_spec_survives_writing_and_reading(name: str) -> None:
    service = valid_service(name)
    spec = parse_service(service)
    for parts in (spec.model_dump(mode="json", by_alias=True, exclude_defaults=True),
                  spec.model_dump(mode="json", by_alias=True)):  # fmt: skip
        assert parse_service({**service, "spec": parts}) == spec


def test_row_11_a_queue_target_beyond_the_metrics_range_is_refused() -> None:
    queue = {"models[0].maxBatchSize": 8, "models[0].batching": {}, "models[0].queue": {"maxSize": 100}}
    assert make_spec({**queue, "scaling.queueDepth.target": 99}).scaling.queue_depth.target == 99
    with pytest.raises(InvalidSpec, match=r"spec\.scaling\.queueDepth\.target: .* raise maxSize \(got 100\)"):
        make_spec({**queue, "scaling.queueDepth.target": 100})


def test_row_11_the_smallest_of_several_queues_decides() -> None:
    base = {"format": "ONNX", "source": {"uri": "pvc://a/b"}, "maxBatchSize": 8, "batching": {}}
    models = [{**base, "name": "a", "queue": {"maxSize": 100}}, {**base, "name": "b", "queue": {"maxSize": 4}}]
    with pytest.raises(InvalidSpec, match=r"must be below every model's queue\.maxSize"):
        make_spec(models=models)


@given(st.integers(0, 86_400_000_000) | st.integers(0, 86_400_000).map(lambda number: number * 1000))
def test_a_duration_survives_writing_and_reading(microseconds: int) -> None:
    text = format_duration(microseconds / 1_000_000)
    assert round(parse_duration(text) * 1_000_000) == microseconds
    assert len(text) <= 20


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("2m", 120), ("1h30m", 5400), ("0s", 0), ("1.5s", 1.5), ("1m0.5s", 60.5)]
)
def test_a_duration_is_read_in_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "5 s", "-5s", "s", "5d", "5s\n", "\uff11s", 5, True, None, "1" * 21 + "s"])
def test_what_is_no_duration_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="write a number and a unit"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("1", "1"), ("1000m", "1"), ("1500m", "1500m"), ("0.5", "500m"), ("4000", "4k"), ("0", "0"),
        ("1.5Gi", "1536Mi"),
        ("1024Mi", "1Gi"), ("1000Mi", "1000Mi"), ("0.5Ki", "512"), ("1000M", "1G"), ("1.5M", "1500k"),
        ("1.001Mi", "1049624576m"), ("64Ti", "64Ti"), ("1048576", "1048576"), ("0.25Ki", "256"),
    ],
)  # fmt: skip
def test_a_quantity_is_written_as_the_api_server_stores_it(text: str, stored: str) -> None:
    assert canonical_quantity(text) == stored


@given(st.from_regex(re.compile(r"[0-9]{1,6}(\.[0-9]{1,3})?(k|M|G|Ki|Mi|Gi)?", re.ASCII), fullmatch=True))
def test_the_stored_form_of_a_quantity_is_the_same_amount(text: str) -> None:
    amount = parse_quantity(text)
    stored = parse_quantity(canonical_quantity(text).replace("E", "000P"))
    assert 0 <= stored - amount < Decimal("0.001")
    assert canonical_quantity(canonical_quantity(text)) == canonical_quantity(text)


@pytest.mark.parametrize("text", ["", "-1", "1e3", "1 Gi", "1Gi\n", "\uff11", "1Zi", 0.5, True, None, "1" * 21])
def test_what_is_no_quantity_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="write a number with an optional suffix"):
        parse_quantity(text)


@given(st.text(max_size=200) | st.integers() | st.none() | st.lists(st.text()))
def test_a_shown_value_is_one_short_printable_line(value: Any) -> None:
    text = shown(value)
    assert len(text) <= 80
    assert text.isprintable()


def test_a_part_of_a_spec_cant_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        make_spec().paused = True  # type: ignore[misc]


def test_a_full_status_is_accepted_by_its_model() -> None:
    condition = {
        "type": "Ready", "status": "True", "reason": "Ready", "message": "", "observedGeneration": 3,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    status = {
        "observedGeneration": 3,
        "conditions": [condition],
        "replicas": {"ready": 1, "wanted": 2, "summary": "1/2"},
        "gpus": {"resource": "nvidia.com/gpu", "perReplica": 1, "waiting": [{"reason": "NoFreeAccelerator"}]},
        "rollout": {"strategy": "Surge", "reason": "A matching nvidia.com/gpu is free."},
        "scaling": {
            "decision": "Up", "replicas": 2, "term": "queueDepth", "rail": "maxReplicas", "message": "Up.",
            "terms": [{"name": "queueDepth", "replicas": 2, "detail": "16 waiting"}, {"name": "memory"}],
            "waiting": 16, "quality": "fresh", "lastScaleUp": "2026-01-01T00:00:00Z",
        },
    }  # fmt: skip
    parsed = InferenceServiceStatus.model_validate(status)
    assert parsed.scaling is not None
    assert parsed.scaling.terms[1].replicas is None
