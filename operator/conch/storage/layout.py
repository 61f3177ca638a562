"""What a source holds, whether Triton can load it, and how it becomes a model's folder. Reads folders, changes nothing.

A volume can change between this check and Triton's start. Links point to what was resolved here, so that a switched
symbolic link inside the volume can't put another file in a verified one's place.
"""

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import unquote, urlsplit

from conch.storage.errors import FetchError, SourceRefusedError, WrongLayoutError
from conch.storage.manifest import check_engine
from conch.storage.plan import PlannedModel
from conch.triton.backends import AUTO_FILES, BACKENDS, companions

# Triton ignores version folders with a leading zero.
_VERSION: Final = re.compile(r"[1-9][0-9]*", re.ASCII)
# What people call a version's folder elsewhere.
_LIKE_A_VERSION: Final = re.compile(r"(?:v|version|ver)?[-_.]?0*([1-9][0-9]*)(?:\.0)*", re.ASCII | re.IGNORECASE)
ENTRIES_MAX: Final = 200_000
"""Files and folders of one source; at most about 250 MiB of memory."""
_NAMES_SHOWN: Final = 8
_DEPTH_SEARCHED: Final = 3
_FOLDERS_SEARCHED: Final = 200
_JUNK: Final = frozenset(
    (".DS_Store", "Thumbs.db", "desktop.ini", "__MACOSX", "__pycache__", ".ipynb_checkpoints", ".git", ".gitattributes",
     ".gitignore", ".cache", "lost+found")
)  # fmt: skip
"""What desktops, notebooks and version control leave behind: part of the digest, but never what a model consists of."""
_SAVED_MODEL: Final = ("saved_model.pb", "saved_model.pbtxt")
_ONNX_IN_FOLDER: Final = "model.onnx"
"""What the ONNX Runtime backend loads from a folder, whatever the folder is called."""
_FORMATS: Final = {
    ".onnx": "ONNX", ".plan": "TensorRT", ".engine": "TensorRT", ".trt": "TensorRT",
    ".pt": "PyTorch", ".pth": "PyTorch", ".savedmodel": "TensorFlow", ".tflite": "TFLite", ".xml": "OpenVINO",
    ".py": "Python", ".dali": "DALI",
}  # fmt: skip
_FIXED_NAMES: Final = frozenset(row.file for row in BACKENDS.values() if row.file and not row.file_can_change)


@dataclass(frozen=True)
class TreeFile:
    """A regular file below a source: `relative` as seen from there (links not resolved), `real` where it lies."""

    relative: str
    real: Path


@dataclass(frozen=True)
class Link:
    """What is to stand in the repository: `place` below the model's folder, `target` an absolute file or folder."""

    place: PurePosixPath
    target: Path


@dataclass(frozen=True)
class Source:
    """A source, resolved. `files` is everything that the digest covers; `is_folder` says which digest."""

    is_folder: bool
    files: tuple[TreeFile, ...]
    links: tuple[Link, ...]


def inspect(model: PlannedModel, *, tensor_rt: str | None = None) -> Source:
    """Find the model's source in its mount and check that Triton can load it from there.

    A file becomes 1/<fileName>. A folder with numbered subfolders gives each as that version, and everything beside
    them; otherwise the folder itself, which then holds <fileName>, becomes version 1. A SavedModel's own folder counts
    as <fileName>, also as a numbered version (TensorFlow Serving's arrangement).

    Args:
        model: a model whose source is mounted.
        tensor_rt: the TensorRT version of the pod's image, if it is known.

    Raises SourceRefusedError (not there, not readable) and WrongLayoutError (not loadable, or leads out of the mount).
    """
    mount, root, real = _locate(model)
    with_names = _Arranger(model, root, mount, tensor_rt)
    return with_names.folder(real) if real.is_dir() else with_names.file(real)


def located(model: PlannedModel) -> Path:
    """Where a mounted source really lies; inside its mount. Raises SourceRefusedError and WrongLayoutError."""
    return _locate(model)[2]


def arrange(model: PlannedModel, found: Path, *, tensor_rt: str | None = None, from_archive: bool = False) -> Source:
    """The same for what a download left at `found`, a file or a folder.

    `from_archive`: a single folder that wraps everything, as archives are commonly packed, is looked through.

    Raises SourceRefusedError and WrongLayoutError.
    """
    real = found.resolve(strict=True)
    if not real.is_dir():
        return _Arranger(model, real.parent, real.parent, tensor_rt).file(real)
    arranger = _Arranger(model, real, real, tensor_rt)
    return arranger.folder(_unwrapped(model, real) if from_archive else real)


