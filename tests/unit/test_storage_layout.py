"""Models on mounted volumes: what is found there, what is refused, and what Triton then sees."""

import hashlib
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import structlog

from conch.storage.digest import file_digest, tree_digest
from conch.storage.errors import (
    DigestMismatchError,
    DiskFullError,
    FetchError,
    SourceRefusedError,
    WrongLayoutError,
)
from conch.storage.fetch import carry_out
from conch.storage.layout import inspect, walk
from conch.storage.plan import Plan, PlannedModel
from conch.storage.remote import Fetcher


def planned(mount: Path, path: str | None = "/filetype", **changes: Any) -> PlannedModel:
    fields: dict[str, Any] = {
        "name": "filetype",
        "uri": f"pvc://models{path}",
        "file_name": "model.onnx",
        "mount": str(mount),
        "path": path,
        "config": 'name: "filetype"\n',
    }
    return PlannedModel(**(fields | changes))


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(f"bytes of {name}".encode())
    return folder


class NothingToDownload:
    def fetch(self, model: PlannedModel, content: Path, downloads: Path) -> None:
        raise AssertionError(f"{model.name} is on a volume; {content} needs no {downloads}")


def fetch(into: Path, *models: PlannedModel, fetcher: Fetcher | None = None, **plan: Any) -> None:
    into.mkdir(exist_ok=True)
    log = structlog.wrap_logger(structlog.testing.CapturingLogger())
    fetcher = fetcher or NothingToDownload()
    carry_out(Plan(models=models, **plan), into, lambda _stall_timeout_s: fetcher, clock=time, log=log)


def seen_by_triton(into: Path) -> set[str]:
    """All paths of the repository, links followed as Triton follows them."""
    found = set()
    for folder, _, names in os.walk(into, followlinks=True):
        found |= {str((Path(folder) / name).relative_to(into)) for name in names}
    return found


@pytest.mark.parametrize(
    ("files", "path", "expected"),
    [
        (["m.bin"], "/m.bin", {"1/model.onnx"}),
        (["filetype/model.onnx", "filetype/w.data"], "/filetype", {"1/model.onnx", "1/w.data"}),
        (["model.onnx"], "/", {"1/model.onnx"}),
        (["model.onnx"], None, {"1/model.onnx"}),
        (["filetype/2/model.onnx", "filetype/10/model.onnx"], "/filetype/", {"2/model.onnx", "10/model.onnx"}),
        (["filetype/3/model.onnx", "filetype/config.pbtxt", "filetype/03/x"], "/filetype", {"3/model.onnx"}),
    ],
)
def test_each_arrangement_becomes_a_repository(
    files: list[str], path: str | None, expected: set[str], tmp_path: Path
) -> None:
    mount = fill(tmp_path / "mount", *files)
    into = tmp_path / "models"
    fetch(into, planned(mount, uri="pvc://models/x", path=path))
    assert seen_by_triton(into) == {"filetype/config.pbtxt"} | {f"filetype/{name}" for name in expected}
    assert (into / "filetype/config.pbtxt").read_text() == 'name: "filetype"\n'
    assert [child.name for child in into.iterdir()] == ["filetype"]


def test_a_mounted_model_is_linked_and_not_copied(tmp_path: Path) -> None:
    mount = fill(tmp_path / "mount", "filetype/1/model.onnx")
    fetch(tmp_path / "models", planned(mount))
    assert (tmp_path / "models/filetype/1").readlink() == mount / "filetype/1"


