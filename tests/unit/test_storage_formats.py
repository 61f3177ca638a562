"""What each format's folders must hold, and the sentence that says what was found and what to write."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conch.storage.errors import FetchError, SourceRefusedError, WrongLayoutError
from conch.storage.layout import Source, arrange, inspect
from conch.storage.plan import PlannedEngine, PlannedModel
from conch.storage.repository import Repository

SAVED_MODEL = ("saved_model.pb", "variables/variables.index")


def planned(mount: Path | None, file_name: str | None, expects: str = "File", **changes: Any) -> PlannedModel:
    fields: dict[str, Any] = {
        "name": "resnet",
        "uri": "pvc://models/resnet",
        "file_name": file_name,
        "expects": expects,
        "field": "spec.models[0]",
        "mount": mount and str(mount),
        "path": "/resnet",
        "config": 'name: "resnet"\n',
    }
    return PlannedModel(**(fields | changes))


def fill(folder: Path, *names: str) -> Path:
    """Files, and folders where a name ends in a slash."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        place = folder / name
        if name.endswith("/"):
            place.mkdir(parents=True, exist_ok=True)
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(f"bytes of {name}".encode())
    return folder


def places(source: Source, mount: Path) -> dict[str, str]:
    """Place in the model's folder → what is there, relative to the mount."""
    return {str(link.place): str(link.target.relative_to(mount)) for link in source.links}


def seen(folder: Path) -> set[str]:
    found = set()
    for current, _, names in os.walk(folder, followlinks=True):
        found |= {str((Path(current) / name).relative_to(folder)) for name in names}
    return found


ARRANGEMENTS: list[tuple[str | None, str, dict[str, Any], list[str], dict[str, str]]] = [
    # ONNX, as a file, with weights of its own, and as a folder.
    ("model.onnx", "FileOrFolder", {}, ["1/model.onnx"], {"1": "resnet/1"}),
    ("model.onnx", "FileOrFolder", {}, ["model.onnx", "weights.bin"], {"1": "resnet"}),
    ("model.onnx", "FileOrFolder", {}, ["4/model.onnx/model.onnx", "4/model.onnx/w"], {"4": "resnet/4"}),
    ("resnet.onnx", "FileOrFolder", {}, ["1/resnet.onnx"], {"1": "resnet/1"}),
    ("resnet.onnx", "FileOrFolder", {}, ["1/resnet.onnx/model.onnx"], {"1": "resnet/1"}),
    # TensorFlow: Triton's arrangement, the SavedModel itself, and TensorFlow Serving's numbered ones.
    ("model.savedmodel", "Folder", {}, [f"1/model.savedmodel/{name}" for name in SAVED_MODEL], {"1": "resnet/1"}),
    ("model.savedmodel", "Folder", {}, [f"model.savedmodel/{name}" for name in SAVED_MODEL], {"1": "resnet"}),
    ("model.savedmodel", "Folder", {}, [*SAVED_MODEL], {"1/model.savedmodel": "resnet"}),
    ("model.savedmodel", "Folder", {}, [f"{version}/{name}" for version in (7, 12) for name in SAVED_MODEL],
     {"7/model.savedmodel": "resnet/7", "12/model.savedmodel": "resnet/12"}),
    ("model.savedmodel", "Folder", {}, ["1/model.savedmodel/saved_model.pbtxt"], {"1": "resnet/1"}),
    ("model.savedmodel", "Folder", {}, ["1/saved_model.pb", "1/model.savedmodel/saved_model.pb"], {"1": "resnet/1"}),
    ("model.xml", "File", {}, ["1/model.xml", "1/model.bin"], {"1": "resnet/1"}),
    ("net.v2.xml", "File", {}, ["1/net.v2.xml", "1/net.v2.bin"], {"1": "resnet/1"}),
    ("model.plan", "File", {}, ["2/model.plan"], {"2": "resnet/2"}),
    ("model.py", "File", {}, ["1/model.py", "1/more.py", "env.tar.gz", "shared/code.py"],
     {"1": "resnet/1", "env.tar.gz": "resnet/env.tar.gz", "shared": "resnet/shared"}),
    ("model.pt", "File", {}, ["1/model.pt"], {"1": "resnet/1"}),
    ("model.tflite", "File", {}, ["1/model.tflite"], {"1": "resnet/1"}),
    ("model.dali", "File", {}, ["1/model.dali"], {"1": "resnet/1"}),
    ("model.json", "File", {}, ["1/model.json"], {"1": "resnet/1"}),
    # Auto and TensorRT-LLM: whatever is there.
    (None, "Anything", {}, ["1/whatever.engine"], {"1": "resnet/1"}),
    ("net.savedmodel", "FileOrFolder", {}, ["1/net.savedmodel/saved_model.pb"], {"1": "resnet/1"}),
    (None, "Anything", {}, ["config.json", "rank0.engine"], {"1": "resnet"}),
    # Labels, warm-up data, initial states.
    ("model.onnx", "FileOrFolder", {"extra_files": ("labels.txt", "warmup/in", "initial_state/s")},
     ["1/model.onnx", "labels.txt", "warmup/in", "initial_state/s", "README.md"],
     {"1": "resnet/1", "labels.txt": "resnet/labels.txt", "warmup": "resnet/warmup",
      "initial_state": "resnet/initial_state", "README.md": "resnet/README.md"}),
    ("model.onnx", "FileOrFolder", {"extra_files": ("labels.txt", "warmup/in")},
     ["model.onnx", "labels.txt", "warmup/in"],
     {"1": "resnet", "labels.txt": "resnet/labels.txt", "warmup": "resnet/warmup"}),
    # What desktops leave, another configuration, and folders that Triton ignores.
    ("model.onnx", "FileOrFolder", {}, [".DS_Store", "__MACOSX/x", "._1", "config.pbtxt", "configs/a.pbtxt", "02/x",
     "1/model.onnx", "1/.DS_Store"], {"1": "resnet/1"}),
    # Required versions: the others aren't loaded, so they may be as they are.
    ("model.onnx", "FileOrFolder", {"versions": (2, 3)}, ["1/broken", "2/model.onnx", "3/model.onnx"],
     {"2": "resnet/2", "3": "resnet/3"}),
    ("model.onnx", "FileOrFolder", {"versions": (1,)}, ["model.onnx"], {"1": "resnet"}),
]  # fmt: skip