def walk(folder: Path, root: Path, uri: str, *, entries_max: int = ENTRIES_MAX) -> Iterator[TreeFile]:
    """Every file below `folder`, in no certain order, following links as far as they stay inside `root`.

    Both paths are resolved ones. Raises WrongLayoutError for what leads out of `root`, is no file or folder (reading a
    pipe would never end), loops, or has a name that the tree digest can't hold, and for more than `entries_max` files
    and folders: links to folders of links could multiply them without end.
    """
    entries = 0
    # Each entry carries the real folders above it: meeting one again is a loop of links.
    waiting: list[tuple[str, Path, frozenset[Path]]] = [("", folder, frozenset((folder,)))]
    while waiting:
        prefix, current, above = waiting.pop()
        for child in current.iterdir():
            relative = f"{prefix}{child.name}"
            if relative == "lost+found":
                continue
            entries += 1
            if entries > entries_max:
                raise WrongLayoutError(
                    f"the folder holds more than {entries_max} files and folders, links followed ({uri})",
                    "name the model's own folder in spec.models[].source.uri, or pack small files as one",
                )
            if "\\" in child.name or not child.name.isprintable():
                raise WrongLayoutError(
                    f"the file name {relative!r} has a backslash or a control character ({uri})", "rename the file"
                )
            real = _resolved(child, root, uri, relative)
            if not real.is_dir():
                yield TreeFile(relative, _regular(real, uri))
            elif real in above:
                raise WrongLayoutError(
                    f"the symbolic link {relative} leads back to a folder above it ({uri})", "remove the link"
                )
            else:
                waiting.append((f"{relative}/", real, above | {real}))


