"""The cache of models: what it gives back, what it refuses, and several real processes at once."""

import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conch.storage.cache import CachePatience, ModelCache, open_cache
from conch.storage.digest import file_digest, tree_digest
from conch.storage.layout import walk
from conch.storage.plan import PlannedCache

OPERATOR = Path(__file__).parents[2] / "operator"
QUICK = CachePatience(sign_of_life_s=1.0, total_s=600, space_s=2, heartbeat_s=0.05, poll_s=0.02)
MEBIBYTE = 1 << 20


class Notes:
    """What the cache said, as (level, sentence, fields)."""

    def __init__(self) -> None:
        self.logger = structlog.testing.CapturingLogger()

    @property
    def said(self) -> list[str]:
        return [str(call.args[0]) for call in self.logger.calls]

    @property
    def warnings(self) -> list[str]:
        return [str(call.args[0]) for call in self.logger.calls if call.method_name == "warning"]

    def fields(self, sentence: str) -> dict[str, Any]:
        return next(call.kwargs for call in self.logger.calls if call.args[0] == sentence)


def make_cache(
    root: Path, size_max_bytes: int = 100 * MEBIBYTE, notes: Notes | None = None, *, node_reserve: float = 0.0
) -> ModelCache:
    """Without a reserve, however full the disk is on which the tests run."""
    root.mkdir(exist_ok=True)
    log = (notes or Notes()).logger
    return ModelCache(root, size_max_bytes, clock=time, log=log, patience=QUICK, node_reserve=node_reserve)


def model_file(folder: Path, name: str, content: bytes) -> tuple[str, Path]:
    path = folder / name
    path.write_bytes(content)
    return file_digest(path), path


def model_tree(folder: Path, **files: bytes) -> tuple[str, Path]:
    for name, content in {"1/model.onnx": b"tree", "labels.txt": b"cat", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return tree_digest(walk(folder.resolve(), folder.resolve(), "")), folder


def entries(root: Path) -> set[str]:
    return {path.name for path in (root / "v1/entries").iterdir()}


def leftovers(root: Path) -> list[Path]:
    return list((root / "v1/building").iterdir())


def writes(place: Path, content: bytes) -> Callable[[], None]:
    """A download."""

    def download() -> None:
        place.write_bytes(content)

    return download


def test_a_second_pod_gets_the_file_without_a_download(tmp_path: Path) -> None:
    digest, source = model_file(tmp_path, "m.onnx", os.urandom(300_000))
    downloads: list[Path] = []

    def download_to(place: Path) -> Callable[[], None]:
        def download() -> None:
            downloads.append(place)
            writes(place, source.read_bytes())()

        return download

    first, second = tmp_path / "pod1.partial", tmp_path / "pod2.partial"
    assert make_cache(tmp_path / "cache").obtain(digest, first, download_to(first)) is False
    assert make_cache(tmp_path / "cache").obtain(digest, second, download_to(second)) is True
    assert downloads == [first]
    assert second.read_bytes() == source.read_bytes()
    assert leftovers(tmp_path / "cache") == []
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "m.onnx", "pod1.partial", "pod2.partial"}


def test_a_tree_comes_back_with_its_digest_and_programs_stay_programs(tmp_path: Path) -> None:
    digest, tree = model_tree(tmp_path / "tree", **{"env/bin/run": b"#!", "ü/deep/er": b"x"})
    (tree / "env/bin/run").chmod(0o700)
    (tree / "latest").symlink_to("1/model.onnx")
    (tree / "2").mkdir()
    digest = tree_digest(walk(tree.resolve(), tree.resolve(), ""))
    cache = make_cache(tmp_path / "cache")
    assert cache.keep(digest, tree)
    (tmp_path / "pod").mkdir()
    (tmp_path / "pod/half").write_text("of an interrupted download")
    assert cache.take(digest, tmp_path / "pod")
    assert tree_digest(walk(tmp_path / "pod", tmp_path / "pod", "")) == digest
    assert (tmp_path / "pod/latest").read_bytes() == b"tree"
    assert list((tmp_path / "pod/2").iterdir()) == []
    assert stat.S_IMODE((tmp_path / "pod/env/bin/run").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "pod/labels.txt").stat().st_mode) == 0o644