@pytest.mark.parametrize("case", ARRANGEMENTS)
def test_each_formats_folder_is_found(
    case: tuple[str | None, str, dict[str, Any], list[str], dict[str, str]], tmp_path: Path
) -> None:
    file_name, expects, changes, files, expected = case
    mount = fill(tmp_path / "mount", *(f"resnet/{name}" for name in files))
    model = planned(mount, file_name, expects, **changes)
    assert places(inspect(model), mount) == expected


@pytest.mark.parametrize("case", ARRANGEMENTS)
def test_a_download_is_arranged_as_a_mounted_folder_is(
    case: tuple[str | None, str, dict[str, Any], list[str], dict[str, str]], tmp_path: Path
) -> None:
    file_name, expects, changes, files, expected = case
    mount = fill(tmp_path / "mount", *(f"resnet/{name}" for name in files))
    model = planned(mount, file_name, expects, **changes)
    linked, downloaded = Repository(tmp_path / "linked"), Repository(tmp_path / "downloaded")
    source = inspect(model)
    remote = model.model_copy(update={"mount": None, "path": None, "uri": "s3://models/resnet"})
    for repository in (linked, downloaded):
        repository.prepare()
    linked.stage_links(model, source.links)
    downloaded.stage_downloaded(remote, arrange(remote, mount / "resnet").links, mount / "resnet")
    linked.show([model])
    downloaded.show([remote])
    assert seen(tmp_path / "linked") == seen(tmp_path / "downloaded")
    assert not any(path.is_symlink() for path in (tmp_path / "downloaded").rglob("*"))
    assert {link.split("/")[0] for link in expected} == {
        path.name for path in (tmp_path / "downloaded/resnet").iterdir() if path.name != "config.pbtxt"
    }


