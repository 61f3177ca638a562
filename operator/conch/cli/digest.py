"""The command `conch digest`: what to write as a model's `source.digest`. Reads files, writes to the terminal."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads it at run time
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conch.storage.manifest import EngineManifest

REFUSED: Final = 1
UNREADABLE: Final = 2

PROGRESS_EVERY_S: Final = 2.0


class Form(StrEnum):
    """How the result is written."""

    YAML = "yaml"
    JSON = "json"


def digest(
    path: Annotated[Path, typer.Argument(help="The model: a file, an archive, or the folder that source.uri names.")],
    volume: Annotated[
        Path | None,
        typer.Option(help="The folder in which links must stay, as they must on a claim. Default: PATH itself."),
    ] = None,
    output: Annotated[Form, typer.Option(help="yaml: lines for the InferenceService; json.")] = Form.YAML,
) -> None:
    """Print a model's digest as the lines that go into an InferenceService.

    A file's and an archive's digest is what sha256sum prints; a folder's is described in docs/models.md, with the
    commands that compute it without Conch. A TensorRT engine's conch-engine.json is printed as source.engine.

    Exit codes: 0 done; 1 the folder holds what can't be a source (a link out of it, a pipe); 2 it can't be read.
    """
    from conch.storage.errors import FetchError, SourceRefusedError

    try:
        result = measure(path, volume)
    except SourceRefusedError as error:
        _fail(str(error), UNREADABLE)
    except FetchError as error:
        _fail(str(error), REFUSED)
    except OSError as error:
        name = error.filename if isinstance(error.filename, str) else path
        _fail(f"{name} can't be read ({error.strerror}); check the path and its permissions", UNREADABLE)
    print(result.to_json() if output is Form.JSON else result.to_yaml())


@dataclass(frozen=True)
class Result:
    """A model's digest, what it covers, and the engine that its manifest describes."""

    digest: str
    is_folder: bool
    files: int
    size_bytes: int
    engine: dict[str, Any] | None

    def to_yaml(self) -> str:
        """Lines for `models[]`. Quoting is JSON's, which YAML reads."""
        covered = f"a folder with {self.files} files" if self.is_folder else "a file"
        lines = [f"# {covered}, {self.size_bytes} bytes", "source:", f"  digest: {self.digest}"]
        if self.engine:
            lines.append("  engine:")
            lines += [f"    {key}: {json.dumps(value)}" for key, value in self.engine.items()]
        return "\n".join(lines)

    def to_json(self) -> str:
        """One object on one line."""
        kind = "Folder" if self.is_folder else "File"
        return json.dumps(
            {
                "digest": self.digest,
                "kind": kind,
                "files": self.files,
                "bytes": self.size_bytes,
                "engine": self.engine,
            }
        )


def measure(path: Path, volume: Path | None) -> Result:
    """Walk and hash. Raises FetchError and OSError."""
    from conch.storage.digest import file_digest, tree_digest
    from conch.storage.layout import walk

    real = path.resolve(strict=True)
    if not real.is_dir():
        size_bytes = real.stat().st_size
        hashed = file_digest(real, _progress(size_bytes))
        return Result(hashed, False, 1, size_bytes, _engine(real.parent, real.name))
    root = real if volume is None else volume.resolve(strict=True)
    if not real.is_relative_to(root):
        _fail(f"--volume {volume} doesn't contain {path}; name the folder that is the volume's root", UNREADABLE)
    files = list(walk(real, root, str(path)))
    if not files:
        _fail(f"the folder {path} holds no file; name the model's own folder", REFUSED)
    size_bytes = sum(file.real.stat().st_size for file in files)
    hashed = tree_digest(files, _progress(size_bytes))
    return Result(hashed, True, len(files), size_bytes, _engine(real, None))


def _engine(folder: Path, file_name: str | None) -> dict[str, Any] | None:
    """What the manifest says; None without one, or if versions differ, which one `source.engine` can't describe."""
    if file_name is not None and not file_name.endswith((".plan", ".engine", ".trt")):
        return None
    found = list(_manifests(folder, with_versions=file_name is None))
    if len(set(found)) > 1:
        sys.stderr.write("conch digest: versions have different engine manifests, so source.engine is left out\n")
        return None
    if not found:
        return None
    return found[0].model_dump(by_alias=True, exclude_defaults=True) or None


def _manifests(folder: Path, *, with_versions: bool) -> Iterator[EngineManifest]:
    from conch.storage.manifest import read_manifest

    folders = [folder]
    if with_versions:
        folders += sorted(child for child in folder.iterdir() if child.name.isdigit() and child.is_dir())
    for candidate in folders:
        manifest = read_manifest((candidate,))
        if manifest is not None:
            yield manifest


def _progress(total_bytes: int) -> Callable[[int], None]:
    """A line on standard error every PROGRESS_EVERY_S seconds; none for what is done sooner."""
    import time

    from conch.storage.space import readable_size

    started_s = shown_s = time.monotonic()
    done_bytes = 0

    def hashed(count: int) -> None:
        nonlocal shown_s, done_bytes
        done_bytes += count
        now_s = time.monotonic()
        if now_s - shown_s >= PROGRESS_EVERY_S:
            shown_s = now_s
            rate = done_bytes / (now_s - started_s)
            sys.stderr.write(
                f"conch digest: {readable_size(done_bytes)} of {readable_size(total_bytes)}, {readable_size(rate)}/s\n"
            )

    return hashed


def _fail(sentence: str, exit_code: int) -> NoReturn:
    printable = "".join(character if character.isprintable() else "?" for character in sentence)
    sys.stderr.write(f"conch digest: {printable}\n")
    raise typer.Exit(exit_code)