@pytest.mark.parametrize(
    ("files", "path", "kind", "message"),
    [
        (["filetype/1/model.onnx", "filetype/3/resnet.onnx"], "/filetype", WrongLayoutError,
         "expected model.onnx in version 3, found resnet.onnx"),
        (["filetype/net.onnx"], "/filetype", WrongLayoutError,
         "expected model.onnx or numbered version folders, found net.onnx"),
        (["filetype/0/model.onnx"], "/filetype", WrongLayoutError, "numbered version folders, found 0"),
        ([f"filetype/{i:02}" for i in range(12)], "/filetype", WrongLayoutError, "06, 07 and 4 more"),
        (["filetype/model.onnx"], "/filetipe/v1", SourceRefusedError,
         "has no /filetipe/v1 (the nearest folder holds filetype)"),
    ],
)  # fmt: skip
def test_row_78_a_wrong_layout_is_refused_before_anything_is_served(
    files: list[str], path: str, kind: type[FetchError], message: str, tmp_path: Path
) -> None:
    mount = fill(tmp_path / "mount", *files)
    into = tmp_path / "models"
    good = planned(fill(tmp_path / "other", "model.onnx"), path="/", name="good")
    with pytest.raises(kind) as refusal:
        fetch(into, good, planned(mount, path))
    assert message in str(refusal.value)
    assert str(refusal.value).startswith('model "filetype": ')
    assert seen_by_triton(into) <= {
        ".conch-staging/models/good/config.pbtxt",
        ".conch-staging/models/good/1/model.onnx",
    }


def test_a_volume_that_is_not_mounted_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceRefusedError, match="is not mounted at"):
        inspect(planned(tmp_path / "absent"))


@pytest.mark.parametrize("link", ["filetype", "filetype/1", "filetype/1/model.onnx", "filetype/1/extra/deep"])
def test_a_link_out_of_the_volume_is_refused_at_any_depth(link: str, tmp_path: Path) -> None:
    secret = fill(tmp_path / "secret", "1/model.onnx", "model.onnx")
    mount = fill(tmp_path / "mount", "filetype/1/model.onnx", "filetype/1/extra/other")
    place = mount / link
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.symlink_to(secret / "model.onnx" if link.endswith("onnx") else secret)
    with pytest.raises(WrongLayoutError, match="leads out of the volume"):
        inspect(planned(mount))


def test_a_file_that_is_a_link_out_of_the_volume_is_refused(tmp_path: Path) -> None:
    secret = fill(tmp_path / "secret", "token")
    mount = fill(tmp_path / "mount", "other")
    (mount / "model.onnx").symlink_to(secret / "token")
    with pytest.raises(WrongLayoutError, match=r"model\.onnx is a symbolic link that leads out of the volume"):
        inspect(planned(mount, "/model.onnx"))


def test_links_that_stay_inside_are_pinned_to_what_was_verified(tmp_path: Path) -> None:
    mount = fill(tmp_path / "mount", "..2026/1/model.onnx")
    (mount / "filetype").symlink_to("..2026")
    fetch(tmp_path / "models", planned(mount))
    assert (tmp_path / "models/filetype/1").readlink() == mount / "..2026/1"


def test_a_mount_that_is_itself_reached_by_a_link_keeps_the_name_that_triton_knows(tmp_path: Path) -> None:
    fill(tmp_path / "real", "filetype/model.onnx")
    (tmp_path / "mount").symlink_to("real")
    fetch(tmp_path / "models", planned(tmp_path / "mount"))
    assert (tmp_path / "models/filetype/1").readlink() == tmp_path / "mount/filetype"


def test_pipes_loops_dead_links_and_names_with_control_characters_are_refused(tmp_path: Path) -> None:
    for case, message in enumerate(["neither a file nor a folder", "leads back", "points to nothing", "control char"]):
        folder = fill(tmp_path / str(case), "filetype/model.onnx") / "filetype"
        if case == 0:
            os.mkfifo(folder / "pipe")
        elif case == 1:
            (folder / "again").symlink_to(".")
        elif case == 2:
            (folder / "gone").symlink_to("nowhere")
        else:
            fill(folder, "a\nb")
        with pytest.raises(WrongLayoutError, match=message):
            inspect(planned(folder.parent))


def test_links_that_multiply_files_without_end_are_refused(tmp_path: Path) -> None:
    for level in range(40):
        (tmp_path / f"{level}").mkdir()
        for name in "ab":
            (tmp_path / f"{level}" / name).symlink_to(f"../{level + 1}")
    fill(tmp_path, "40/f")
    with pytest.raises(WrongLayoutError, match=r"holds more than 1000 files and folders, .*spec\.models\[\]\.source"):
        list(walk(tmp_path / "0", tmp_path, "pvc://models/x", entries_max=1000))


