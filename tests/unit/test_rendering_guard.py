"""What must not change unseen between versions: how a spec is rendered, and the defaults of the API.

`python tests/unit/test_rendering_guard.py` writes the file anew that both are compared with.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from conch.api import crd
from conch.api.inferenceservice import parse_service
from conch.workload import offline
from conch.workload.deployment import RENDERING, Images, template_inputs
from conch.workload.offline import Surroundings

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parents[2]
WRITTEN: Final = Path(__file__).parent / "golden" / "renderings.json"
AROUND: Final = Surroundings(
    Images("conch.example/conch:1", "nvcr.io/nvidia/tritonserver:25.06-py3"), with_pod_monitor=True
)


def now() -> dict[str, Any]:
    """The present state: the rendering's number, each sample's inputs and template, and every default by its path."""
    templates = {}
    for path in sorted((ROOT / "manifests" / "samples").glob("*.yaml")):
        sample = yaml.safe_load(path.read_text())
        (deployment,) = (child for child in offline.render(sample, AROUND).objects if child["kind"] == "Deployment")
        text = json.dumps(deployment["spec"]["template"], sort_keys=True)
        templates[path.stem] = {
            "inputs": template_inputs(parse_service(sample)),
            "template": hashlib.sha256(text.encode()).hexdigest()[:16],
        }
    versions = crd.custom_resource_definition()["spec"]["versions"]
    defaults = {
        version["name"]: dict(_defaults(version["schema"]["openAPIV3Schema"]["properties"]["spec"], "spec"))
        for version in versions
    }
    return {"rendering": RENDERING, "templates": templates, "defaults": defaults}


def _defaults(schema: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    if "default" in schema:
        yield path, schema["default"]
    for name, part in schema.get("properties", {}).items():
        yield from _defaults(part, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from _defaults(schema[key], f"{path}[]")


def rendered_otherwise(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Samples whose template differs although neither their spec nor the rendering's number does."""
    if before["rendering"] != after["rendering"]:
        return []
    old, new = before["templates"], after["templates"]
    return [
        name
        for name in sorted(old.keys() & new.keys())
        if old[name]["inputs"] == new[name]["inputs"] and old[name]["template"] != new[name]["template"]
    ]


def changed_defaults(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Paths whose default became another; one that is new or gone with its field is none of them."""
    return [
        f"{version} {path}: {value} was {old[path]}"
        for version, defaults in sorted(after["defaults"].items())
        for old in [before["defaults"].get(version, {})]
        for path, value in sorted(defaults.items())
        if path in old and old[path] != value
    ]


def test_r7_a_spec_is_rendered_as_before_or_under_another_number() -> None:
    before, after = json.loads(WRITTEN.read_text()), now()
    assert rendered_otherwise(before, after) == [], "raise RENDERING in conch/workload/deployment.py: live pods stay"
    assert before["templates"] == after["templates"], "run: python tests/unit/test_rendering_guard.py"
    assert before["rendering"] == after["rendering"], "run: python tests/unit/test_rendering_guard.py"


def test_r7_a_default_does_not_change_within_a_version_of_the_api() -> None:
    before, after = json.loads(WRITTEN.read_text()), now()
    assert changed_defaults(before, after) == [], "stored objects hold the old one: a new default needs a new version"
    assert before["defaults"] == after["defaults"], "run: python tests/unit/test_rendering_guard.py"


def test_r7_the_guard_sees_what_it_must_and_no_more() -> None:
    before = now()
    name = next(iter(before["templates"]))
    after = json.loads(json.dumps(before))
    after["templates"][name]["template"] = "other"
    assert rendered_otherwise(before, after) == [name]
    assert rendered_otherwise(before, {**after, "rendering": "next"}) == []
    after["templates"][name]["inputs"] = "other"
    assert rendered_otherwise(before, after) == []
    after = json.loads(json.dumps(before))
    version, path = "v1alpha1", "spec.scaling.minReplicas"
    after["defaults"][version] |= {path: 7, "spec.new": 1}
    assert changed_defaults(before, after) == [f"{version} {path}: 7 was {before['defaults'][version][path]}"]


def test_r7_a_template_that_changed_is_not_written_over_without_another_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = now()
    name = next(iter(changed["templates"]))
    changed["templates"][name]["template"] = "other"
    copy = tmp_path / "renderings.json"
    monkeypatch.setattr(sys.modules[__name__], "WRITTEN", copy)
    copy.write_text(json.dumps(changed))
    with pytest.raises(SystemExit, match=f"{name}: rendered otherwise; raise RENDERING"):
        main()
    assert json.loads(copy.read_text()) == changed
    copy.write_text(json.dumps({**changed, "rendering": "before"}))
    main()
    assert json.loads(copy.read_text()) == now()


def main() -> None:
    """Write the file anew, unless that would hide what it is for."""
    before, after = json.loads(WRITTEN.read_text()), now()
    otherwise = rendered_otherwise(before, after)
    if otherwise:
        sys.exit(f"{', '.join(otherwise)}: rendered otherwise; raise RENDERING in conch/workload/deployment.py first")
    WRITTEN.write_text(json.dumps(after, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
