"""What is known of Triton's releases, and what an image's name tells."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.config import Settings
from conch.triton.backends import BACKENDS
from conch.triton.releases import OLDEST, RELEASES, VARIANT_FORMATS, Feature, Month, Variant, month_name, release_of

NVIDIA = "nvcr.io/nvidia/tritonserver"


@pytest.mark.parametrize(
    ("image", "stated", "month", "variant"),
    [
        (f"{NVIDIA}:24.10-py3", None, (24, 10), "Full"),
        (f"{NVIDIA}:24.10-vllm-python-py3", None, (24, 10), "vLLM"),
        (f"{NVIDIA}:25.01-trtllm-python-py3", None, (25, 1), "TensorRTLLM"),
        (f"{NVIDIA}:24.10-py3-sdk", None, (24, 10), "ClientsOnly"),
        (f"{NVIDIA}:24.10-py3-igpu", None, (24, 10), "Other"),
        (f"{NVIDIA}:24.10", None, (24, 10), "Other"),
        (f"{NVIDIA}:24.10-py3@sha256:{'0' * 64}", None, (24, 10), "Full"),
        (f"{NVIDIA}@sha256:{'0' * 64}", None, None, "Other"),
        (f"{NVIDIA}@sha256:{'0' * 64}", "24.10", (24, 10), "Other"),
        ("registry.example:5000/tritonserver:24.10-py3", None, (24, 10), "Other"),
        ("registry.example:5000/team/triton-own:25.03-7", None, (25, 3), "Other"),
        ("registry.example:5000/tritonserver", None, None, "Other"),
        ("registry.example/pytorch:24.10-py3", None, None, "Other"),
        ("registry.example/serving:24.10", "25.01", (25, 1), "Other"),
        (f"{NVIDIA}:24.10-py3", "25.01", (25, 1), "Full"),
        (f"{NVIDIA}:24.13-py3", None, None, "Other"),
        (f"{NVIDIA}:latest", None, None, "Other"),
        (f"{NVIDIA}:124.10-py3", None, None, "Other"),
        ("tritonserver:26.04-py3", None, (26, 4), "Other"),
    ],
)
def test_an_images_name_tells_the_release(
    image: str, stated: str | None, month: Month | None, variant: Variant
) -> None:
    found = release_of(image, stated)
    assert (found.month, found.variant) == (month, variant)
    assert found.name == (None if month is None else month_name(month))


@given(st.text(alphabet="triton/:@.-0123456789", max_size=60))
def test_no_image_name_is_an_error(image: str) -> None:
    release_of(image)


def test_the_table_has_every_month_and_versions_that_only_grow() -> None:
    months = sorted(RELEASES)
    wanted = [
        (year, month) for year in range(23, 27) for month in range(1, 13) if (23, 10) <= (year, month) <= (26, 10)
    ]
    assert months == wanted
    for values in (
        [RELEASES[month].server for month in months],
        [found for month in months if (found := RELEASES[month].cuda) is not None],
        [found for month in months if (found := RELEASES[month].tensorrt) is not None],
        [found for month in months if (found := RELEASES[month].trtllm_tensorrt) is not None],
    ):
        assert all(re.fullmatch(r"[0-9]+[.][0-9]+[.][0-9]+", value) for value in values)
        numbers = [tuple(map(int, value.split("."))) for value in values]
        assert numbers == sorted(numbers)


def test_the_release_that_runs_here_is_what_it_says_itself() -> None:
    assert RELEASES[24, 10].server == "2.51.0"


@pytest.mark.parametrize(
    ("image", "tensorrt"),
    [
        (f"{NVIDIA}:24.10-py3", "10.5.0"),
        (f"{NVIDIA}:24.10-trtllm-python-py3", "10.4.0"),
        (f"{NVIDIA}:24.10-vllm-python-py3", None),
        ("registry.example/tritonserver:24.10-py3", "10.5.0"),
        (f"{NVIDIA}:26.09-py3", None),
        (f"{NVIDIA}:29.01-py3", None),
        ("registry.example/own:1", None),
    ],
)
def test_the_version_of_tensorrt_is_the_images_or_unknown(image: str, tensorrt: str | None) -> None:
    assert release_of(image).tensorrt == tensorrt


@pytest.mark.parametrize("feature", Feature)
def test_a_feature_is_there_since_its_release_and_unknown_without_one(feature: Feature) -> None:
    year, month = feature.since
    before = (year, month - 1) if month > 1 else (year - 1, 12)
    assert before >= OLDEST
    assert release_of(f"{NVIDIA}:{month_name(feature.since)}-py3").has(feature) is True
    assert release_of(f"{NVIDIA}:{month_name(before)}-py3").has(feature) is False
    assert release_of(f"{NVIDIA}:29.01-py3").has(feature) is True
    assert release_of("registry.example/own:1").has(feature) is None


def test_the_variants_name_formats_that_there_are() -> None:
    assert all(formats <= BACKENDS.keys() for formats in VARIANT_FORMATS.values() if formats is not None)


def test_the_default_image_is_of_a_release_in_the_table() -> None:
    assert release_of(Settings().triton_image).facts is not None
