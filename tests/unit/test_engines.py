"""Which TensorRT engine runs in which image and on which device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.triton.engines import Engine, device_problem, version_problem

VERSIONS = st.lists(st.integers(0, 30), min_size=2, max_size=4).map(lambda parts: ".".join(map(str, parts)))


@pytest.mark.parametrize(
    ("built", "image", "compatible", "allowed", "says"),
    [
        # The very version, as far as both are known.
        ("10.5.0.18", "10.5.0.18", False, False, None),
        ("10.5", "10.5.0.18", False, False, None),
        ("10.5.0.18", "10.5.0", False, False, None),
        (None, "10.5.0", False, False, None),
        ("10.5.0", None, False, False, None),
        (None, None, False, False, None),
        # Another one: the engine does not load.
        ("10.5.0.18", "10.5.0.26", False, False, "built with TensorRT 10.5.0.18, and the image has 10.5.0.26"),
        ("10.3", "10.5.0", False, False, "build it again with 10.5.0, or set spec.runtime.image to a release"),
        ("10.5", "10.3.0", False, False, "and the image has 10.3.0"),
        ("8.6.1", "10.5.0", False, True, "and the image has 10.5.0"),
        # Version-compatible: later versions, and few steps across majors.
        ("10.3", "10.5.0", True, True, None),
        ("10.3", "10.5.0", True, False, "settings: {version-compatible: 'true'}"),
        ("10.5", "10.3.0", True, True, "10.3.0 of the image can't run"),
        ("8.6", "8.6.3", True, True, None),
        ("8.5", "8.6.3", True, True, "8.6.3 of the image can't run"),
        ("8.6", "9.2.0", True, True, None),
        ("8.6", "10.5.0", True, True, None),
        ("8.6", "11.2.1", True, True, "can't run"),
        ("9.2", "10.5.0", True, True, "can't run"),
        ("10.16", "11.2.1", True, True, None),
        ("11.0", "10.16.1", True, True, "can't run"),
        ("10.5", "10.5.0.18", True, False, None),
    ],
)
def test_row_80_an_engine_runs_with_the_version_that_built_it_or_compatibly_with_a_later_one(
    built: str | None, image: str | None, *, compatible: bool, allowed: bool, says: str | None
) -> None:
    problem = version_problem(Engine(built, version_compatible=compatible), image, backend_allows=allowed)
    if says is None:
        assert problem is None
    else:
        assert problem is not None
        assert says in problem
        assert built in problem  # type: ignore[operator]
        assert image in problem  # type: ignore[operator]


@pytest.mark.parametrize(
    ("engine", "device", "says"),
    [
        (Engine(compute_capability="8.6"), (8, 6), None),
        (Engine(compute_capability="8.6"), (8, 9), "built for compute capability 8.6, and the device has 8.9"),
        (Engine(compute_capability="8.6"), (7, 5), "and the device has 7.5"),
        (Engine(compute_capability="8.6"), None, None),
        (Engine(), (8, 9), None),
        (Engine(compute_capability="8.6", hardware="AmperePlus"), (12, 0), None),
        (Engine(compute_capability="8.6", hardware="AmperePlus"), (8, 0), None),
        (Engine(compute_capability="8.6", hardware="AmperePlus"), (7, 5), "8.0 and later, and the device has 7.5"),
        (Engine(compute_capability="8.6", hardware="SameComputeCapability"), (8, 6), None),
        (Engine(compute_capability="8.6", hardware="SameComputeCapability"), (8, 9), "the device has 8.9"),
        (Engine(compute_capability="10.0"), (10, 3), "built for compute capability 10.0"),
    ],
)
def test_row_80_an_engine_runs_on_the_capability_that_built_it_or_from_ampere_on(
    engine: Engine, device: tuple[int, int] | None, says: str | None
) -> None:
    problem = device_problem(engine, device)
    assert problem is None if says is None else says in str(problem)


@given(built=VERSIONS, image=VERSIONS, compatible=st.booleans(), allowed=st.booleans())
def test_row_80_what_runs_without_compatibility_runs_with_it_and_never_the_other_way_round_in_time(
    built: str, image: str, *, compatible: bool, allowed: bool
) -> None:
    plain = version_problem(Engine(built), image)
    problem = version_problem(Engine(built, version_compatible=compatible), image, backend_allows=allowed)
    assert plain is not None or problem is None
    known = min(built.count("."), image.count(".")) + 1
    older = [int(part) for part in image.split(".")][:known] < [int(part) for part in built.split(".")][:known]
    assert problem is not None or not older
