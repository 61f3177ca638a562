"""What a mounted source holds, and how it is linked into the model repository. Reads folders, changes nothing.

A volume can change between this check and Triton's start. Links point to what was resolved here, so that a switched
symbolic link inside the volume can't put another file in a verified one's place.
"""

import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from conch.storage.errors import SourceRefusedError, WrongLayoutError
from conch.storage.plan import PlannedModel

# Triton ignores version folders with a leading zero.
_VERSION = re.compile(r"[1-9][0-9]*", re.ASCII)
_NAMES_SHOWN = 8


@dataclass(frozen=True)
class TreeFile:
    """A regular file below a source: `relative` as seen from there (links not resolved), `real` where it lies."""

    relative: str
    real: Path


@dataclass(frozen=True)
class Link:
    """A symbolic link to make: `place` below the model's folder, `target` absolute."""

    place: PurePosixPath
    target: Path


@dataclass(frozen=True)
class Source:
    """A mounted source, resolved. `files` is everything that the digest covers; `is_folder` says which digest."""

    is_folder: bool
    files: tuple[TreeFile, ...]
    links: tuple[Link, ...]


def inspect(model: PlannedModel) -> Source:
    """Find the model's source in its mount and check that Triton can load it from there.

    A file becomes 1/<fileName>. A folder with numbered subfolders gives each as that version; otherwise the folder
    itself, which then holds <fileName>, becomes version 1.

    Raises SourceRefusedError (not there, not readable) and WrongLayoutError (not loadable, or leads out of the mount).
    """
    mount, root, real = _locate(model)
    uri = model.uri
    if not real.is_dir():
        file = TreeFile(model.file_name, _regular(real, uri))
        return Source(False, (file,), (Link(PurePosixPath("1", model.file_name), _in_mount(real, root, mount)),))
    try:
        files = tuple(walk(real, root, uri))
        versions = _versions(real, model.file_name, uri)
    except PermissionError as error:
        raise _unreadable(uri, Path(error.filename)) from error
    links = tuple(Link(PurePosixPath(number), _in_mount(folder, root, mount)) for number, folder in versions)
    return Source(True, files, links)


def _locate(model: PlannedModel) -> tuple[Path, Path, Path]:
    """The mount as named in the plan, the mount resolved, and the source resolved."""
    mount = Path(model.mount or "/")
    inside = (model.path or "/").strip("/")
    try:
        root = mount.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise SourceRefusedError(
            f"{model.uri} is not mounted at {mount}", "add the source's volume to the pod's init container"
        ) from error
    source = root / inside
    try:
        real = source.resolve(strict=True)
    except PermissionError as error:
        raise _unreadable(model.uri, source) from error
    except (OSError, RuntimeError) as error:
        nearest = _nearest_folder(source)
        raise SourceRefusedError(
            f"{model.uri} has no {model.path or '/'} (the nearest folder holds {_listing(nearest)})",
            "correct the path in source.uri",
        ) from error
    if not real.is_relative_to(root):
        raise _escape(model.uri, inside)
    return mount, root, real


def _versions(folder: Path, file_name: str, uri: str) -> list[tuple[str, Path]]:
    numbered = sorted(
        (child for child in folder.iterdir() if _VERSION.fullmatch(child.name) and child.is_dir()),
        key=lambda child: int(child.name),
    )
    for child in numbered:
        if not (child / file_name).exists():
            raise WrongLayoutError(
                f"expected {file_name} in version {child.name}, found {_listing(child)} ({uri})",
                "rename the file or set the model's format to what it is",
            )
    if numbered:
        return [(child.name, child.resolve()) for child in numbered]
    if not (folder / file_name).exists():
        raise WrongLayoutError(
            f"expected {file_name} or numbered version folders, found {_listing(folder)} ({uri})",
            "point source.uri at the model's folder or rename the file",
        )
    return [("1", folder)]


def walk(folder: Path, root: Path, uri: str) -> Iterator[TreeFile]:
    """Every file below `folder`, in no certain order, following links as far as they stay inside `root`.

    Both paths are resolved ones. Raises WrongLayoutError for what leads out of `root`, is no file or folder (reading a
    pipe would never end), loops, or has a name that the tree digest can't hold.
    """
    # Each entry carries the real folders above it: meeting one again is a loop of links.
    waiting: list[tuple[str, Path, frozenset[Path]]] = [("", folder, frozenset((folder,)))]
    while waiting:
        prefix, current, above = waiting.pop()
        for child in current.iterdir():
            relative = f"{prefix}{child.name}"
            if relative == "lost+found":
                continue
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


def _in_mount(real: Path, root: Path, mount: Path) -> Path:
    """`real` under the mount's name in the plan: that is its name in Triton's container too."""
    return mount / real.relative_to(root)


def _nearest_folder(path: Path) -> Path:
    return next(folder for folder in path.parents if folder.is_dir())


def _listing(folder: Path) -> str:
    try:
        names = sorted(child.name for child in folder.iterdir())
    except OSError:
        return "nothing readable"
    shown = ", ".join(names[:_NAMES_SHOWN]) or "nothing"
    return f"{shown} and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else shown


def _escape(uri: str, relative: str) -> WrongLayoutError:
    return WrongLayoutError(
        f"{relative} is a symbolic link that leads out of the volume ({uri})", "copy the file into the volume"
    )


def _unreadable(uri: str, path: Path) -> SourceRefusedError:
    return SourceRefusedError(
        f"{uri} may not be read ({path.name}: permission denied)",
        "make its files readable for the pod's user or group (fsGroup)",
    )