def test_the_tree_digest_is_the_one_that_its_docstring_lets_gnu_tools_compute(tmp_path: Path) -> None:
    tree = fill(
        tmp_path, "b/2", "a b/ü", "b.txt", ".hidden", "-n", "B", "b/10/x", "lost+found/skipped", "c/lost+found/x"
    )
    (tree / "link").symlink_to("b")
    command = (
        "find -L . -path ./lost+found -prune -o -type f -printf '%P\\0'"
        " | LC_ALL=C sort -z | xargs -0 sha256sum -- | sha256sum"
    )
    assert command.replace(" | LC_ALL", " \\\n            | LC_ALL") in str(tree_digest.__doc__)
    said = subprocess.run(["sh", "-c", command], cwd=tree, capture_output=True, text=True, check=True).stdout
    assert tree_digest(walk(tree, tree, "pvc://x/y")) == f"sha256:{said.split()[0]}"


def test_the_tree_digest_sees_content_and_names_but_not_times_or_empty_folders(tmp_path: Path) -> None:
    def digest(*names: str) -> str:
        shutil.rmtree(tmp_path / "t", ignore_errors=True)
        tree = fill(tmp_path / "t", *names)
        (tree / "empty").mkdir()
        return tree_digest(walk(tree, tree, "pvc://x/y"))

    first = digest("1/model.onnx", "1/w")
    assert digest("1/w", "1/model.onnx") == first
    assert digest("1/model.onnx") != first
    (tmp_path / "t/1/model.onnx").write_bytes(b"other")
    assert tree_digest(walk(tmp_path / "t", tmp_path / "t", "")) != digest("1/model.onnx")


def test_row_79_a_mounted_model_is_served_only_with_its_digest(tmp_path: Path) -> None:
    mount = fill(tmp_path / "mount", "filetype/1/model.onnx", "file.onnx")
    into = tmp_path / "models"
    tree = tree_digest(walk(mount / "filetype", mount, ""))
    fetch(
        into,
        planned(mount, digest=tree),
        planned(mount, "/file.onnx", name="b", digest=file_digest(mount / "file.onnx")),
    )
    assert seen_by_triton(into) == {
        "filetype/config.pbtxt", "filetype/1/model.onnx", "b/config.pbtxt", "b/1/model.onnx",
    }  # fmt: skip
    (mount / "filetype/1/model.onnx").write_bytes(b"tampered with")
    into = tmp_path / "again"
    with pytest.raises(DigestMismatchError, match=f"the folder pvc://models/filetype has digest .*, not {tree}"):
        fetch(into, planned(mount, digest=tree))
    assert not (into / "filetype").exists()


def test_a_second_run_changes_nothing_and_a_new_plan_replaces_the_model(tmp_path: Path) -> None:
    mount = fill(tmp_path / "mount", "filetype/1/model.onnx", "filetype2/2/model.onnx")
    into = tmp_path / "models"
    fetch(into, planned(mount))
    first = seen_by_triton(into)
    fetch(into, planned(mount))
    assert seen_by_triton(into) == first
    fetch(into, planned(mount, "/filetype2"))
    assert seen_by_triton(into) == {"filetype/config.pbtxt", "filetype/2/model.onnx"}


def test_the_digest_of_a_file_is_what_sha256sum_prints(tmp_path: Path) -> None:
    content = os.urandom((3 << 20) + 17)
    (tmp_path / "f").write_bytes(content)
    assert file_digest(tmp_path / "f") == f"sha256:{hashlib.sha256(content).hexdigest()}"


class Folder:
    """A source of two files, such as a prefix of a bucket."""

    def __init__(self) -> None:
        self.fetched = 0

    def fetch(self, model: PlannedModel, content: Path, downloads: Path) -> None:
        assert (model.uri, content.parent) == ("s3://models/filetype/", downloads)
        self.fetched += 1
        fill(content, "1/model.onnx", "1/weights.bin")


def downloaded(**changes: Any) -> PlannedModel:
    fields: dict[str, Any] = {
        "name": "filetype",
        "uri": "s3://models/filetype/",
        "file_name": "model.onnx",
        "config": 'name: "filetype"\n',
    }
    return PlannedModel(**(fields | changes))