@pytest.mark.parametrize(
    "case",
    [
        ("model.onnx", "FileOrFolder", {}, ["1/model.onnx", "3/resnet.onnx"],
         ("expected model.onnx in version 3, found resnet.onnx (pvc://models/resnet); "
         "set spec.models[0].file to resnet.onnx, or rename the file")),
        ("model.onnx", "FileOrFolder", {}, ["1/a.onnx", "1/b.onnx"],
         ("expected model.onnx in version 1, found a.onnx, b.onnx (pvc://models/resnet); "
         "set spec.models[0].file to one of a.onnx, b.onnx, or rename the file")),
        ("model.onnx", "FileOrFolder", {}, ["net.onnx"],
         ("expected model.onnx or numbered version folders, found net.onnx (pvc://models/resnet); "
         "set spec.models[0].file to net.onnx, or rename the file")),
        ("model.onnx", "FileOrFolder", {}, ["fp16/1/model.onnx", "README.md"],
         ("found README.md, fp16 (pvc://models/resnet); it is one level too deep: "
         "set spec.models[0].source.uri to pvc://models/resnet/fp16")),
        ("model.onnx", "FileOrFolder", {}, ["export/fp16/model.onnx"],
         "set spec.models[0].source.uri to pvc://models/resnet/export/fp16"),
        ("model.onnx", "FileOrFolder", {"uri": "image://r.example/m:1#/", "path": "/resnet"}, ["a/model.onnx"],
         "set spec.models[0].source.uri to image://r.example/m:1#/a"),
        ("model.onnx", "FileOrFolder", {}, ["2/export/model.onnx"],
         ("expected model.onnx in version 2, found export (pvc://models/resnet); "
         "it is one level too deep: move what is in 2/export up into 2")),
        ("model.onnx", "FileOrFolder", {}, ["1/model.plan"],
         "set spec.models[0].format to TensorRT if model.plan is the model, or put model.onnx into version 1"),
        ("model.plan", "File", {}, ["1/model.engine"], "set spec.models[0].file to model.engine"),
        ("model.pt", "File", {}, ["1/net.pth"], "set spec.models[0].file to net.pth"),
        ("model.json", "File", {}, ["1/config.json"],
         "put model.json into version 1, or set spec.models[0].format to what it is"),
        ("model.onnx", "FileOrFolder", {}, ["v1/model.onnx", "v2/model.onnx"],
         "rename the folder v1 to 1: versions are plain numbers from 1"),
        ("model.onnx", "FileOrFolder", {}, ["1/model.onnx", "2/"],
         "version 2 is an empty folder, expected model.onnx in it"),
        ("model.onnx", "FileOrFolder", {}, ["1/.DS_Store"], "version 1 is an empty folder"),
        ("model.onnx", "FileOrFolder", {}, [".DS_Store"], "found nothing"),
        ("model.onnx", "FileOrFolder", {}, ["1/model.onnx/net.onnx"],
         "found a folder model.onnx without model.onnx in it, but with net.onnx"),
        ("model.onnx", "FileOrFolder", {"versions": (2, 4)}, ["1/model.onnx", "2/model.onnx"],
         ("expected version 4, found 1, 2 (pvc://models/resnet); add the folder to the source, or correct "
         "spec.models[0].versions.numbers")),
        ("model.onnx", "FileOrFolder", {"versions": (2,)}, ["model.onnx"], "expected version 2, found model.onnx"),
        ("model.plan", "File", {}, ["1/model.plan/x"], "expected model.plan in version 1, found a folder model.plan"),
        ("model.xml", "File", {}, ["1/model.xml"],
         ("expected model.xml in version 1, found it without model.bin beside it (pvc://models/resnet); "
         "add model.bin to version 1: both files are the model")),
        ("model.savedmodel", "Folder", {}, ["1/model.savedmodel/keras_metadata.pb"],
         ("expected a folder model.savedmodel in version 1, found model.savedmodel without saved_model.pb in it, but "
         "with keras_metadata.pb")),
        ("net.savedmodel", "FileOrFolder", {}, ["1/net.savedmodel/x"], "without saved_model.pb in it, but with x"),
        ("model.savedmodel", "Folder", {}, ["1/resnet/saved_model.pb"], "set spec.models[0].file to resnet"),
        ("model.savedmodel", "Folder", {}, ["1/model.savedmodel"], "found a file model.savedmodel"),
        (None, "Anything", {}, ["1/"], "version 1 is an empty folder, expected a model in it"),
        (None, "Anything", {}, [".git/x"], "expected a model, found nothing"),
        ("model.onnx", "FileOrFolder", {"extra_files": ("labels.txt",)}, ["1/model.onnx", "1/labels.txt"],
         "expected the file labels.txt, found 1/labels.txt (pvc://models/resnet); move it to labels.txt"),
        ("model.onnx", "FileOrFolder", {"extra_files": ("warmup/image",)}, ["1/model.onnx", "warmup/other"],
         ("expected the file warmup/image, found other (pvc://models/resnet); add it to the source, or correct its "
         "name in spec.models[0]")),
        ("model.onnx", "FileOrFolder", {"extra_files": ("warmup/image",)}, ["1/model.onnx"],
         "expected the file warmup/image, found no folder warmup"),
    ],
)  # fmt: skip
def test_row_78_the_sentence_says_what_was_found_and_what_to_write(
    case: tuple[str | None, str, dict[str, Any], list[str], str], tmp_path: Path
) -> None:
    file_name, expects, changes, files, sentence = case
    mount = fill(tmp_path / "mount", *(f"resnet/{name}" for name in files))
    with pytest.raises(WrongLayoutError) as refusal:
        inspect(planned(mount, file_name, expects, **changes))
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("file_name", "expects", "changes", "sentence"),
    [
        ("model.savedmodel", "Folder", {}, "point spec.models[0].source.uri at the folder that holds saved_model.pb"),
        ("model.xml", "File", {}, "expected model.bin beside the model, found the single file resnet"),
        ("model.onnx", "File", {"versions": (2,)}, "versions 2 are wanted, found the single file resnet, which is"),
        ("model.onnx", "File", {"extra_files": ("labels.txt",)}, "expected labels.txt beside the model"),
        (None, "Anything", {}, "found the file resnet, whose name tells no format"),
    ],
)
def test_a_single_file_is_refused_where_more_is_needed(
    file_name: str | None, expects: str, changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(WrongLayoutError) as refusal:
        inspect(planned(fill(tmp_path, "resnet"), file_name, expects, **changes))
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("path", "place"),
    [("net.onnx", "1/model.onnx"), ("a/net.engine", "1/model.plan"), ("net.pth", "1/model.pt"), ("x.py", "1/model.py")],
)
def test_a_single_file_of_an_open_format_gets_the_name_by_which_triton_tells_it(
    path: str, place: str, tmp_path: Path
) -> None:
    mounted = inspect(planned(fill(tmp_path, path), None, "Anything", path=f"/{path}"))
    assert [str(link.place) for link in mounted.links] == [place]
    remote = planned(None, None, "Anything", uri=f"s3://models/{path}", path=None)
    downloaded = arrange(remote, fill(tmp_path, "0123.partial") / "0123.partial")
    assert [str(link.place) for link in downloaded.links] == [place]


