"""Archives of strangers: what is unpacked, what is refused, and that nothing is ever written outside."""

import bz2
import gzip
import io
import lzma
import os
import stat
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conch.storage.archive import ArchiveBrokenError, ArchiveRefusedError, Limits, is_archive_name, unpack
from conch.storage.errors import FetchError, WrongLayoutError

LIMITS = Limits()
PLAIN: dict[str, bytes] = {"1/model.onnx": b"onnx" * 1000, "labels.txt": b"cat\ndog\n", "1/empty": b""}
WRITERS: dict[str, Callable[[bytes], bytes]] = {
    "tar": bytes,
    "tar.gz": gzip.compress,
    "tar.bz2": bz2.compress,
    "tar.xz": lzma.compress,
}


def info(name: str, kind: bytes = tarfile.REGTYPE, **fields: Any) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = kind
    for field, value in fields.items():
        setattr(member, field, value)
    return member


def tar_of(*members: tuple[tarfile.TarInfo, bytes], tar_format: int = tarfile.PAX_FORMAT) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tar_format) as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return raw.getvalue()


def tar_files(files: dict[str, bytes]) -> bytes:
    return tar_of(*((info(name, mode=0o600), content) for name, content in files.items()))


def zip_of(*members: tuple[str, bytes, int], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """Name, content and Unix mode of each; mode 0: none, as from other systems."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", method) as archive:
        for name, content, mode in members:
            member = zipfile.ZipInfo(name)
            member.filename = name  # also what ZipInfo would tidy up
            member.compress_type = method
            member.external_attr = mode << 16
            archive.writestr(member, content)
    return raw.getvalue()


def saved(folder: Path, content: bytes, name: str = "model.tar") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name


def found(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def outcome(archive: Path, into: Path) -> FetchError | None:
    try:
        unpack(archive, into, limits=LIMITS)
    except WrongLayoutError as error:
        return error
    return None


def refusal(tmp_path: Path, content: bytes, limits: Limits = LIMITS, name: str = "model.tar") -> FetchError:
    """The error, having checked that it leaves nothing behind and names the archive and a fix."""
    into = tmp_path / "into"
    with pytest.raises(WrongLayoutError) as failure:
        unpack(saved(tmp_path, content, name), into, limits=limits)
    assert not into.exists()
    assert {path.name for path in tmp_path.iterdir()} == {name}
    assert name in failure.value.cause
    assert failure.value.fix
    assert failure.value.exit_code == 5
    assert str(failure.value).isprintable()
    return failure.value


@pytest.mark.parametrize("kind", [*WRITERS, "zip"])
def test_each_kind_of_archive_is_unpacked(kind: str, tmp_path: Path) -> None:
    if kind == "zip":
        content = zip_of(*((name, content, 0) for name, content in PLAIN.items()))
    else:
        content = WRITERS[kind](tar_files(PLAIN))
    unpack(saved(tmp_path, content, "odd name"), tmp_path / "into", limits=LIMITS)
    assert found(tmp_path / "into") == PLAIN


def test_what_gnu_tar_and_its_long_names_make_is_unpacked(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    long = "/".join(["a" * 90] * 4)
    for name, content in {**PLAIN, f"{long}/w": b"deep", "3/ünï": b"utf-8"}.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(content)
    (tree / "3/same").hardlink_to(tree / "1/model.onnx")
    (tree / "latest").symlink_to("1/model.onnx")
    (tree / "folder").symlink_to("3")
    for tar_format in ("gnu", "pax", "ustar"):
        archive = tmp_path / f"{tar_format}.tar.gz"
        subprocess.run(["tar", f"--format={tar_format}", "-czf", archive, "-C", tree, "."],
                       check=tar_format != "ustar", capture_output=True, timeout=20)  # fmt: skip
        into = tmp_path / tar_format
        unpack(archive, into, limits=LIMITS)
        if tar_format == "ustar":  # it can't hold the long name
            assert (into / "latest").read_bytes() == PLAIN["1/model.onnx"]
            continue
        assert found(into) == found(tree)
        assert (into / "latest").readlink() == Path("1/model.onnx")
        assert (into / "3/same").stat().st_ino == (into / "1/model.onnx").stat().st_ino


def test_modes_are_made_plain_and_owners_and_times_dropped(tmp_path: Path) -> None:
    content = tar_of(
        (info("dir", tarfile.DIRTYPE, mode=0o1777), b""),
        (info("suid", mode=0o6755, uid=12345, mtime=1), b"x"),
        (info("private", mode=0o000), b"x"),
    )
    unpack(saved(tmp_path, content), tmp_path / "into", limits=LIMITS)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "into").iterdir()}
    assert modes == {"dir": 0o755, "suid": 0o755, "private": 0o644}
    assert (tmp_path / "into/suid").stat().st_uid == os.getuid()
    assert (tmp_path / "into/suid").stat().st_mtime > 1
    archive = zip_of(("run", b"x", 0o104755), ("plain", b"x", 0o100644))
    unpack(saved(tmp_path, archive, "m.zip"), tmp_path / "zipped", limits=LIMITS)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "zipped").iterdir()}
    assert modes == {"run": 0o755, "plain": 0o644}


@pytest.mark.parametrize(
    ("members", "member", "words"),
    [
        ([(info("/etc/passwd"), b"x")], "/etc/passwd", "absolute path"),
        ([(info("a/../../b"), b"x")], "a/../../b", "'..'"),
        ([(info(".."), b"x")], "..", "'..'"),
        ([(info("a\nb"), b"x")], "a\\nb", "control character"),
        ([(info("a\x1b[2Jb"), b"x")], "a\\x1b[2Jb", "control character"),
        ([(info("..\\b"), b"x")], "..\\\\b", "backslash"),
        ([(info("a" * 300), b"x")], "a" * 50, "more than 255"),
        ([(info("/".join(["a" * 200] * 6)), b"x")], "a" * 50, "more than 1024 bytes"),
        ([(info("pipe", tarfile.FIFOTYPE), b"")], "pipe", "named pipe"),
        ([(info("null", tarfile.CHRTYPE), b"")], "null", "device"),
        ([(info("sda", tarfile.BLKTYPE), b"")], "sda", "device"),
        ([(info("odd", b"Z"), b"")], "odd", "unknown kind 'Z'"),
        ([(info("a"), b"x"), (info("a"), b"y")], "a", "twice"),
        ([(info("a"), b"x"), (info("./a"), b"y")], "./a", "twice"),
        ([(info("a"), b"x"), (info("a/b"), b"y")], "a/b", "a file or a link"),
        ([(info("a/b"), b"x"), (info("a"), b"y")], "a", "twice"),
        ([(info("out", tarfile.SYMTYPE, linkname="../secret"), b"")], "out", "leads out"),
        ([(info("out", tarfile.SYMTYPE, linkname="/etc/passwd"), b"")], "out", "link to '/etc/passwd'"),
        ([(info("gone", tarfile.SYMTYPE, linkname="nowhere"), b"")], "gone", "isn't there"),
        ([(info("self", tarfile.SYMTYPE, linkname="self"), b"")], "self", "isn't there"),
        ([(info("self", tarfile.SYMTYPE, linkname="self/.."), b"")], "self", "isn't there"),
        ([(info("way", tarfile.SYMTYPE, linkname="nowhere/.."), b"")], "way", "isn't there"),
        ([(info("d", tarfile.SYMTYPE, linkname="e"), b""), (info("d/x"), b"x")], "d/x", "through a link"),
        ([(info("d", tarfile.SYMTYPE, linkname="."), b""), (info("d/d/x"), b"x")], "d/d/x", "through a link"),
        ([(info("a", tarfile.SYMTYPE, linkname="b"), b""), (info("a", tarfile.SYMTYPE, linkname="c"), b"")], "a",
         "twice"),
        ([(info("b"), b"x"), (info("b", tarfile.SYMTYPE, linkname="c"), b"")], "b", "twice"),
        ([(info("b", tarfile.SYMTYPE, linkname="c"), b""), (info("b"), b"x")], "b", "twice"),
        ([(info("d", tarfile.SYMTYPE, linkname="c"), b""), (info("d", tarfile.DIRTYPE), b"")], "d", "twice"),
        ([(info("h", tarfile.LNKTYPE, linkname="/etc/passwd"), b"")], "h", "absolute path"),
        ([(info("h", tarfile.LNKTYPE, linkname="../secret"), b"")], "h", "'..'"),
        ([(info("h", tarfile.LNKTYPE, linkname="nowhere"), b"")], "h", "no earlier file"),
        ([(info("s", tarfile.SYMTYPE, linkname="../secret"), b""), (info("h", tarfile.LNKTYPE, linkname="s"), b"")],
         "h", "no earlier file"),
        ([(info("f"), b"x"), (info("h", tarfile.LNKTYPE, linkname="f/x"), b"")], "h", "no earlier file"),
        ([(info("x"), b"1"), (info("y"), b"2"), (info("y", tarfile.LNKTYPE, linkname="x"), b"")], "y", "twice"),
        ([(info("a/l", tarfile.SYMTYPE, linkname="../.."), b"")], "a/l", "leads out"),
        ([(info("a/l1", tarfile.SYMTYPE, linkname=".."), b""), (info("l2", tarfile.SYMTYPE, linkname="a/l1/.."), b"")],
         "l2", "leads out"),
    ],
)  # fmt: skip
def test_a_hostile_member_is_named_and_nothing_is_left(
    members: list[tuple[tarfile.TarInfo, bytes]], member: str, words: str, tmp_path: Path
) -> None:
    error = refusal(tmp_path, tar_of(*members))
    assert isinstance(error, ArchiveRefusedError)
    assert member in error.cause
    assert words in error.cause


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([("../out", b"x", 0)], "'..'"),
        ([("/abs", b"x", 0)], "absolute path"),
        ([("a\\b", b"x", 0)], "backslash"),
        ([("link", b"../secret", 0o120777)], "leads out"),
        ([("link", b"/etc/passwd", 0o120777)], "link to '/etc/passwd'"),
        ([("link", b"x" * 5000, 0o120777)], "is a link to"),
        ([("link", b"a\0b", 0o120777)], "is a link to"),
        ([("link", b"\xff", 0o120777)], "is a link to"),
        ([("pipe", b"", 0o010644)], "neither a file"),
        ([("null", b"", 0o020644)], "neither a file"),
        ([("a", b"x", 0), ("a/b", b"x", 0)], "a file or a link"),
    ],
)
def test_a_hostile_zip_member_is_refused(members: list[tuple[str, bytes, int]], words: str, tmp_path: Path) -> None:
    assert words in refusal(tmp_path, zip_of(*members), name="m.zip").cause


def test_a_zip_with_a_name_twice_is_refused(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate name"):
        content = zip_of(("a", b"x", 0), ("a", b"y", 0))
    assert "twice" in refusal(tmp_path, content, name="m.zip").cause


def test_zip_methods_that_unpack_in_memory_and_encryption_are_refused(tmp_path: Path) -> None:
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        error = refusal(tmp_path / str(method), zip_of(("a", b"x", 0), method=method), name="m.zip")
        assert "isn't stored or deflated" in error.cause
    content = bytearray(zip_of(("a", b"x", 0)))
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(signature) + offset] |= 1
    assert "is encrypted" in refusal(tmp_path / "encrypted", bytes(content), name="m.zip").cause


def test_limits_hold_for_what_is_written_and_not_for_what_headers_say(tmp_path: Path) -> None:
    files = tar_files({str(number): b"x" for number in range(20)})
    assert "more than 19 files" in refusal(tmp_path / "1", files, Limits(files_max=19)).cause
    unpack(saved(tmp_path / "2", files), tmp_path / "2/into", limits=Limits(files_max=20))
    content = tar_files({"a": bytes(600), "b": bytes(600)})
    assert "more than 1000 bytes" in refusal(tmp_path / "3", content, Limits(size_max_bytes=1000)).cause
    lying = bytearray(zip_of(("a", bytes(5000), 0)))
    for signature, offset in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        place = lying.index(signature) + offset
        lying[place : place + 4] = struct.pack("<I", 10)
    refusal(tmp_path / "4", bytes(lying), Limits(size_max_bytes=1000), name="m.zip")


@pytest.mark.parametrize("kind", ["tar.gz", "tar.bz2", "tar.xz", "zip"])
def test_a_decompression_bomb_is_met_after_the_allowed_bytes(kind: str, tmp_path: Path) -> None:
    zeros = bytes(4 << 20)
    content = zip_of(("z", zeros, 0)) if kind == "zip" else WRITERS[kind](tar_files({"z": zeros}))
    error = refusal(tmp_path, content, Limits(ratio_free_bytes=1 << 20, ratio_max=100))
    assert "over 100 times its size" in error.cause
    unpack(saved(tmp_path, content), tmp_path / "into", limits=Limits(ratio_free_bytes=8 << 20))
    assert found(tmp_path / "into") == {"z": zeros}


def test_a_bomb_of_headers_that_write_nothing_is_met_too(tmp_path: Path) -> None:
    skipped = tar_of(*((info("d", tarfile.DIRTYPE), b"") for _ in range(9000)))
    error = refusal(tmp_path, gzip.compress(skipped), Limits(ratio_free_bytes=1 << 20))
    assert "over 100 times its size" in error.cause


@pytest.mark.parametrize("tar_format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_a_name_of_megabytes_is_not_read_into_memory(tar_format: int, tmp_path: Path) -> None:
    error = refusal(tmp_path, tar_of((info("n" * (3 << 20)), b"x"), tar_format=tar_format))
    assert "a header that is too long" in error.cause


def test_headers_of_headers_without_end_are_refused(tmp_path: Path) -> None:
    one = tar_of((info("x" * 200), b""))[:1024]  # a pax header, without the member that it is of
    error = refusal(tmp_path, one * 3000 + bytes(1024))
    assert isinstance(error, WrongLayoutError)


def test_an_xz_stream_that_wants_gigabytes_of_dictionary_is_refused(tmp_path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 20}]
    content = bytearray(lzma.compress(tar_files(PLAIN), filters=filters))
    place = content.index(b"\x21\x01", 12) + 2  # the id of LZMA2 and the length of its properties: one byte
    content[place] = 40  # 4 GiB
    header = bytes(content[12 : 12 + (content[12] + 1) * 4 - 4])
    end = 12 + len(header)
    content[end : end + 4] = struct.pack("<I", zlib.crc32(header))
    error = refusal(tmp_path, bytes(content))
    assert "Memory usage limit" in error.cause


@pytest.mark.parametrize("kind", [*WRITERS, "zip"])
def test_an_archive_cut_anywhere_is_never_taken_for_a_whole_one(kind: str, tmp_path: Path) -> None:
    files = {"1/model.onnx": os.urandom(3000), "b": os.urandom(700), "c": b""}
    if kind == "zip":
        whole = zip_of(*((name, content, 0) for name, content in files.items()))
    else:
        whole = WRITERS[kind](tar_files(files))
    # The second block of zeros and the padding after it are no content.
    end = len(tar_files(files).rstrip(b"\0")) + 512 if kind == "tar" else len(whole)
    for number, length in enumerate(range(0, end, 97)):
        error = refusal(tmp_path / str(number), whole[:length])
        assert isinstance(error, ArchiveBrokenError), length


@pytest.mark.parametrize("kind", [*WRITERS, "zip"])
def test_a_damaged_archive_ends_in_a_clear_sentence_or_is_harmless(kind: str, tmp_path: Path) -> None:
    if kind == "zip":
        whole = zip_of(*((name, content, 0) for name, content in PLAIN.items()))
    else:
        whole = WRITERS[kind](tar_files(PLAIN))
    for place in range(0, len(whole), max(1, len(whole) // 60)):
        content = bytearray(whole)
        content[place] ^= 0x55
        folder = tmp_path / str(place)
        error = outcome(saved(folder, bytes(content)), folder / "into")
        assert error is None or "model.tar" in error.cause


def test_a_damaged_header_in_the_middle_is_no_end(tmp_path: Path) -> None:
    content = bytearray(tar_files({"a": b"1", "b": b"2", "c": b"3"}))
    content[1024 + 148] ^= 0x55  # the check sum of the second
    assert "a header in its middle is damaged" in str(refusal(tmp_path, bytes(content)))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "can't be read"),
        (b"<html>Not Found</html>" * 50, "can't be read"),
        (b"\x28\xb5\x2f\xfd" + bytes(600), "zstd"),
        (b"7z\xbc\xaf\x27\x1c" + bytes(600), "7z"),
        (b"PK\x03\x04" + bytes(600), "no table of contents"),
    ],
)
def test_what_is_no_archive_is_said(content: bytes, words: str, tmp_path: Path) -> None:
    assert words in refusal(tmp_path, content).cause


def test_a_zip_with_an_endless_table_of_contents_is_refused_before_it_is_read(tmp_path: Path) -> None:
    content = bytearray(zip_of(("a", b"x", 0)))
    place = content.rindex(b"PK\x05\x06") + 12
    content[place : place + 4] = struct.pack("<I", 200 << 20)
    assert "table of contents that is too long" in refusal(tmp_path, bytes(content), name="m.zip").cause


def test_a_zip64_archive_is_unpacked(tmp_path: Path) -> None:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive, archive.open("big", "w", force_zip64=True) as member:
        member.write(b"content")
    unpack(saved(tmp_path, raw.getvalue()), tmp_path / "into", limits=LIMITS)
    assert found(tmp_path / "into") == {"big": b"content"}


def test_a_sparse_member_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(1 << 30)
        file.seek(1 << 29)
        file.write(b"x")
    subprocess.run(["tar", "--sparse", "-cf", tmp_path / "s.tar", "-C", tmp_path, "holes"], check=True, timeout=20)
    with pytest.raises(ArchiveRefusedError, match="is a sparse file; pack the archive without --sparse"):
        unpack(tmp_path / "s.tar", tmp_path / "into", limits=LIMITS)


def test_a_folder_that_is_not_empty_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "into").mkdir()
    (tmp_path / "into/mine").write_text("kept")
    with pytest.raises(FileExistsError):
        unpack(saved(tmp_path, tar_files(PLAIN)), tmp_path / "into", limits=LIMITS)
    assert found(tmp_path / "into") == {"mine": b"kept"}


def test_a_disk_that_fills_up_is_named(tmp_path: Path) -> None:
    archive = saved(tmp_path, tar_files({"a": os.urandom(300_000)}))
    program = (
        "import sys, pathlib; from conch.storage.archive import *\n"
        "from conch.storage.errors import DiskFullError\n"
        "try: unpack(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), limits=Limits())\n"
        "except DiskFullError as error: sys.exit(str(error))"
    )
    small = f'mount -t tmpfs -o size=64k none "{tmp_path}/disk" && exec "$@"'
    (tmp_path / "disk").mkdir()
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", small, "sh",
         sys.executable, "-c", program, str(archive), str(tmp_path / "disk/into")],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "operator")},
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert "the model volume is full" in done.stderr


def test_a_big_archive_needs_no_more_memory_than_a_small_one(tmp_path: Path) -> None:
    archive = tmp_path / "big.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        member = info("1/model.onnx", size=200 << 20)
        tar.addfile(member, cast("Any", Repeated(os.urandom(1 << 20))))
    program = (
        "import sys, pathlib; from conch.storage.archive import *\n"
        "unpack(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), limits=Limits())\n"
        "print(*(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(archive), str(tmp_path / "into")],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "operator")},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert (tmp_path / "into/1/model.onnx").stat().st_size == 200 << 20
    assert int(done.stdout) < 100 << 10  # KiB


class Repeated:
    """Endless content; random, and alike only at distances that gzip doesn't see."""

    def __init__(self, block: bytes) -> None:
        self._block = block

    def read(self, count: int) -> bytes:
        return (self._block * (count // len(self._block) + 1))[:count]


def test_names_tell_archives_but_not_models_that_are_zip_files_inside() -> None:
    for name in ("a.tar", "a.tar.gz", "A.TGZ", "m.tar.bz2", "m.tbz2", "m.tar.xz", "m.txz", "m.zip"):
        assert is_archive_name(name)
    for name in ("model.pt", "model.onnx", "a.gz", "tar", "m.tar.zst", "m.zip.part"):
        assert not is_archive_name(name)


PARTS = st.sampled_from(["..", ".", "", "a", "b", "/", "\\", "a\0b", "\n", "ü", "…", "l", "~", "-rf", "a" * 300, "con"])
NAMES = st.one_of(
    st.lists(PARTS, min_size=1, max_size=5).map("/".join),
    st.text(max_size=30),
    st.binary(min_size=1, max_size=30).map(lambda raw: raw.decode("utf-8", "surrogateescape")),
)
KINDS = st.sampled_from(
    [tarfile.REGTYPE, tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE]
)
# Names without a fault, so that what counts is how members and links go together.
TIDY = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map("/".join)
WAYS = st.lists(st.sampled_from(["a", "b", "..", "."]), min_size=1, max_size=4).map("/".join)
TIDY_KINDS = st.sampled_from([tarfile.REGTYPE, tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])
MEMBERS = st.one_of(
    st.lists(st.tuples(NAMES, KINDS, NAMES), min_size=1, max_size=6),
    st.lists(st.tuples(TIDY, TIDY_KINDS, WAYS | TIDY), min_size=1, max_size=8),
)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(members=MEMBERS, zipped=st.booleans())
def test_whatever_members_are_called_nothing_appears_or_changes_outside(
    members: list[tuple[str, bytes, str]], *, zipped: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.mktemp("case")
    (base / "secret").write_bytes(b"untouched")
    archive = saved(base, _hostile(members, zipped=zipped))
    before = outside(base)
    into = base / "deep/er/into"
    into.parent.mkdir(parents=True)
    error = outcome(archive, into)
    assert into.exists() == (error is None)
    assert error is None or str(error).isprintable()
    for path in into.rglob("*"):
        assert path.resolve(strict=True).is_relative_to(into.resolve())
        assert path.name.isprintable()
        assert "\\" not in path.name
        assert path.is_file() or path.is_dir()
    assert outside(base) == before


def outside(base: Path) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in base.iterdir() if path.is_file()}
    return files | {str(path): b"" for path in (base / "deep").rglob("*") if not path.is_relative_to(base / "deep/er")}


def _hostile(members: list[tuple[str, bytes, str]], *, zipped: bool) -> bytes:
    if zipped:
        modes = {tarfile.SYMTYPE: 0o120777, tarfile.FIFOTYPE: 0o010644}
        raw = io.BytesIO()
        with zipfile.ZipFile(raw, "w") as archive:
            for name, kind, target in members:
                member = zipfile.ZipInfo("x")
                member.filename = name.encode("utf-8", "replace").decode()
                member.external_attr = modes.get(kind, 0) << 16
                if member.filename not in archive.NameToInfo:
                    archive.writestr(member, target.encode("utf-8", "replace"))
        return raw.getvalue()
    return tar_of(
        *(
            (info(name, kind, linkname=target), b"content" if kind == tarfile.REGTYPE else b"")
            for name, kind, target in members
        ),
        tar_format=tarfile.GNU_FORMAT,
    )