def test_a_restarted_pod_gets_its_models_again(tmp_path: Path) -> None:
    mount, into = fill(tmp_path / "mount", "filetype/1/model.onnx"), tmp_path / "models"
    models = (planned(mount, name="mounted"), downloaded(), downloaded(name="again"))
    for _ in range(2):
        fetch(into, *models, fetcher=Folder())
        assert seen_by_triton(into) == {
            "mounted/config.pbtxt", "mounted/1/model.onnx",
            "filetype/config.pbtxt", "filetype/1/model.onnx", "filetype/1/weights.bin",
            "again/config.pbtxt", "again/1/model.onnx", "again/1/weights.bin",
        }  # fmt: skip


def test_content_of_which_a_killed_run_had_removed_a_part_is_fetched_again(tmp_path: Path) -> None:
    into, source = tmp_path / "models", Folder()
    with pytest.raises(WrongLayoutError):
        fetch(into, downloaded(), downloaded(name="b", file_name="absent.onnx"), fetcher=source)
    assert source.fetched == 1, "the two share one source"
    fetch(into, downloaded(), fetcher=source)
    assert source.fetched == 1, "what an earlier run left is used"
    with pytest.raises(WrongLayoutError):
        fetch(into, downloaded(), downloaded(name="b", file_name="absent.onnx"), fetcher=source)
    (content,) = (into / ".conch-staging/download").glob("*.content")
    (content / "1/weights.bin").unlink()
    fetch(into, downloaded(), fetcher=source)
    assert source.fetched == 3
    assert "filetype/1/weights.bin" in seen_by_triton(into)


@pytest.mark.parametrize("place", ["filetype/1/libtriton_onnxruntime.so", "filetype/libtriton_own.so"])
def test_a_library_that_triton_would_load_from_a_models_folder_is_refused_where_code_is(
    place: str, tmp_path: Path
) -> None:
    mount, into = fill(tmp_path / "mount", "filetype/1/model.onnx", place), tmp_path / "models"
    fetch(into, planned(mount), planned(mount, name="other"))
    with pytest.raises(WrongLayoutError) as refusal:
        fetch(into, planned(mount, field="spec.models[0]"), allow_code=False)
    assert str(refusal.value) == (
        f'model "filetype": Triton would load {place.removeprefix("filetype/")} (pvc://models/filetype) in place of '
        "its own backend, which the operator's setting CONCH_ALLOW_PYTHON_MODELS=false forbids "
        "(spec.models[0].source); remove it from the source, or ask whoever runs Conch"
    )


def test_a_single_file_can_not_be_such_a_library_either(tmp_path: Path) -> None:
    mount = fill(tmp_path / "mount", "m.onnx")
    model = planned(mount, "/m.onnx", file_name="libtriton_onnxruntime.so")
    with pytest.raises(WrongLayoutError, match=r"would load 1/libtriton_onnxruntime\.so"):
        fetch(tmp_path / "models", model, allow_code=False)


class SmallDisk(Folder):
    """A source on a disk that has no room for the model twice."""

    def __init__(self, into: Path) -> None:
        super().__init__()
        self._into = into
        self.in_the_way = False

    def fetch(self, model: PlannedModel, content: Path, downloads: Path) -> None:
        if self.in_the_way or (self._into / model.name).exists():
            raise DiskFullError("the model volume is full", "free space")
        super().fetch(model, content, downloads)


def test_after_a_nodes_restart_the_earlier_copy_makes_way_where_the_disk_holds_only_one(tmp_path: Path) -> None:
    into = tmp_path / "models"
    source = SmallDisk(into)
    for count in (1, 2):
        fetch(into, downloaded(), fetcher=source)
        assert source.fetched == count
        assert seen_by_triton(into) == {
            "filetype/config.pbtxt", "filetype/1/model.onnx", "filetype/1/weights.bin",
        }  # fmt: skip


def test_a_disk_that_is_too_small_anyway_is_named(tmp_path: Path) -> None:
    into = tmp_path / "models"
    source = SmallDisk(into)
    (into / "filetype").mkdir(parents=True)
    source.in_the_way = True
    with pytest.raises(DiskFullError, match='model "filetype": the model volume is full; free space'):
        fetch(into, downloaded(), fetcher=source)