def test_an_archives_wrapping_folder_is_looked_through_and_a_versions_is_not(tmp_path: Path) -> None:
    remote: dict[str, Any] = {"uri": "https://x.example/m.tgz", "digest": "sha256:" + "0" * 64, "path": None}
    model = planned(None, "model.onnx", **remote)
    wrapped = fill(tmp_path / "wrapped", "resnet50/1/model.onnx", ".DS_Store")
    assert places(arrange(model, wrapped, from_archive=True), wrapped) == {"1": "resnet50/1"}
    plain = fill(tmp_path / "plain", "1/model.onnx")
    assert places(arrange(model, plain, from_archive=True), plain) == {"1": "1"}
    folder = planned(None, "model.savedmodel", "Folder", **remote)
    tensorflow = fill(tmp_path / "tf", "model.savedmodel/saved_model.pb")
    assert places(arrange(folder, tensorflow, from_archive=True), tensorflow) == {"1": "."}
    auto = planned(None, None, "Anything", **remote)
    assert places(arrange(auto, tensorflow, from_archive=True), tensorflow) == {"1": "."}
    with pytest.raises(WrongLayoutError, match="one level too deep"):
        arrange(model, wrapped)


def test_links_inside_a_download_are_followed_and_links_out_of_it_refused(tmp_path: Path) -> None:
    model = planned(None, "model.onnx", uri="s3://models/resnet", path=None)
    content = fill(tmp_path / "content", "data/model.onnx", "1/")
    (content / "1/model.onnx").symlink_to("../data/model.onnx")
    (content / "1/stub").write_bytes(b"#!")
    (content / "1/stub").chmod(0o700)
    repository = Repository(tmp_path / "models")
    repository.prepare()
    repository.stage_downloaded(model, arrange(model, content).links, content)
    repository.show([model])
    assert (tmp_path / "models/resnet/1/model.onnx").read_bytes() == b"bytes of data/model.onnx"
    assert not (tmp_path / "models/resnet/1/model.onnx").is_symlink()
    modes = {path.name: oct(path.stat().st_mode & 0o7777) for path in (tmp_path / "models/resnet/1").iterdir()}
    assert modes == {"model.onnx": "0o644", "stub": "0o755"}
    (content / "out").symlink_to("../..")
    with pytest.raises(WrongLayoutError, match="leads out of the volume"):
        arrange(model, content)


