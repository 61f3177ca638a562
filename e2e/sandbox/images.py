"""Container images without a registry: a Debian base, then ordinary Dockerfiles by buildah, kept as OCI archives."""

import configparser
import contextlib
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox.binaries import find_go
from sandbox.content import digest, locked
from sandbox.errors import SandboxError
from sandbox.paths import PACKAGE, REPOSITORY, cache_root
from sandbox.progress import Say, checked, step

BASE = "docker.io/library/python:3.11-slim-bookworm"
PAUSE = "sandbox.local/pause:1"
TRITON = "sandbox.local/triton:1"
FILETYPE = "sandbox.local/models/filetype:1"
OPERATOR = "sandbox.local/conch:dev"

SUITE = "bookworm"
BASE_PACKAGES = ("python3", "python3-venv", "python3-pip", "ca-certificates", "libpython3.11")
LAYERS_KEPT = 150  # images and steps of their Dockerfiles
# A killed build must leave no mount on the machine: they live in a namespace that ends with the build.
PRIVATE = ("unshare", "-m", "-p", "--fork", "--kill-child", "--mount-proc")
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")


@dataclass(frozen=True)
class Image:
    """An OCI archive in the cache: `reference` is its name in the region, `key` the hash of what it was made from."""

    reference: str
    key: str
    archive: Path


def archive_path(name: str, key: str) -> Path:
    """Where the archive of an image with this content lies."""
    return cache_root() / "images" / f"{name}-{key}.tar"


def debian_mirror() -> str:
    """The mirror that this machine's own apt uses for its release, so that nothing here names one."""
    said = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(CREATED_BY) $(SUITE) $(CODENAME) $(REPO_URI)"],
        capture_output=True, text=True, timeout=60, check=False,
    ).stdout  # fmt: skip
    for line in said.splitlines():
        words = line.split()
        if len(words) == 4 and words[0] == "Packages" and words[2] == SUITE and "security" not in words[3]:
            return words[3]
    message = f"apt knows no Debian {SUITE} source, from which the base image is made; add one to apt's sources"
    raise SandboxError(message)


def pip_settings() -> tuple[str, list[tuple[Path, Path]]]:
    """A pip.conf with this machine's own settings, and the files it names, to be seen only while an image is built."""
    listed = checked(
        ["python3", "-m", "pip", "config", "list"], fix="install python3-pip", timeout_s=60, env=dict(os.environ)
    )
    values: dict[str, str] = {}
    for line in listed.splitlines():
        found = re.fullmatch(r"(?:global|install|download|:env:)\.([\w-]+)='(.*)'", line)
        if found and found[1] not in {"target", "user", "require-virtualenv", "no-deps", "config-file", "cache-dir"}:
            values[found[1].replace("_", "-")] = found[2].replace("\\n", "\n ")
    mounts: list[tuple[Path, Path]] = []
    bundle = Path(values.get("cert", CA_BUNDLE))
    if bundle.is_file():
        inside = Path("/etc/ssl/sandbox-build.crt")
        mounts.append((bundle.resolve(), inside))
        values["cert"] = str(inside)
    places = values.get("find-links", "").split()
    mounts += [(Path(place), Path(place)) for place in places if place.startswith("/") and Path(place).exists()]
    config = configparser.RawConfigParser()
    config["global"] = values
    with tempfile.SpooledTemporaryFile(mode="w+") as text:
        config.write(text)
        text.seek(0)
        return str(text.read()), mounts


def buildah(*words: str | Path, fix: str, timeout_s: float = 900, private: Sequence[str] = PRIVATE) -> str:
    """Run buildah on the sandbox's own storage."""
    root = cache_root() / "buildah"
    storage = ["--root", str(root / "root"), "--runroot", str(root / "runroot"), "--storage-driver", "overlay"]
    env = {**os.environ, "BUILDAH_ISOLATION": "chroot"}
    return checked([*private, "buildah", *storage, *words], fix=fix, timeout_s=timeout_s, env=env)


def has_image(reference: str, key: str) -> bool:
    """Whether buildah's storage holds this content under this name."""
    try:
        said = buildah(
            "inspect", "--type", "image", "--format", '{{index .OCIv1.Config.Labels "sandbox.key"}}', reference, fix=""
        )
    except SandboxError:
        return False
    return said.strip() == key


def base_key() -> str:
    """Hash of what the base is made from."""
    return digest([], "2", SUITE, *BASE_PACKAGES)


