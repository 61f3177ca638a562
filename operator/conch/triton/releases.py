"""What Conch knows of Triton's monthly releases: versions inside the images, and options that came later. Pure.

Sources: server, CUDA and Python versions and compute capability are those of NVIDIA's Triton release notes
(docs.nvidia.com/deeplearning/triton-inference-server/release-notes, rel-YY-MM) and of triton-inference-server/server
`docs/introduction/compatibility.md`; TensorRT up to 25.06 is NVIDIA's Frameworks Support Matrix, later rows are named
below. What an image holds is said by its page on NGC. TensorRT has three numbers here, of which an engine must have the
same; None is unknown, and nothing is refused for what is unknown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

Month = tuple[int, int]
"""A release by year and month: (24, 10)."""

OLDEST: Final[Month] = (24, 1)
"""The first release that surely can close its APIs over HTTP (issue 5558 of triton-inference-server/server)."""

_RELEASE = re.compile(r"(2[0-9])[.](0[1-9]|1[0-2])")
_TAG = re.compile(r"(2[0-9])[.](0[1-9]|1[0-2])(?:-(.*))?")
_OFFICIAL: Final = "nvcr.io/nvidia/tritonserver"


@dataclass(frozen=True)
class Release:
    """The versions in the images of one release; None is unknown."""

    server: str
    """Triton's own version."""
    cuda: str | None
    python: str
    """Of the full image: what a Python model's packed environment must be made with."""
    tensorrt: str | None
    """Of the full image: what a TensorRT engine must be built with."""
    trtllm_tensorrt: str | None = None
    """Of the image with TensorRT-LLM, which brings a TensorRT of its own."""
    compute_capability: str | None = None
    """The least that the release supports."""


RELEASES: Final[dict[Month, Release]] = {
    (23, 10): Release("2.39.0", "12.2.2", "3.10", "8.6.1", None, "6.0"),
    (23, 11): Release("2.40.0", "12.3.0", "3.10", "8.6.1", None, "6.0"),
    (23, 12): Release("2.41.0", "12.3.2", "3.10", "8.6.1", None, "6.0"),
    (24, 1): Release("2.42.0", "12.3.2", "3.10", "8.6.1", None, "6.0"),
    (24, 2): Release("2.43.0", "12.3.2", "3.10", "8.6.3", None, "6.0"),
    (24, 3): Release("2.44.0", "12.4.0", "3.10", "8.6.3", None, "6.0"),
    (24, 4): Release("2.45.0", "12.4.1", "3.10", "8.6.3", "9.3.0", "6.0"),
    (24, 5): Release("2.46.0", "12.4.1", "3.10", "10.0.1", "10.0.1", "6.0"),
    (24, 6): Release("2.47.0", "12.5.0", "3.10", "10.1.0", "10.0.1", "6.0"),
    (24, 7): Release("2.48.0", "12.5.1", "3.10", "10.2.0", "10.1.0", "6.0"),
    (24, 8): Release("2.49.0", "12.6.0", "3.10", "10.3.0", "10.3.0"),
    (24, 9): Release("2.50.0", "12.6.1", "3.10", "10.4.0", "10.4.0"),
    (24, 10): Release("2.51.0", "12.6.2", "3.10", "10.5.0", "10.4.0"),
    (24, 11): Release("2.52.0", "12.6.3", "3.12", "10.6.0", "10.6.0"),
    (24, 12): Release("2.53.0", "12.6.3", "3.12", "10.7.0", "10.7.0"),
    (25, 1): Release("2.54.0", "12.8.0", "3.12", "10.8.0", "10.8.0"),
    (25, 2): Release("2.55.0", "12.8.0", "3.12", "10.8.0", "10.8.0"),
    (25, 3): Release("2.56.0", "12.8.1", "3.12", "10.9.0", "10.9.0", "7.5"),
    (25, 4): Release("2.57.0", "12.9.0", "3.12", "10.9.0", "10.9.0", "7.5"),
    (25, 5): Release("2.58.0", "12.9.0", "3.12", "10.10.0", "10.9.0", "7.5"),
    (25, 6): Release("2.59.0", "12.9.1", "3.12", "10.11.0", "10.10.0", "7.5"),
    (25, 7): Release("2.59.1", None, "3.12", None, "10.10.0", "7.5"),
    # TensorRT-LLM's docker/common/install_tensorrt.sh aligns with PyTorch's image of 25.08.
    (25, 8): Release("2.60.0", "13.0.0", "3.12", "10.13.2", "10.11.0", "7.5"),
    (25, 9): Release("2.61.0", "13.0.1", "3.12", None, "10.11.0", "7.5"),
    # compatibility.md: the image with TensorRT-LLM of 25.11 is made from PyTorch's of 25.10.
    (25, 10): Release("2.62.0", "13.0.2", "3.12", "10.13.3", "10.11.0", "7.5"),
    (25, 11): Release("2.63.0", "13.0.2", "3.12", None, "10.13.3", "7.5"),
    # compatibility.md: the image with TensorRT-LLM of 26.03 is made from PyTorch's of 25.12.
    (25, 12): Release("2.64.0", "13.1.0", "3.12", "10.14.1", "10.13.3", "7.5"),
    (26, 1): Release("2.65.0", "13.1.1", "3.12", None, "10.13.3", "7.5"),
    (26, 2): Release("2.66.0", "13.1.1", "3.12", None, "10.13.3", "7.5"),
    # Public projects that name the version in nvcr.io/nvidia/tensorrt:26.03-py3; 26.06-py3 and 26.08-py3 below.
    (26, 3): Release("2.67.0", "13.2.0", "3.12", "10.16.0", "10.14.1", "7.5"),
    (26, 4): Release("2.68.0", "13.2.1", "3.12", None, "10.14.1", "7.5"),
    # PyTorch's release notes of 26.05.
    (26, 5): Release("2.69.0", "13.2.1", "3.12", "10.16.1", "10.14.1", "7.5"),
    (26, 6): Release("2.70.0", "13.3.0", "3.12", "11.0.0", "10.14.1", "7.5"),
    (26, 7): Release("2.71.0", "13.3.1", "3.12", None, "10.14.1", "7.5"),
    (26, 8): Release("2.72.0", "13.4.1", "3.12", "11.2.1", None, "7.5"),
    (26, 9): Release("2.73.0", "13.4.1", "3.12", None, None, "7.5"),
    (26, 10): Release("2.74.0", None, "3.12", None, None, None),
}