def test_an_ensemble_gets_its_empty_version_folder(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    repository.prepare()
    models = [
        planned(None, None, "Nothing", uri=None, path=None, name="one"),
        planned(None, None, "Nothing", uri=None, path=None, name="two", versions=(3, 5)),
    ]
    for model in models:
        repository.stage_nothing(model)
    repository.show(models)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "one", "one/1", "one/config.pbtxt", "two", "two/3", "two/5", "two/config.pbtxt",
    ]  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_files_that_nobody_may_read_are_named_before_triton_meets_them() -> None:
    program = (
        "import os, sys, conch.storage.layout\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "from conch.storage.layout import inspect; from conch.storage.plan import PlannedModel\n"
        "try: inspect(PlannedModel.model_validate_json(sys.argv[1]))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    # Not below tmp_path, whose parents only root may enter.
    with tempfile.TemporaryDirectory() as folder:
        mount = fill(Path(folder), "resnet/1/model.onnx", "resnet/1/weights", "locked/1/model.onnx")
        mount.chmod(0o755)
        (mount / "resnet/1/weights").chmod(0)
        (mount / "locked/1").chmod(0)
        for path, name in (("/resnet", "weights"), ("/locked", "1")):
            model = planned(mount, "model.onnx", path=path, uri=f"pvc://models{path}")
            done = subprocess.run(
                [sys.executable, "-c", program, model.model_dump_json(by_alias=True)],
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "operator")},
                capture_output=True, text=True, check=True, timeout=30,
            )  # fmt: skip
            assert done.stdout == (
                f"SourceRefusedError pvc://models{path} may not be read ({name}: permission denied); "
                "make its files readable for the pod's user or group (fsGroup)\n"
            )