def ensure_base(tell: Say) -> None:
    """A Debian with Python, under the name that Dockerfiles ask for."""
    if has_image(BASE, base_key()):
        return
    mirror = debian_mirror()
    with tempfile.TemporaryDirectory(prefix="conch-base-") as folder, step("base image: debootstrap", tell):
        rootfs = Path(folder) / "rootfs"
        checked(
            [
                *PRIVATE,
                "debootstrap",
                "--variant=minbase",
                f"--include={','.join(BASE_PACKAGES)}",
                SUITE,
                rootfs,
                mirror,
            ],
            fix="see whether apt-get update works on this machine",
            timeout_s=900,
        )
        for waste in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
            shutil.rmtree(rootfs / waste, ignore_errors=True)
            (rootfs / waste).mkdir(parents=True)
        # the official image lets pip install into its Python, and calls it python too
        for marker in rootfs.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            marker.unlink()
        (rootfs / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        (rootfs / "usr/local/bin/python3").symlink_to("/usr/bin/python3")
        # addresses of this machine's mirrors stay out of the image
        for source in (rootfs / "etc/apt").glob("sources.list*"):
            if source.is_file():
                source.write_text("")
        for stray in ("etc/resolv.conf", "etc/hostname"):
            (rootfs / stray).unlink(missing_ok=True)
        context = Path(folder) / "context"
        context.mkdir()
        with tarfile.open(context / "rootfs.tar", "w") as tar:
            tar.add(rootfs, arcname=".", filter=lambda entry: None if entry.ischr() or entry.isblk() else entry)
        (context / "Dockerfile").write_text('FROM scratch\nADD rootfs.tar /\nCMD ["python3"]\n')
        bud(context, BASE, labels={"sandbox.key": base_key()})


def bud(
    context: Path, reference: str, *, dockerfile: Path | None = None, labels: Mapping[str, str] | None = None
) -> None:
    """Build a Dockerfile with this machine's pip settings mounted, none of which stay in the image."""
    settings, mounts = pip_settings()
    with tempfile.TemporaryDirectory(prefix="conch-build-") as folder:
        conf = Path(folder) / "pip.conf"
        conf.write_text(settings)
        volumes = [
            word for host, inside in [(conf, Path("/etc/pip.conf")), *mounts] for word in ("-v", f"{host}:{inside}:ro")
        ]
        marks = [word for name, value in (labels or {}).items() for word in ("--label", f"{name}={value}")]
        buildah(
            "bud", "--isolation", "chroot", "--network", "host", "--pull-never", "--layers", "--format", "oci",
            *volumes, *marks, "-f", dockerfile or context / "Dockerfile",
            "-t", reference, context,
            fix=f"the Dockerfile of {reference} doesn't build here; its output follows",
            timeout_s=1500,
        )  # fmt: skip


def prune() -> None:
    """Drop the layers of older builds once there are many; the next build is then a whole one."""
    fix = f"delete {cache_root() / 'buildah'}"
    if len(buildah("images", "--all", "--quiet", fix=fix).split()) > LAYERS_KEPT:
        # a build that was killed leaves a working container, whose image can't go; that is no reason not to start
        with contextlib.suppress(SandboxError):
            buildah("rmi", "--prune", fix=fix)


def export(reference: str, archive: Path) -> None:
    """Write an image as an OCI archive; layers that a region already has are then not imported again."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    draft = archive.with_suffix(".new")
    draft.unlink(missing_ok=True)
    buildah(
        "push", "--format", "oci", reference, f"oci-archive:{draft}:{reference}",
        fix="free some disk space in the cache folder", timeout_s=600,
    )  # fmt: skip
    draft.replace(archive)


def ensure(
    reference: str, name: str, context: Path, sources: Sequence[Path], tell: Say, *, dockerfile: Path | None = None
) -> Image:
    """An image from a Dockerfile, built when its sources or the base changed."""
    key = digest(sources, base_key())
    archive = archive_path(name, key)
    image = Image(reference, key, archive)
    if archive.exists():
        return image
    with locked(cache_root() / "images.lock"):
        if archive.exists():
            return image
        ensure_base(tell)
        prune()
        with step(f"image {reference}", tell):
            bud(context, reference, dockerfile=dockerfile)
            export(reference, archive)
    for older in archive.parent.glob(f"{name}-*.tar"):
        if re.fullmatch(rf"{re.escape(name)}-[0-9a-f]{{16}}\.tar", older.name) and older != archive:
            older.unlink(missing_ok=True)
    return image


def ensure_pause(tell: Say) -> Image:
    """The image that holds a pod's namespaces: one static Go program."""
    folder = PACKAGE / "images" / "pause"
    key = digest([folder])
    archive = archive_path("pause", key)
    image = Image(PAUSE, key, archive)
    if archive.exists():
        return image
    with (
        locked(cache_root() / "images.lock"),
        tempfile.TemporaryDirectory(prefix="conch-pause-") as scratch,
        step(f"image {PAUSE}", tell),
    ):
        context = Path(scratch)
        shutil.copy(folder / "Dockerfile", context)
        env = {**os.environ, "CGO_ENABLED": "0", "GO111MODULE": "off"}
        program, source = str(context / "pause"), str(folder / "pause.go")
        go = [find_go(tell), "build", "-trimpath", "-ldflags", "-s -w", "-o", program, source]
        checked(go, fix="see whether Go works", timeout_s=300, env=env)
        bud(context, PAUSE)
        export(PAUSE, archive)
    return image


def ensure_stable(tell: Say) -> list[Image]:
    """The images that the project's own code doesn't change."""
    folder = PACKAGE / "images"
    return [
        ensure_pause(tell),
        ensure(TRITON, "triton", folder / "triton", [folder / "triton"], tell),
        ensure(FILETYPE, "filetype", folder / "filetype", [folder / "filetype"], tell),
    ]


def ensure_operator(tell: Say) -> Image | None:
    """The operator's image from the project's own Dockerfile; none when there is no Dockerfile yet."""
    dockerfile = REPOSITORY / "Dockerfile"
    if not dockerfile.is_file():
        tell("  no Dockerfile in the repository: the operator's image is left out")
        return None
    names = ("pyproject.toml", "README.md", "LICENSE", "crds", "operator", "requirements", "requirements.txt")
    sources = [dockerfile, *(REPOSITORY / name for name in names), *sorted(REPOSITORY.glob("requirements*.txt"))]
    return ensure(OPERATOR, "conch", REPOSITORY, sources, tell, dockerfile=dockerfile)