class _Arranger:
    """Turns one resolved source into links. `root` is where links must stay, `mount` its name in Triton's container."""

    def __init__(self, model: PlannedModel, root: Path, mount: Path, tensor_rt: str | None) -> None:
        self._model = model
        self._root = root
        self._mount = mount
        self._tensor_rt = tensor_rt
        self._uri = model.uri or model.name
        self._file = model.file_name or ""

    def file(self, real: Path) -> Source:
        model = self._model
        regular = _regular(real, self._uri)
        if model.expects == "Folder":
            raise self._wrong(
                f"expected a folder {self._file}, found the file {self._source_name()}",
                f"point {model.at('source.uri')} at the folder that holds {_SAVED_MODEL[0]}",
            )
        if model.versions and model.versions != (1,):
            raise self._wrong(
                f"versions {_numbers(model.versions)} are wanted, found the single file {self._source_name()}, which "
                "is version 1",
                f"set {model.at('versions.numbers')} to [1], or give a folder with numbered versions",
            )
        beside = (*_companions(self._file), *model.extra_files)
        if beside:
            raise self._wrong(
                f"expected {', '.join(beside)} beside the model, found the single file {self._source_name()}",
                f"point {model.at('source.uri')} at a folder that holds them all",
            )
        _require_readable(regular, self._uri)
        place = self._file or self._auto_name()
        return Source(False, (TreeFile(place, regular),), (Link(PurePosixPath("1", place), self._named(real)),))

    def folder(self, real: Path) -> Source:
        try:
            files = tuple(walk(real, self._root, self._uri))
            links = tuple(self._versions(real))
            self._check_extra_files(real)
            beside = tuple(self._beside(real, {link.place.parts[0] for link in links}))
            for file in files:
                _require_readable(file.real, self._uri)
        except PermissionError as error:
            raise _unreadable(self._uri, Path(error.filename)) from error
        return Source(True, files, links + beside)

    def _versions(self, folder: Path) -> Iterator[Link]:
        model = self._model
        numbered = sorted((child for child in _children(folder) if _is_version(child)), key=lambda path: int(path.name))
        # Other versions than the required ones aren't loaded, so they may be as they are.
        wanted = [child for child in numbered if not model.versions or int(child.name) in model.versions]
        lacking = set(model.versions) - {int(child.name) for child in numbered} - (set() if numbered else {1})
        if lacking:
            raise self._wrong(
                f"expected version {_numbers(sorted(lacking))}, found {_listing(folder)}",
                f"add the folder to the source, or correct {model.at('versions.numbers')}",
            )
        if not numbered:
            yield from self._only_version(folder)
            return
        for child in wanted:
            yield self._version(child)
            check_engine(model, (child, folder), self._tensor_rt)

    def _version(self, folder: Path) -> Link:
        """A numbered version, checked. A link may lead to it, so its name and its real place differ."""
        real, number = folder.resolve(), folder.name
        if not _children(real) and self._model.expects != "Nothing":
            raise self._wrong(
                f"version {number} is an empty folder, expected {self._expected} in it",
                "put the model there, or remove the folder",
            )
        if self._is_model_itself(real):
            return Link(PurePosixPath(number, self._file), self._named(real))
        problem = self._problem(real)
        if problem is not None:
            raise self._wrong(f"expected {self._expected} in version {number}, {problem}", self._hint(real, number))
        return Link(PurePosixPath(number), self._named(real))

    def _only_version(self, folder: Path) -> Iterator[Link]:
        if self._is_model_itself(folder):
            yield Link(PurePosixPath("1", self._file), self._named(folder))
        else:
            problem = self._problem(folder)
            if problem is not None:
                expected = self._expected
                if self._model.expects != "Anything" and not _exists(folder / self._file):
                    expected += " or numbered version folders"
                raise self._wrong(f"expected {expected}, {problem}", self._hint(folder, None))
            yield Link(PurePosixPath("1"), self._named(folder))
        check_engine(self._model, (folder,), self._tensor_rt)

    @property
    def _expected(self) -> str:
        expects = self._model.expects
        if expects == "Anything" and not self._file:
            return "a model"
        return f"a folder {self._file}" if expects == "Folder" else self._file

    def _is_model_itself(self, folder: Path) -> bool:
        """A SavedModel without the folder that Triton wants around it."""
        return (
            self._model.expects == "Folder"
            and not _exists(folder / self._file)
            and any((folder / name).is_file() for name in _SAVED_MODEL)
        )

    def _problem(self, folder: Path) -> str | None:
        """Why Triton couldn't load a version from this folder: a clause about what was found."""
        expects, there = self._model.expects, folder / self._file
        if expects == "Nothing":
            return None
        if expects == "Anything" and (not self._file or not _exists(there)):
            # Which file it is, its backend finds out; that there is none shows here.
            return None if _children(folder) else "found nothing"
        if not _exists(there):
            return f"found {_listing(folder)}"
        if there.is_dir():
            return _problem_of_folder(there, expects)
        if expects == "Folder":
            return f"found a file {self._file}"
        missing = [name for name in _companions(self._file) if not (folder / name).is_file()]
        return f"found it without {', '.join(missing)} beside it" if missing else None

    def _hint(self, folder: Path, version: str | None) -> str:
        """What to write or to move, from what lies there."""
        model, where = self._model, f"version {version}" if version else "the model's folder"
        if self._file and _exists(folder / self._file):
            missing = [name for name in _companions(self._file) if not (folder / name).is_file()]
            if missing:
                return f"add {', '.join(missing)} to {where}: both files are the model"
            return f"put the model itself there, or correct {model.at('format')}"
        children = _children(folder)
        like = [child.name for child in children if self._is_like(child)]
        if like and self._file not in _FIXED_NAMES:
            which = like[0] if len(like) == 1 else f"one of {', '.join(like[:_NAMES_SHOWN])}"
            return f"set {model.at('file')} to {which}, or rename the file"
        if version is None and (folders := [child.name for child in children if child.is_dir()]):
            renamed = [(name, match[1]) for name in folders if (match := _LIKE_A_VERSION.fullmatch(name))]
            if renamed:
                return f"rename the folder {renamed[0][0]} to {renamed[0][1]}: versions are plain numbers from 1"
        deeper = self._deeper(folder)
        if deeper is not None:
            return self._hint_deeper(deeper, version)
        formats = {_FORMATS[child.suffix]: child.name for child in children if child.suffix in _FORMATS}
        formats = {name: file for name, file in formats.items() if BACKENDS[name].file != self._file}  # type: ignore[index]
        if len(formats) == 1 and self._file:
            name, file = next(iter(formats.items()))
            return f"set {model.at('format')} to {name} if {file} is the model, or put {self._file} into {where}"
        if version is None:
            return f"point {model.at('source.uri')} at the model's folder or rename the file"
        return f"put {self._expected} into {where}, or set {model.at('format')} to what it is"

    def _hint_deeper(self, deeper: str, version: str | None) -> str:
        model = self._model
        if version is not None:
            return f"it is one level too deep: move what is in {version}/{deeper} up into {version}"
        if model.scheme == "oci":
            return f"it is one level too deep: push the artifact from inside {deeper}"
        uri = (model.uri or "").rstrip("/")
        return f"it is one level too deep: set {model.at('source.uri')} to {uri}/{deeper}"

    def _deeper(self, folder: Path) -> str | None:
        """A subfolder that looks like the model, relative to the folder; the nearest, then the first by name."""
        waiting, searched = [(child, child.name, 1) for child in _children(folder) if child.is_dir()], 0
        while waiting and searched < _FOLDERS_SEARCHED:
            current, relative, depth = waiting.pop(0)
            searched += 1
            if not _exists(current):
                continue
            children = _children(current)
            if any(self._is_model_in(child) for child in (current, *filter(_is_version, children))):
                return relative
            if depth < _DEPTH_SEARCHED:
                waiting += [(child, f"{relative}/{child.name}", depth + 1) for child in children if child.is_dir()]
        return None

    def _is_model_in(self, folder: Path) -> bool:
        return bool(self._file) and (_exists(folder / self._file) or self._is_model_itself(folder))

    def _is_like(self, child: Path) -> bool:
        """Whether it may be the model under another name."""
        suffix = PurePosixPath(self._file).suffix
        if not suffix or child.name == self._file:
            return False
        kinds = {name for name, of in _FORMATS.items() if of == _FORMATS.get(suffix)} or {suffix}
        if self._model.expects == "Folder":
            return child.is_dir() and any((child / name).is_file() for name in _SAVED_MODEL)
        return child.suffix.lower() in kinds and child.is_file()

    def _check_extra_files(self, folder: Path) -> None:
        for extra in self._model.extra_files:
            if (folder / extra).is_file():
                continue
            name = PurePosixPath(extra).name
            above = folder / PurePosixPath(extra).parent
            places = [folder, *(child for child in _children(folder) if child.is_dir())]
            nearby = next((place / name for place in places if (place / name).is_file()), None)
            if nearby is not None:
                found = f"found {nearby.relative_to(folder)}"
                fix = f"move it to {extra}, counted from the folder that {self._model.at('source.uri')} names"
            else:
                found = f"found {_listing(above)}" if above.is_dir() else f"found no folder {extra.rpartition('/')[0]}"
                fix = f"add it to the source, or correct its name in {self._model.field or 'the model'}"
            raise self._wrong(f"expected the file {extra}, {found}", fix)

    def _beside(self, folder: Path, versions: set[str]) -> Iterator[Link]:
        """What else belongs into the model's folder: labels, warm-up data, code and environments that versions share.

        Where the folder itself is version 1, only what the configuration names.
        """
        if any(_is_version(child) for child in _children(folder)):
            names = [child.name for child in _children(folder) if not child.name.isdigit()]
        else:
            names = sorted({PurePosixPath(extra).parts[0] for extra in self._model.extra_files} - versions)
        for name in names:
            if name not in ("config.pbtxt", "configs"):  # the spec's configuration is the one that counts
                yield Link(PurePosixPath(name), self._named((folder / name).resolve()))

    def _source_name(self) -> str:
        """The source's own name for a file; on disk it may be called after its digest."""
        path = self._model.path or unquote(urlsplit(self._uri).path)
        return PurePosixPath(path).name or self._uri

    def _auto_name(self) -> str:
        """A name by which Triton finds the backend of a single file whose format the spec leaves open."""
        name = self._source_name()
        suffix = PurePosixPath(name).suffix.lower()
        wanted = _FORMATS.get(suffix)
        found = next(
            (file for file in AUTO_FILES if wanted and _FORMATS.get(PurePosixPath(file).suffix) == wanted), None
        )
        if found is None:
            known = ", ".join(sorted(_FORMATS))
            raise self._wrong(
                f"found the file {name}, whose name tells no format ({known})",
                f"set {self._model.at('format')}",
            )
        return found

    def _named(self, real: Path) -> Path:
        """`real` under the mount's name in the plan: that is its name in Triton's container too."""
        if not real.is_relative_to(self._root):
            raise _escape(self._uri, real.name)
        return self._mount / real.relative_to(self._root)

    def _wrong(self, cause: str, fix: str) -> WrongLayoutError:
        return WrongLayoutError(f"{cause} ({self._uri})", fix)