def test_what_was_made_from_a_digest_is_kept_apart_from_what_has_it(tmp_path: Path) -> None:
    digest, archive = model_file(tmp_path, "m.tar", b"an archive")
    _, unpacked = model_tree(tmp_path / "unpacked")
    cache = make_cache(tmp_path / "cache")
    assert cache.keep(digest, archive)
    assert cache.keep(digest, unpacked, exact=False)
    assert cache.take(digest, tmp_path / "a")
    assert cache.take(digest, tmp_path / "b", exact=False)
    assert (tmp_path / "a").read_bytes() == b"an archive"
    assert (tmp_path / "b/labels.txt").read_bytes() == b"cat"


def test_content_with_another_digest_is_never_kept(tmp_path: Path) -> None:
    notes = Notes()
    digest, _ = model_file(tmp_path, "m.onnx", b"right")
    _, wrong = model_file(tmp_path, "other", b"wrong")
    assert not make_cache(tmp_path / "cache", notes=notes).keep(digest, wrong)
    assert notes.warnings == ["not kept in the model cache"]
    assert entries(tmp_path / "cache") == set()


def _same_size_and_time(content: Path) -> None:
    status = content.stat()
    content.write_bytes(b"X" * status.st_size)
    os.utime(content, ns=(status.st_atime_ns, status.st_mtime_ns))


def _other_marker(content: Path) -> None:
    marker = content.parent / "entry.json"
    fields = json.loads(marker.read_text())
    marker.write_text(json.dumps(fields | {"key": "sha256:" + "0" * 64}))


def _instead(content: Path, make: Callable[[Path], None]) -> None:
    content.unlink()
    make(content)


