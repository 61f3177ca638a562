"""The path of `make demo`, on the cluster of the test run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import demo
import demo_page

if TYPE_CHECKING:
    from sandbox import Region

pytestmark = pytest.mark.sandbox


@pytest.mark.usefixtures("operator")
def test_one_service_goes_from_apply_through_load_to_deletion_without_a_lost_request(region: Region) -> None:
    said: list[str] = []

    class Told(demo.Stage):
        def say(self, text: str) -> None:
            said.append(text)

    outcome = demo.Play(region, Told(), namespace="demo-path").run()
    assert demo.problems(outcome) == [], "\n".join([*said, *map(demo.line, outcome.samples)])
    figures = outcome.summary()
    assert figures["ok"]
    assert figures["requests"] > outcome.step_rate * demo.STEP_S[0]
    assert {prediction.label for prediction in outcome.predictions} >= {"python", "go", "yaml"}
    assert any(sample.waiting for sample in outcome.samples)
    assert max(sample.memory_mib or 0 for sample in outcome.samples) > 0
    assert any(decision for _, decision in outcome.decisions)
    json.dumps(figures)

    page = demo_page.render(outcome)
    assert "As promised" in page
    assert page.count("<svg") == 1
    # Nothing is loaded from elsewhere: the only addresses are names of XML namespaces.
    assert not [word for word in ("src=", "@import", "<link", "<script", "url(http") if word in page]