def _locate(model: PlannedModel) -> tuple[Path, Path, Path]:
    """The mount as named in the plan, the mount resolved, and the source resolved."""
    mount = Path(model.mount or "/")
    inside = (model.path or "/").strip("/")
    uri = model.uri or model.name
    try:
        root = mount.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise SourceRefusedError(
            f"{uri} is not mounted at {mount}", "add the source's volume to the pod's init container"
        ) from error
    source = root / inside
    try:
        real = source.resolve(strict=True)
    except PermissionError as error:
        raise _unreadable(uri, source) from error
    except (OSError, RuntimeError) as error:
        nearest = _nearest_folder(source)
        raise SourceRefusedError(
            f"{uri} has no {model.path or '/'} (the nearest folder holds {_listing(nearest)})",
            f"correct the path in {model.at('source.uri')}",
        ) from error
    if not real.is_relative_to(root):
        raise _escape(uri, inside)
    return mount, root, real


def _unwrapped(model: PlannedModel, folder: Path) -> Path:
    children = _children(folder)
    if len(children) != 1 or not children[0].is_dir() or children[0].is_symlink():
        return folder
    (only,) = children
    return folder if _is_version(only) or only.name in (model.file_name, *AUTO_FILES) else only


def _problem_of_folder(there: Path, expects: str) -> str | None:
    if expects == "File":
        return f"found a folder {there.name}"
    saved_model = expects == "Folder" or there.suffix == ".savedmodel"
    if saved_model and not any((there / name).is_file() for name in _SAVED_MODEL):
        return f"found {there.name} without {_SAVED_MODEL[0]} in it, but with {_listing(there)}"
    if there.suffix == ".onnx" and not (there / _ONNX_IN_FOLDER).is_file():
        return f"found a folder {there.name} without {_ONNX_IN_FOLDER} in it, but with {_listing(there)}"
    return None


