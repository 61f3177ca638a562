"""pytest plugin: `--cluster`, and the fixtures that give a test its cluster. One cluster runs at a time."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING

import pytest

from operators import LocalOperator, grant_own_role, hurry_operator, install_operator
from sandbox import Sandbox, leftovers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sandbox import AnyRegion, Region
    from sandbox.kind import KindSandbox


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cluster", default="sandbox", choices=("sandbox", "kind"), help="what the scenarios run on (default: sandbox)"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with clusters of their own go ahead of those that share the run's, which would have to end for them."""
    shared = next((at for at, item in enumerate(items) if item.get_closest_marker("sandbox")), len(items))
    own = [item for item in items if item.get_closest_marker("own_cluster")]
    rest = [item for item in items if not item.get_closest_marker("own_cluster")]
    items[:] = [*rest[:shared], *own, *rest[shared:]]


class Clusters:
    """The run's clusters; asking for one kind ends the other, since two cores hold only one.

    With `--cluster=kind` what needs nodes runs there; control planes without nodes are the sandbox's all the same.
    """

    def __init__(self, kind: str) -> None:
        self.on_kind = kind == "kind"
        self._run = f"tests-{os.getpid()}"
        self.sandbox: Sandbox | None = None
        self.operator_installed = False
        self.operator_is_quick = False
        self._kind: KindSandbox | None = None
        self._nodes = False
        self._at_down: list[Callable[[], None]] = []

    def at_down(self, callback: Callable[[], None]) -> None:
        """Call this once, before the present cluster ends: what runs in its network must end first."""
        self._at_down.append(callback)

    def region(self, *, nodes: bool) -> AnyRegion:
        """A running region, with a kubelet or as a control plane only."""
        if not (nodes and self.on_kind):
            return self._local(nodes=nodes).region()
        if self._kind is None:
            from sandbox.kind import KindSandbox

            self.down()
            self._kind = KindSandbox.up(self._run)
        return self._kind.region()

    def control_plane(self) -> Region:
        """A running control plane only."""
        return self._local(nodes=False).region()

    def _local(self, *, nodes: bool) -> Sandbox:
        if self.sandbox is None or self._nodes != nodes:
            self.down()
            self.sandbox = Sandbox.up(self._run, nodes=nodes, owner=os.getpid())
            self._nodes = nodes
        return self.sandbox

    def down(self) -> None:
        """End what runs; it must leave nothing."""
        while self._at_down:
            self._at_down.pop()()
        self.operator_installed = self.operator_is_quick = False
        if self._kind is not None:
            self._kind.down()
            self._kind = None
        if self.sandbox is not None:
            self.sandbox.down(keep_logs=False)
            self.sandbox = None
            left = leftovers(self._run)
            assert left == [], f"the cluster left behind: {left}"


@pytest.fixture(scope="session")
def clusters(request: pytest.FixtureRequest) -> Iterator[Clusters]:
    """Every cluster of this test run."""
    clusters = Clusters(request.config.getoption("--cluster"))
    yield clusters
    clusters.down()


@pytest.fixture(scope="module")
def control_plane(clusters: Clusters) -> Region:
    """etcd, kube-apiserver and controller-manager: no node, so no pod ever runs. Conch's CRDs and role are there."""
    region = clusters.control_plane()
    grant_own_role(region)
    return region


@pytest.fixture(scope="module")
def sandbox(clusters: Clusters) -> Sandbox:
    """The whole local cluster, with a kubelet, Triton images and Prometheus; for tests of that cluster itself."""
    if clusters.on_kind:
        pytest.skip("is about the sandbox's namespaces of this machine, which kind's cluster isn't made of")
    clusters.region(nodes=True)
    assert clusters.sandbox is not None
    return clusters.sandbox


@pytest.fixture
def region(clusters: Clusters) -> Iterator[AnyRegion]:
    """Its first region, all GPUs healthy and none taken away; the test is in its network."""
    region = clusters.region(nodes=True)
    region.gpus.reset(region.gpu_count)
    with region.network():
        yield region


@pytest.fixture
def operator(region: AnyRegion, clusters: Clusters) -> AnyRegion:
    """The region with the operator installed from manifests/, as a user installs it."""
    if not clusters.operator_installed:
        install_operator(region)
        clusters.operator_installed = True
    return region


@pytest.fixture
def quick_operator(operator: AnyRegion, clusters: Clusters) -> AnyRegion:
    """The same with short ticks and windows, as fits Prometheus' scrapes once a second here."""
    if not clusters.operator_is_quick:
        hurry_operator(operator)
        clusters.operator_is_quick = True
    return operator


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the test's own; deleted afterwards without waiting."""
    name = "control_plane" if "control_plane" in request.fixturenames else "region"
    region: AnyRegion = request.getfixturevalue(name)
    namespace = f"t-{uuid.uuid4().hex[:8]}"
    region.kubectl("create", "namespace", namespace)
    yield namespace
    region.kubectl("delete", "namespace", namespace, "--wait=false", "--ignore-not-found")


@pytest.fixture
def start_operator(control_plane: Region, tmp_path: Path) -> Iterator[Callable[..., LocalOperator]]:
    """Start operators as processes under the operator's own role; they end with the test."""
    started: list[LocalOperator] = []

    def start(identity: str = "operator-0", **options: object) -> LocalOperator:
        operator = LocalOperator(control_plane, tmp_path, identity=identity, **options)  # type: ignore[arg-type]
        started.append(operator)
        operator.start()
        return operator

    yield start
    for operator in started:
        operator.stop()