def engine(folder: Path, where: str, **fields: Any) -> None:
    (folder / where / "conch-engine.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("where", ["resnet/1", "resnet"])
def test_an_engine_that_the_images_tensorrt_can_not_load_is_refused_with_both_versions(
    where: str, tmp_path: Path
) -> None:
    mount = fill(tmp_path, "resnet/1/model.plan")
    engine(mount, where, tensorRT="10.4.0", computeCapability="8.9")
    model = planned(mount, "model.plan")
    inspect(model)  # the image's version isn't known, so nothing is refused for it
    inspect(model, tensor_rt="10.4")
    with pytest.raises(WrongLayoutError) as refusal:
        inspect(model, tensor_rt="10.7.0")
    assert str(refusal.value) == (
        "the engine was built with TensorRT 10.4.0, and the image has 10.7.0 (conch-engine.json); build it again "
        "with 10.7.0, or set spec.runtime.image to a release with TensorRT 10.4.0"
    )


def test_a_version_compatible_engine_runs_with_a_later_tensorrt(tmp_path: Path) -> None:
    mount = fill(tmp_path, "resnet/1/model.plan")
    engine(mount, "resnet/1", tensorRT="10.4.0", versionCompatible=True)
    inspect(planned(mount, "model.plan"), tensor_rt="10.7.0")
    with pytest.raises(WrongLayoutError, match=r"version-compatible with TensorRT 10\.4\.0, which 10\.3\.0"):
        inspect(planned(mount, "model.plan"), tensor_rt="10.3.0")


def test_what_the_manifest_leaves_open_the_spec_says(tmp_path: Path) -> None:
    mount = fill(tmp_path, "resnet/1/model.plan")
    engine(mount, "resnet/1", tensorRT="10.4.0")
    compatible = PlannedEngine(version_compatible=True)
    inspect(planned(mount, "model.plan", engine=compatible), tensor_rt="10.7.0")
    with pytest.raises(WrongLayoutError, match=r"version-compatible with TensorRT 10\.4\.0, which 10\.3\.0"):
        inspect(planned(mount, "model.plan", engine=compatible), tensor_rt="10.3.0")
    engine(mount, "resnet/1", computeCapability="8.9")
    with pytest.raises(WrongLayoutError, match=r"built with TensorRT 10\.4\.0, and the image has 10\.7\.0"):
        inspect(planned(mount, "model.plan", engine=PlannedEngine(tensor_rt="10.4.0")), tensor_rt="10.7.0")


@pytest.mark.parametrize(
    ("said", "written", "words"),
    [
        ({"version_compatible": True}, {"versionCompatible": False}, "engine.versionCompatible is True"),
        (
            {"hardware_compatibility": "AmperePlus"}, {"hardwareCompatibility": "SameComputeCapability"},
            "engine.hardwareCompatibility is 'AmperePlus', and conch-engine.json",
        ),
    ],
)  # fmt: skip
def test_the_specs_word_about_compatibility_must_be_the_manifests_too(
    said: dict[str, Any], written: dict[str, Any], words: str, tmp_path: Path
) -> None:
    mount = fill(tmp_path, "resnet/1/model.plan")
    engine(mount, "resnet/1", **written)
    with pytest.raises(WrongLayoutError, match=re.escape(words)):
        inspect(planned(mount, "model.plan", engine=PlannedEngine(**said)))


def test_the_specs_word_about_an_engine_must_be_the_manifests(tmp_path: Path) -> None:
    mount = fill(tmp_path, "resnet/1/model.plan")
    engine(mount, "resnet", tensorRT="10.4.0", computeCapability="8.9")
    inspect(planned(mount, "model.plan", engine=PlannedEngine(tensor_rt="10.4.0")))
    with pytest.raises(WrongLayoutError) as refusal:
        inspect(planned(mount, "model.plan", engine=PlannedEngine(compute_capability="8.6")))
    assert str(refusal.value) == (
        "spec.models[0].source.engine.computeCapability is '8.6', and conch-engine.json beside the engine says '8.9'; "
        "correct spec.models[0].source.engine.computeCapability, or the manifest if the engine was built anew"
    )


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("{", WrongLayoutError, "is no engine manifest"),
        ('{"tensorRT": 10}', WrongLayoutError, "is no engine manifest: tensorRT"),
        ('{"tensorRT": "ten"}', WrongLayoutError, "is no engine manifest: tensorRT"),
        ('{"tensorrt": "10.4.0"}', WrongLayoutError, "is no engine manifest: tensorrt"),
        ("[]", WrongLayoutError, "is no engine manifest"),
        (" " * 20_000, WrongLayoutError, "is longer than 16384 bytes"),
    ],
)
def test_a_manifest_that_is_none_is_refused(text: str, kind: type[FetchError], words: str, tmp_path: Path) -> None:
    mount = fill(tmp_path, "resnet/1/model.plan")
    (mount / "resnet/1/conch-engine.json").write_text(text)
    with pytest.raises(kind, match=words):
        inspect(planned(mount, "model.plan"))


TREES = st.lists(
    st.lists(
        st.sampled_from(["1", "2", "03", "v1", "model.onnx", "model.xml", "saved_model.pb", "labels.txt", ".DS_Store"]),
        min_size=1,
        max_size=4,
    ).map("/".join),
    max_size=6,
)
KINDS = st.sampled_from(
    [("model.onnx", "FileOrFolder"), ("model.xml", "File"), ("model.savedmodel", "Folder"), (None, "Anything")]
)


@settings(max_examples=300, deadline=None)
@given(files=TREES, kind=KINDS, versions=st.sampled_from([(), (1,), (2,), (1, 2)]))
def test_any_tree_is_either_arranged_with_the_wanted_file_or_refused_with_cause_and_fix(
    files: list[str], kind: tuple[str | None, str], versions: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    mount = tmp_path_factory.mktemp("tree")
    (mount / "resnet").mkdir()
    for name in files:
        place = mount / "resnet" / name
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(b"x")
        except (NotADirectoryError, FileExistsError, IsADirectoryError):
            continue
    model = planned(mount, *kind, versions=versions)
    try:
        source = inspect(model)
    except (WrongLayoutError, SourceRefusedError) as error:
        refused = error
    else:
        repository = Repository(mount / "models")
        repository.prepare()
        repository.stage_links(model, source.links)
        repository.show([model])
        shown = mount / "models/resnet"
        numbers = [child for child in shown.iterdir() if child.name.isdigit()]
        assert numbers
        assert {str(number) for number in versions} <= {number.name for number in numbers}
        assert all((number / (kind[0] or "")).exists() for number in numbers)
        return
    assert refused.cause
    assert refused.fix