class Feature(Enum):
    """What came with a later release than the oldest that Conch runs: its option, and the first release with it."""

    # core pull request 396 of October 2024; 24.10 takes the option and has no histogram (seen).
    HISTOGRAMS = ("--metrics-config=histogram_latencies", (24, 11))
    # server pull request 8061 of March 2025.
    GRPC_INFER_THREADS = ("--grpc-infer-thread-count", (25, 4))
    # server pull request 8174 of April 2025.
    HTTP_MAX_INPUT_SIZE = ("--http-max-input-size", (25, 6))
    # server pull request 8739 of April 2026, into the release's branch; off without the option since then.
    CLIENT_SHM = ("--allow-client-shm", (26, 4))

    @property
    def option(self) -> str:
        """The option of tritonserver."""
        return self.value[0]

    @property
    def since(self) -> Month:
        """The first release with it."""
        return self.value[1]


Variant = Literal["Full", "vLLM", "TensorRTLLM", "PyTorch", "TensorFlow", "Minimal", "ClientsOnly", "Other"]

_PLAIN: Final = frozenset({"Python", "Ensemble", "Auto"})

VARIANT_FORMATS: Final[dict[Variant, frozenset[str] | None]] = {
    "Full": _PLAIN | {"ONNX", "TensorRT", "PyTorch", "TensorFlow", "OpenVINO", "DALI"},
    "vLLM": _PLAIN | {"vLLM"},
    "TensorRTLLM": _PLAIN | {"TensorRTLLM"},
    "PyTorch": _PLAIN | {"PyTorch"},
    "TensorFlow": _PLAIN | {"TensorFlow"},
    "Minimal": None,
    "ClientsOnly": frozenset(),
    "Other": None,
}
"""Formats that NVIDIA's image of a variant can serve; None: not told by its name."""

_SUFFIXES: Final[dict[str, Variant]] = {
    "py3": "Full",
    "vllm-python-py3": "vLLM",
    "trtllm-python-py3": "TensorRTLLM",
    "pyt-python-py3": "PyTorch",
    "tf2-python-py3": "TensorFlow",
    "py3-min": "Minimal",
    "py3-sdk": "ClientsOnly",
}


@dataclass(frozen=True)
class ServerImage:
    """What an image's name, or `runtime.release`, tells of the Triton inside."""

    month: Month | None
    """The release; None when neither says it."""
    variant: Variant = "Other"
    """Which of NVIDIA's images it is; Other for all but those."""

    @property
    def facts(self) -> Release | None:
        """The release's versions; None when it is unknown or newer than the table."""
        return None if self.month is None else RELEASES.get(self.month)

    @property
    def name(self) -> str | None:
        """The release as NVIDIA writes it, such as 24.10."""
        return None if self.month is None else month_name(self.month)

    @property
    def tensorrt(self) -> str | None:
        """The version of TensorRT, three numbers; None when it is unknown or the image has none."""
        if self.facts is None or self.variant in {"vLLM", "ClientsOnly", "PyTorch", "TensorFlow"}:
            return None
        return self.facts.trtllm_tensorrt if self.variant == "TensorRTLLM" else self.facts.tensorrt

    def has(self, feature: Feature) -> bool | None:
        """Whether the release has it; None when the release is unknown."""
        return None if self.month is None else self.month >= feature.since


def month_name(month: Month) -> str:
    """A release as NVIDIA writes it: 24.10."""
    return f"{month[0]}.{month[1]:02}"


def release_of(image: str, release: str | None = None) -> ServerImage:
    """What an image reference and `runtime.release` tell; the release that the user states wins.

    Only the tag of a repository whose own name begins with `triton` is read as a release: other projects number their
    images by year and month as well.
    """
    path, _, tag = _without_digest(image).rpartition(":")
    if not path or "/" in tag:
        path, tag = _without_digest(image), ""
    match = _TAG.fullmatch(tag) if path.rpartition("/")[2].startswith("triton") else None
    variant: Variant = "Other"
    if match is not None and path == _OFFICIAL:
        variant = _SUFFIXES.get(match[3] or "", "Other")
    stated = _RELEASE.fullmatch(release or "")
    found = stated or match
    return ServerImage(None if found is None else (int(found[1]), int(found[2])), variant)


def _without_digest(image: str) -> str:
    return image.partition("@")[0]