DAMAGE: list[Callable[[Path], Any]] = [
    _same_size_and_time,
    _other_marker,
    lambda content: content.write_bytes(b"short"),
    lambda content: content.unlink(),
    lambda content: (content.parent / "entry.json").write_text("{"),
    lambda content: (content.parent / "entry.json").write_text("[" * 100_000),
    lambda content: (content.parent / "entry.json").write_text('{"key": 1, "files": []}'),
    lambda content: _instead(content, Path.mkdir),
    lambda content: _instead(content, lambda place: place.symlink_to("/etc/passwd")),
    lambda content: _instead(content, os.mkfifo),
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_dropped_and_the_model_downloaded_anew(
    damage: Callable[[Path], Any], tmp_path: Path
) -> None:
    notes = Notes()
    digest, source = model_file(tmp_path, "m.onnx", os.urandom(100_000))
    cache = make_cache(tmp_path / "cache", notes=notes)
    cache.keep(digest, source)
    damage(tmp_path / "cache/v1/entries" / digest.removeprefix("sha256:") / "content")
    place = tmp_path / "pod"
    assert cache.obtain(digest, place, writes(place, source.read_bytes())) is False
    assert place.read_bytes() == source.read_bytes()
    assert len(notes.warnings) >= 1
    place.unlink()
    assert cache.take(digest, place)
    assert place.read_bytes() == source.read_bytes()


def test_a_file_that_was_added_to_a_tree_makes_it_damaged(tmp_path: Path) -> None:
    digest, tree = model_tree(tmp_path / "tree")
    cache = make_cache(tmp_path / "cache")
    cache.keep(digest, tree)
    (tmp_path / "cache/v1/entries" / digest.removeprefix("sha256:") / "content/1/model.py").write_text("evil")
    assert not cache.take(digest, tmp_path / "pod")
    assert not (tmp_path / "pod").exists()
    assert entries(tmp_path / "cache") == set()


def test_the_longest_unused_model_goes_first(tmp_path: Path) -> None:
    notes = Notes()
    models = [model_file(tmp_path, f"m{number}", bytes([number]) * MEBIBYTE) for number in range(4)]
    cache = make_cache(tmp_path / "cache", 3 * MEBIBYTE, notes)
    for digest, source in models[:3]:
        assert cache.keep(digest, source)
        time.sleep(0.01)
    assert cache.take(models[0][0], tmp_path / "pod")
    assert cache.keep(*models[3])
    names = [digest.removeprefix("sha256:") for digest, _ in models]
    assert entries(tmp_path / "cache") == {names[0], names[2], names[3]}
    assert notes.fields("dropped from the model cache")["entry"] == names[1]
    assert leftovers(tmp_path / "cache") == []


def test_a_model_larger_than_the_cache_drops_nothing_and_is_not_kept(tmp_path: Path) -> None:
    notes = Notes()
    cache = make_cache(tmp_path / "cache", MEBIBYTE, notes)
    small = model_file(tmp_path, "small", b"small")
    large = model_file(tmp_path, "large", bytes(2 * MEBIBYTE))
    cache.keep(*small)
    place = tmp_path / "pod"
    assert cache.obtain(large[0], place, writes(place, bytes(2 * MEBIBYTE))) is False
    assert notes.fields("not kept in the model cache: no room")["limit_bytes"] == MEBIBYTE
    assert cache.trouble.startswith("not kept in the model cache: no room (its size would be exceeded): raise runtime")
    assert cache.take(small[0], tmp_path / "again")


def test_a_part_of_the_nodes_own_disk_stays_free_for_the_kubelet(tmp_path: Path) -> None:
    notes = Notes()
    digest, source = model_file(tmp_path, "m.onnx", b"content")
    assert not make_cache(tmp_path / "cache", notes=notes, node_reserve=1.0).keep(digest, source)
    assert notes.warnings == ["not kept in the model cache: no room"]


def test_nothing_is_dropped_where_that_would_not_make_room_enough(tmp_path: Path) -> None:
    small, large = model_file(tmp_path, "small", b"small"), model_file(tmp_path, "large", b"large")
    assert make_cache(tmp_path / "cache").keep(*small)
    assert not make_cache(tmp_path / "cache", node_reserve=1.0).keep(*large)
    assert make_cache(tmp_path / "cache").take(small[0], tmp_path / "pod")


@contextmanager
def child(program: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that uses the cache; ended at the latest with the test."""
    start = (
        "import sys, time, pathlib, structlog\n"
        "from conch.storage.cache import CachePatience, ModelCache\n"
        "patience = CachePatience(sign_of_life_s=1.0, total_s=600, space_s=2, heartbeat_s=0.05, poll_s=0.02)\n"
        "log = structlog.wrap_logger(structlog.PrintLogger(sys.stderr))\n"
        "root, size = pathlib.Path(sys.argv[1]), int(sys.argv[2])\n"
        "cache = ModelCache(root, size, clock=time, log=log, patience=patience, node_reserve=0.0)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", start + program, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(OPERATOR)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


OBTAIN = """
digest, source, place, journal = sys.argv[3], *map(pathlib.Path, sys.argv[4:7])
def download():
    with journal.open("a") as file:
        file.write("d")
    time.sleep(1.4)
    place.write_bytes(source.read_bytes())
print(cache.obtain(digest, place, download))
"""


def test_of_pods_that_start_at_once_one_downloads_and_the_others_take_its_copy(tmp_path: Path) -> None:
    digest, source = model_file(tmp_path, "m.onnx", os.urandom(MEBIBYTE))
    (tmp_path / "cache").mkdir()
    arguments = (tmp_path / "cache", 10 * MEBIBYTE, digest, source)
    with (
        child(OBTAIN, *arguments, tmp_path / "pod1", tmp_path / "journal") as first,
        child(OBTAIN, *arguments, tmp_path / "pod2", tmp_path / "journal") as second,
        child(OBTAIN, *arguments, tmp_path / "pod3", tmp_path / "journal") as third,
    ):
        said = sorted(process.communicate(timeout=20)[0].strip() for process in (first, second, third))
    assert said == ["False", "True", "True"]
    assert (tmp_path / "journal").read_text() == "d"
    for pod in ("pod1", "pod2", "pod3"):
        assert file_digest(tmp_path / pod) == digest


def test_a_downloader_that_is_killed_hands_over_at_once(tmp_path: Path) -> None:
    digest, source = model_file(tmp_path, "m.onnx", b"content")
    (tmp_path / "cache").mkdir()
    arguments = (tmp_path / "cache", 10 * MEBIBYTE, digest, source)
    with child(OBTAIN.replace("1.4", "60"), *arguments, tmp_path / "pod1", tmp_path / "journal") as first:
        wait_until((tmp_path / "journal").exists)
        with child(OBTAIN, *arguments, tmp_path / "pod2", tmp_path / "journal") as second:
            assert second.stderr is not None
            assert "another pod downloads this model" in second.stderr.readline()
            first.kill()
            assert second.communicate(timeout=20)[0].strip() == "False"
    assert (tmp_path / "journal").read_text() == "dd"
    assert (tmp_path / "pod2").read_bytes() == b"content"


def test_a_downloader_that_shows_no_sign_of_life_is_not_waited_for(tmp_path: Path) -> None:
    digest, source = model_file(tmp_path, "m.onnx", b"content")
    (tmp_path / "cache").mkdir()
    arguments = (tmp_path / "cache", 10 * MEBIBYTE, digest, source)
    with child(OBTAIN.replace("1.4", "60"), *arguments, tmp_path / "pod1", tmp_path / "journal") as first:
        wait_until((tmp_path / "journal").exists)
        first.send_signal(signal.SIGSTOP)
        notes, place = Notes(), tmp_path / "pod2"
        cache = make_cache(tmp_path / "cache", notes=notes)
        assert cache.obtain(digest, place, writes(place, b"content")) is False
    assert notes.warnings == ["the other pod shows no sign of life; going on without it"]
    assert cache.take(digest, tmp_path / "pod3")


def test_what_a_killed_writer_left_is_never_seen_and_soon_collected(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(8 << 30)  # a hole: it takes no room, but seconds to copy
    keep = "cache.keep(sys.argv[3], pathlib.Path(sys.argv[4]))"
    digest = "sha256:" + "0" * 64
    with child(keep, root, 16 << 30, digest, tmp_path / "huge") as writer:
        wait_until(lambda: any(path.stat().st_size > MEBIBYTE for path in root.glob("v1/building/*/content")))
        small = model_file(tmp_path, "small", b"small")
        notes = Notes()
        cache = make_cache(root, 8 << 30, notes)
        assert not cache.keep(*small), "the living writer's room is reserved"
        assert notes.warnings == ["not kept in the model cache: no room"]
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert not cache.take(digest, tmp_path / "pod")
    assert len(leftovers(root)) == 1
    assert cache.keep(*small)
    assert leftovers(root) == []
    assert entries(root) == {small[0].removeprefix("sha256:")}


def test_a_model_that_is_being_copied_is_not_dropped(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    content = tmp_path / "big"
    with content.open("wb") as file:
        file.truncate(256 * MEBIBYTE)
    digest = file_digest(content)
    cache = make_cache(root, 300 * MEBIBYTE)
    assert cache.keep(digest, content)
    take = "print(cache.take(sys.argv[3], pathlib.Path(sys.argv[4])))"
    other = model_file(tmp_path, "other", bytes(64 * MEBIBYTE))
    (tmp_path / "pod").mkdir()
    with child(take, root, 300 * MEBIBYTE, digest, tmp_path / "pod/model") as taker:
        wait_until(lambda: any(path.stat().st_size for path in (tmp_path / "pod").iterdir()))
        taker.send_signal(signal.SIGSTOP)
        assert not cache.keep(*other)
        taker.send_signal(signal.SIGCONT)
        assert taker.communicate(timeout=20)[0].strip() == "True"
    assert cache.keep(*other)
    assert entries(root) == {other[0].removeprefix("sha256:")}


def in_tmpfs(options: str, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run with the folder of the first argument on a small or read-only file system."""
    start = "import sys, time, pathlib, structlog\nfrom conch.storage.cache import ModelCache\n"
    start += "log = structlog.wrap_logger(structlog.PrintLogger(sys.stdout))\n"
    start += "root = pathlib.Path(sys.argv[1]); cache = ModelCache(root, 1 << 30, clock=time, log=log)\n"
    mount = f'mount -t tmpfs -o {options} none "{arguments[0]}" && exec "$@"'
    return subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh",
         sys.executable, "-c", start + program, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(OPERATOR)}, capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip


PLAIN_DOWNLOAD = """
place = pathlib.Path(sys.argv[2])
print(cache.obtain(sys.argv[3], place, lambda: place.write_bytes(b"x" * 300_000)))
print(sorted(path.name for path in root.rglob("*") if path.is_file()))
"""


@pytest.mark.parametrize(
    ("options", "warning"),
    [("ro", "the model cache can't be written"), ("size=64k", "not kept in the model cache")],
)
def test_a_cache_that_is_read_only_or_full_stops_no_start(options: str, warning: str, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    digest = f"sha256:{hashlib.sha256(b'x' * 300_000).hexdigest()}"
    done = in_tmpfs(options, PLAIN_DOWNLOAD, tmp_path / "cache", tmp_path / "pod", digest)
    assert warning in done.stdout
    assert "fix=" in done.stdout
    assert "False" in done.stdout
    assert (tmp_path / "pod").stat().st_size == 300_000
    assert "entry.json" not in done.stdout


def test_models_are_taken_out_of_a_cache_that_may_only_be_read(tmp_path: Path) -> None:
    digest, source = model_file(tmp_path, "m.onnx", b"content")
    root = tmp_path / "cache"
    make_cache(root).keep(digest, source)
    script = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'
    program = (
        "import sys, time, pathlib, structlog\nfrom conch.storage.cache import ModelCache\n"
        "log = structlog.wrap_logger(structlog.PrintLogger(sys.stdout))\n"
        "cache = ModelCache(pathlib.Path(sys.argv[1]), 1 << 30, clock=time, log=log)\n"
        "print(cache.obtain(sys.argv[2], pathlib.Path(sys.argv[3]), lambda: sys.exit('downloads')))\n"
    )
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", root,
         sys.executable, "-c", program, root, digest, tmp_path / "pod"],
        env=os.environ | {"PYTHONPATH": str(OPERATOR)}, capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    assert done.stdout.rstrip().endswith("True")
    assert (tmp_path / "pod").read_bytes() == b"content"


def test_a_failed_download_is_the_callers_failure_and_lets_the_next_one_try(tmp_path: Path) -> None:
    def fail() -> None:
        raise ConnectionError("the store is gone")

    digest, source = model_file(tmp_path, "m.onnx", b"content")
    cache, place = make_cache(tmp_path / "cache"), tmp_path / "pod"
    with pytest.raises(ConnectionError):
        cache.obtain(digest, place, fail)
    assert cache.obtain(digest, place, writes(place, source.read_bytes())) is False


def test_each_namespace_has_a_part_of_its_own(tmp_path: Path) -> None:
    planned = PlannedCache(path=str(tmp_path), size_bytes=MEBIBYTE)
    digest, source = model_file(tmp_path, "m.onnx", b"content")

    def opened(tenant: str | None) -> ModelCache:
        environment = {} if tenant is None else {"CONCH_CACHE_TENANT": tenant}
        cache = open_cache(planned, environment, clock=time, log=Notes().logger)
        assert cache is not None
        return cache

    opened("team-a")
    assert make_cache(tmp_path / "team-a").keep(digest, source)
    assert not opened("team-b").take(digest, tmp_path / "pod")
    assert opened("team-a").take(digest, tmp_path / "pod")
    opened("../../etc")
    assert {path.name for path in tmp_path.iterdir()} == {"m.onnx", "pod", "team-a", "team-b", "v1"}
    assert open_cache(None, {}, clock=time, log=Notes().logger) is None


ACTIONS = st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=25)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(actions=ACTIONS, limit=st.integers(0, 9_000))
def test_the_size_limit_holds_and_what_comes_back_is_what_went_in(actions: list[tuple[bool, int]], limit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        models = [model_file(base, f"m{number}", bytes([number]) * (number * 1000)) for number in range(6)]
        cache = make_cache(base / "cache", limit)
        for keep, number in actions:
            digest, source = models[number]
            if keep:
                assert cache.keep(digest, source) == (number * 1000 <= limit)
            elif cache.take(digest, base / "pod"):
                assert (base / "pod").read_bytes() == source.read_bytes()
            kept = sum(path.stat().st_size for path in (base / "cache").glob("v1/entries/*/content"))
            assert kept <= limit
            assert leftovers(base / "cache") == []


CLONE = """
import json, os, pathlib, sys, time, structlog
from conch.storage.cache import ModelCache
from conch.storage.digest import file_digest
log = structlog.wrap_logger(structlog.PrintLogger(sys.stdout))
base, verification = pathlib.Path(sys.argv[1]), sys.argv[2]
source, place = base / "pod/download", base / "pod/model"
source.write_bytes(os.urandom(4 << 20))
digest = file_digest(source)
cache = ModelCache(base / "cache", 1 << 30, clock=time, log=log, verification=verification)
assert cache.keep(digest, source) and cache.take(digest, place)
assert file_digest(place) == digest
content = next((base / "cache").glob("v1/entries/*/content"))
status = content.stat()
content.write_bytes(os.urandom(4 << 20))
if sys.argv[3] != "time":
    os.utime(content, ns=(status.st_atime_ns, status.st_mtime_ns))
if sys.argv[3] == "boot":
    marker = content.parent / "entry.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"boot": "another"}))
print("changed and taken:", cache.take(digest, place), file_digest(place) == digest)
"""


@pytest.mark.skipif(shutil.which("mkfs.btrfs") is None or os.geteuid() != 0, reason="needs btrfs-progs and root")
@pytest.mark.parametrize(
    ("verification", "case", "said"),
    [
        ("Full", "content", "False True"),
        ("Marker", "time", "False True"),
        ("Marker", "boot", "False True"),
        # What the module's text says of clones: sizes and times are all that is compared.
        ("Marker", "content", "True False"),
    ],
)
def test_where_the_file_system_clones_the_copy_is_a_clone_also_across_mounts(
    verification: str, case: str, said: str, tmp_path: Path
) -> None:
    disk, script = tmp_path / "disk", tmp_path / "script"
    with disk.open("wb") as file:
        file.truncate(160 * MEBIBYTE)
    subprocess.run(["mkfs.btrfs", "-q", disk], check=True, capture_output=True, timeout=30)
    script.write_text(
        f"set -e; cd {tmp_path}; mkdir all base base/cache base/pod; mount -o loop disk all; mkdir all/cache all/pod\n"
        'for part in cache pod; do mount --bind all/$part base/$part; done; exec "$@"\n'
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", script, sys.executable, "-c", CLONE, tmp_path / "base", verification, case],
        env=os.environ | {"PYTHONPATH": str(OPERATOR)}, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert "how=cloned" in done.stdout
    assert f"changed and taken: {said}" in done.stdout