def _companions(file_name: str) -> tuple[str, ...]:
    return companions("OpenVINO", file_name) if file_name.endswith(".xml") else ()


def _is_version(child: Path) -> bool:
    return _VERSION.fullmatch(child.name) is not None and child.is_dir()


def _children(folder: Path) -> list[Path]:
    """What a folder holds, by name, without what can't be part of a model. Raises OSError."""
    return sorted(child for child in folder.iterdir() if child.name not in _JUNK and not child.name.startswith("._"))


def _exists(path: Path) -> bool:
    """Whether there is a file or a folder; links are followed. Raises PermissionError."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _resolved(child: Path, root: Path, uri: str, relative: str) -> Path:
    try:
        real = child.resolve(strict=True)
    except PermissionError:
        raise
    except (OSError, RuntimeError) as error:
        raise WrongLayoutError(
            f"the symbolic link {relative} points to nothing ({uri})", "copy the file into the volume"
        ) from error
    if not real.is_relative_to(root):
        raise _escape(uri, relative)
    return real


def _regular(real: Path, uri: str) -> Path:
    if not stat.S_ISREG(real.stat().st_mode):
        raise WrongLayoutError(f"{real.name} is neither a file nor a folder ({uri})", "remove it from the volume")
    return real


def _require_readable(real: Path, uri: str) -> None:
    """Triton runs as the same user and group: what can't be read here can't be read there."""
    if not os.access(real, os.R_OK):
        raise _unreadable(uri, real)


def _nearest_folder(path: Path) -> Path:
    return next(folder for folder in path.parents if folder.is_dir())


def _listing(folder: Path) -> str:
    try:
        names = [child.name for child in _children(folder)]
    except OSError:
        return "nothing readable"
    shown = ", ".join(names[:_NAMES_SHOWN]) or "nothing"
    return f"{shown} and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else shown


def _numbers(versions: "tuple[int, ...] | list[int]") -> str:
    return ", ".join(str(number) for number in versions)


def _escape(uri: str, relative: str) -> WrongLayoutError:
    return WrongLayoutError(
        f"{relative} is a symbolic link that leads out of the volume ({uri})", "copy the file into the volume"
    )


def _unreadable(uri: str, path: Path) -> FetchError:
    return SourceRefusedError(
        f"{uri} may not be read ({path.name}: permission denied)",
        "make its files readable for the pod's user or group (fsGroup)",
    )
