"""The model repository on disk: built in a hidden folder, then shown whole. Writes files.

`.conch-staging/` below the repository holds `download/` (kept until the end, so that a restarted container resumes),
`models/` (built anew by each run) and `replaced/`. It lies on the repository's own file system, so a rename shows a
model at once. Models are shown only when every one of them is verified; Triton starts after that, and only if all
of it succeeded, so it never meets a part of the repository.
"""

import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from conch.storage.layout import Link, walk
from conch.storage.plan import PlannedModel

_STAGING = ".conch-staging"
_FOLDER_MODE = 0o755
_FILE_MODE = 0o644
_PROGRAM_MODE = 0o755


class Repository:
    """The folder that Triton serves, and the hidden one in which it is built. All methods raise OSError."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._staging = root / _STAGING
        self._models = self._staging / "models"

    def prepare(self) -> None:
        """Make the hidden folders; what an interrupted run had built of the models is thrown away."""
        shutil.rmtree(self._models, ignore_errors=True)
        for folder in (self._models, self._staging / "download"):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def downloads(self) -> Path:
        """Where downloads are collected, and kept until everything is shown."""
        return self._staging / "download"

    def content(self, key: str) -> Path:
        """Where a source's content stands before it is staged: a file or a folder."""
        return self.downloads / f"{key}.content"

    def shown_file(self, model: PlannedModel) -> Path:
        """Where a downloaded file stands after an earlier run that succeeded."""
        return self._root / model.name / "1" / (model.file_name or "")

    def make_way(self, model: PlannedModel) -> bool:
        """Remove what an earlier run has shown of a model, and what was staged of it. Whether there was something."""
        shutil.rmtree(self._models / model.name, ignore_errors=True)
        place = self._root / model.name
        if not place.is_dir():
            return False
        shutil.rmtree(place)
        return True

    def strangers(self, models: Sequence[PlannedModel]) -> list[str]:
        """Folders that Triton would load too although no model of the plan is named so."""
        planned = {model.name for model in models}
        return sorted(
            child.name
            for child in self._root.iterdir()
            if child.is_dir() and child.name not in planned and child.name not in (_STAGING, "lost+found")
        )

    def stage_links(self, model: PlannedModel, links: Sequence[Link]) -> None:
        """Build a model out of links into a mounted volume."""
        folder = self._stage_config(model)
        for link in links:
            place = folder / link.place
            place.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
            place.symlink_to(link.target)

    def stage_downloaded(self, model: PlannedModel, links: Sequence[Link], root: Path) -> None:
        """Build a model out of verified files below `root`, on the repository's own file system.

        They are linked, not moved: two models may share them, and a restarted run finds them again. Symbolic links
        become what they point to; they were checked to stay below `root`, and are checked again.
        """
        folder = self._stage_config(model)
        real_root = root.resolve(strict=True)
        for link in links:
            place = folder / link.place
            if not link.target.is_dir():
                _link_file(link.target.resolve(strict=True), place)
                continue
            place.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
            for file in walk(link.target.resolve(strict=True), real_root, model.uri or model.name):
                _link_file(file.real, place / file.relative)

    def stage_nothing(self, model: PlannedModel) -> None:
        """An ensemble: Triton wants a folder for each version, with nothing in it."""
        folder = self._stage_config(model)
        for number in model.versions or (1,):
            (folder / str(number)).mkdir(mode=_FOLDER_MODE)

    def stage_file(self, model: PlannedModel, verified: Path) -> None:
        """Build a model out of a verified file. Two models may share one: it is linked, not moved."""
        _link_file(verified, self._stage_config(model) / "1" / (model.file_name or verified.name))

    def show(self, models: Sequence[PlannedModel]) -> None:
        """Put every staged model in its place, then remove the hidden folder, which Triton would read as a model."""
        replaced = self._staging / "replaced"
        shutil.rmtree(replaced, ignore_errors=True)
        replaced.mkdir()
        for model in models:
            place = self._root / model.name
            if place.exists() or place.is_symlink():
                place.rename(replaced / model.name)
            (self._models / model.name).rename(place)
        shutil.rmtree(self._staging)

    def _stage_config(self, model: PlannedModel) -> Path:
        folder = self._models / model.name
        folder.mkdir(mode=_FOLDER_MODE)
        config = folder / "config.pbtxt"
        config.write_text(model.config, encoding="utf-8")
        config.chmod(_FILE_MODE)
        return folder


def _link_file(verified: Path, place: Path) -> None:
    """A second name for a file that anybody may read, wherever Triton's container runs as another user."""
    place.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    verified.chmod(_PROGRAM_MODE if verified.stat().st_mode & stat.S_IXUSR else _FILE_MODE)
    place.hardlink_to(verified)
