"""What the tests on a real API server share: one control plane, one proxy, one operator that leads."""

from __future__ import annotations

import contextlib
import uuid
from typing import TYPE_CHECKING, Any

import long_stories as long_stories_
import pytest
from apiserver import ApiServer, Refused
from fault_proxy import FaultProxy

from operators import LocalOperator, wait_established, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from long_stories import LongStories

    from clusters import Clusters
    from sandbox import Region

LEADS_LIMIT_S = 60.0
SETTINGS = {"CONCH_TICK_S": "0.5"}
FOREIGN_KINDS = (
    ("monitoring.coreos.com", "v1", "PodMonitor", "podmonitors"),
    ("keda.sh", "v1alpha1", "ScaledObject", "scaledobjects"),
)


def foreign_crd(group: str, version: str, kind: str, plural: str) -> dict[str, Any]:
    """Somebody else's CRD, without its schema."""
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [{"name": version, "served": True, "storage": True, "schema": schema}],
        },
    }


class Shared:
    """The operator that most tests use, behind the proxy. Tests with operators of their own stop it first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.region: Region | None = None
        self.proxy: FaultProxy | None = None
        self.operator: LocalOperator | None = None
        self.stories: LongStories | None = None

    def enter(self, region: Region, at_down: Callable[[Callable[[], None]], None]) -> FaultProxy:
        """The proxy in front of this region, with the foreign CRDs in place."""
        if self.proxy is None:
            self.region = region
            region.apply([foreign_crd(*kind) for kind in FOREIGN_KINDS])
            wait_established(region)
            self.proxy = FaultProxy(region).__enter__()
            at_down(self.leave)
        return self.proxy

    def lead(self) -> LocalOperator:
        """The operator, running and leading."""
        assert self.region is not None
        assert self.proxy is not None
        if self.operator is None or not self.operator.running():
            server = self.proxy.address("shared")
            self.operator = LocalOperator(
                self.region, self._folder, identity="shared", server=server, settings=SETTINGS
            )
            self.operator.start()
            wait_until(self.operator.leads, LEADS_LIMIT_S, "the shared operator to lead")
        return self.operator

    def begin(self) -> LongStories:
        """The long stories; they begin once."""
        self.lead()
        if self.stories is None:
            assert self.region is not None
            assert self.proxy is not None
            self.stories = long_stories_.begin(self.region, self.proxy)
        return self.stories

    def stop(self) -> None:
        """End the operator; it gives its Lease back."""
        if self.operator is not None:
            self.operator.stop()
            self.operator = None

    def leave(self) -> None:
        """Before the control plane goes."""
        if self.stories is not None:
            self.stories.fight.rival.stop()
            self.stories = None
        self.stop()
        if self.proxy is not None:
            self.proxy.__exit__(None, None, None)
        self.proxy = self.region = None


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """One for the whole run."""
    return Shared(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def proxy(control_plane: Region, clusters: Clusters, shared: Shared) -> FaultProxy:
    """The proxy in front of the API server."""
    return shared.enter(control_plane, clusters.at_down)


@pytest.fixture(scope="module")
def api(control_plane: Region, proxy: FaultProxy) -> Iterator[ApiServer]:
    """The API server as the administrator sees it. (The proxy comes with it, since it brings the foreign CRDs.)"""
    del proxy
    api = ApiServer(control_plane)
    yield api
    api.close()


@pytest.fixture(scope="module")
def leader(request: pytest.FixtureRequest, api: ApiServer, shared: Shared) -> LocalOperator:
    """The shared operator: it runs, leads, and speaks through the proxy as `shared`.

    The long stories begin with it if a test of this run will want to know how they end.
    """
    del api
    if any("long_stories" in getattr(item, "fixturenames", ()) for item in request.session.items):
        shared.begin()
    return shared.lead()


@pytest.fixture
def long_stories(api: ApiServer, shared: Shared) -> LongStories:
    """What has been going on beside the other tests."""
    del api
    return shared.begin()


@pytest.fixture
def no_leader(api: ApiServer, shared: Shared) -> None:
    """No operator runs."""
    del api
    shared.stop()


@pytest.fixture
def namespace(api: ApiServer) -> Iterator[str]:
    """A namespace of the test's own; deleted afterwards without waiting."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    api.create_namespace(name)
    yield name
    with contextlib.suppress(Refused):
        api.delete_namespace(name)


@pytest.fixture
def start(
    control_plane: Region, proxy: FaultProxy, no_leader: None, tmp_path: Path
) -> Iterator[Callable[..., LocalOperator]]:
    """Start operators of the test's own behind the proxy, which knows them by their identity."""
    del no_leader
    started: list[LocalOperator] = []

    def start(identity: str = "operator-0", *, lead: bool = True, **settings: str) -> LocalOperator:
        operator = LocalOperator(
            control_plane,
            tmp_path,
            identity=identity,
            server=proxy.address(identity),
            settings={**SETTINGS, **settings},
        )
        started.append(operator)
        operator.start()
        if lead:
            wait_until(operator.leads, LEADS_LIMIT_S, f"{identity} to lead")
        return operator

    yield start
    for operator in started:
        operator.stop()
