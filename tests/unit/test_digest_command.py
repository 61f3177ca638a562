"""`conch digest`: its lines fit into a resource, and fit what `conch fetch` verifies."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from conch.api.source import ModelSource
from conch.cli.main import app
from conch.storage.digest import tree_digest
from conch.storage.layout import walk

ROOT = Path(__file__).parents[2]


def conch_digest(*arguments: object, code: int = 0) -> Result:
    done = CliRunner().invoke(app, ["digest", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done


def fill(folder: Path, **files: str) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def source_of(text: str) -> ModelSource:
    """The printed lines as a part of a resource, through the API's own rules."""
    source: dict[str, Any] = yaml.safe_load(text)["source"]
    return ModelSource.model_validate({"uri": "pvc://models/resnet"} | source, context={"wire": True})


def test_a_file_has_the_digest_that_sha256sum_prints(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"content")
    done = conch_digest(tmp_path / "m.onnx")
    assert source_of(done.stdout).digest == f"sha256:{hashlib.sha256(b'content').hexdigest()}"
    assert done.stderr == ""


def test_the_command_in_the_documentation_computes_a_folders_digest(tmp_path: Path) -> None:
    folder = fill(tmp_path / "m", **{"1/model.onnx": "a", "1/ü x": "b", ".hidden": "c", "lost+found/x": "d"})
    (folder / "link").symlink_to("1")
    documented = re.search(r"^ +(find -L .*\n.*sha256sum)$", (ROOT / "docs/models.md").read_text(), re.MULTILINE)
    assert documented is not None
    said = subprocess.run(["sh", "-c", documented[1]], cwd=folder, capture_output=True, text=True, check=True).stdout
    assert source_of(conch_digest(folder).stdout).digest == f"sha256:{said.split()[0]}"
    assert f"sha256:{said.split()[0]}" == tree_digest(walk(folder.resolve(), folder.resolve(), ""))


@pytest.mark.parametrize("where", ["conch-engine.json", "1/conch-engine.json"])
def test_the_engines_manifest_becomes_source_engine(where: str, tmp_path: Path) -> None:
    manifest = {"tensorRT": "10.4.0", "computeCapability": "8.9", "platform": "linux/amd64", "versionCompatible": True}
    folder = fill(tmp_path / "m", **{"1/model.plan": "x", where: json.dumps(manifest)})
    engine = source_of(conch_digest(folder).stdout).engine
    assert engine is not None
    assert engine.model_dump(by_alias=True, exclude_defaults=True) == manifest
    assert json.loads(conch_digest(folder, "--output=json").stdout)["engine"] == manifest


def test_versions_with_different_engines_leave_it_out_and_say_so(tmp_path: Path) -> None:
    folder = fill(tmp_path, **{
        "1/model.plan": "x", "1/conch-engine.json": '{"tensorRT": "10.4.0"}', "2/conch-engine.json": "{}",
    })  # fmt: skip
    done = conch_digest(folder)
    assert "versions have different engine manifests" in done.stderr
    assert source_of(done.stdout).engine is None


def test_the_machines_form_counts_what_is_covered(tmp_path: Path) -> None:
    folder = fill(tmp_path / "m", **{"1/model.onnx": "abc", "labels.txt": "de"})
    found = json.loads(conch_digest("--output", "json", folder).stdout)
    digest = tree_digest(walk(folder.resolve(), folder.resolve(), ""))
    assert found == {"digest": digest, "kind": "Folder", "files": 2, "bytes": 5, "engine": None}


def test_faults_are_named_with_a_fix_and_an_exit_code(tmp_path: Path) -> None:
    assert "absent can't be read (No such file or directory)" in conch_digest(tmp_path / "absent", code=2).stderr
    folder = fill(tmp_path / "claim/m", **{"1/model.onnx": "x"})
    fill(tmp_path / "claim", shared="y")
    (folder / "link").symlink_to("../shared")
    assert "link is a symbolic link that leads out of the volume" in conch_digest(folder, code=1).stderr
    assert "sha256:" in conch_digest(folder, "--volume", tmp_path / "claim").stdout
    assert "doesn't contain" in conch_digest(folder, "--volume", folder / "1", code=2).stderr
    (folder / "link").unlink()
    fill(folder, **{"conch-engine.json": "[]"})
    assert "is no engine manifest" in conch_digest(folder, code=1).stderr
    (tmp_path / "empty" / "1").mkdir(parents=True)
    assert "empty holds no file; name the model's own folder" in conch_digest(tmp_path / "empty", code=1).stderr


def test_a_long_run_shows_how_far_it_is_and_a_short_one_says_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    said = tmp_path / "said"
    with said.open("w") as errors, subprocess.Popen(
        [sys.executable, "-m", "conch.cli.main", "digest", tmp_path / "pipe"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "operator")}, stdout=subprocess.DEVNULL, stderr=errors,
    ) as running:  # fmt: skip
        with (tmp_path / "pipe").open("wb", buffering=0) as pipe:
            while not said.read_text():
                pipe.write(bytes(1 << 16))
        assert running.wait(timeout=30) == 0
    assert re.match(r"conch digest: [0-9.]+ [kMG]B of .*/s\n", said.read_text())
