"""tests/SYMPTOMS.md is true: it lists every test of a symptom, and every test that it names exists."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

from conch.triton.metrics import Labels, promql

ROOT = Path(__file__).parents[2]
TEST = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)
ROWS = re.compile(r"(?<=_)row_(\d+(?:_and_\d+)*)(?=_)")


def rows_of_tests() -> dict[int, set[str]]:
    """Row → the tests that name it."""
    found: dict[int, set[str]] = defaultdict(set)
    for path in [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("e2e/test_*.py")]:
        for name in TEST.findall(path.read_text()):
            for rows in ROWS.findall(name):
                for row in rows.split("_and_"):
                    found[int(row)].add(f"{path.relative_to(ROOT)}::{name}")
    return found


def table() -> dict[int, tuple[set[str], str]]:
    """Row → the tests that the page names, and the state."""
    rows = {}
    for line in (ROOT / "tests" / "SYMPTOMS.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].isdecimal():
            rows[int(cells[0])] = (set(re.findall(r"`([^`]+)`", cells[2])), cells[3])
    return rows


def test_every_row_is_on_the_page_with_a_state() -> None:
    assert sorted(table()) == list(range(1, 96))
    for row, (tests, state) in table().items():
        assert state.startswith(("met", "in part: ", "later: ")), f"row {row}: {state}"
        assert tests or not state.startswith("met"), f"row {row} is met without a test"


@pytest.mark.parametrize("row", range(1, 96))
def test_every_test_of_a_row_is_named_there(row: int) -> None:
    named, _ = table()[row]
    assert rows_of_tests()[row] - named == set()


def test_every_named_test_exists() -> None:
    for row, (tests, _) in table().items():
        for test in tests:
            path, _, name = test.partition("::")
            assert name in TEST.findall((ROOT / path).read_text()), f"row {row}: {test}"


# --- rows that are met by what is not there


def test_row_6_no_query_asks_for_gpu_utilisation() -> None:
    text = " ".join(promql(Labels(), 30, 30.0).values()).lower()
    assert "memory" in text
    assert "util" not in text


def test_row_48_row_63_row_64_there_is_no_webhook_and_no_certificate() -> None:
    folders = (ROOT / "manifests", ROOT / "crds")
    texts = [path.read_text() for folder in folders for path in folder.rglob("*.yaml")]
    objects = [item for text in texts for item in yaml.safe_load_all(text) if item]
    assert objects
    assert not [item for item in objects if "Webhook" in item["kind"] or item["kind"] in {"Certificate", "Issuer"}]
    crd = next(item for item in objects if item["kind"] == "CustomResourceDefinition")
    assert crd["spec"].get("conversion", {"strategy": "None"})["strategy"] == "None"
