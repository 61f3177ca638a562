"""kopf is an event source and nothing else: what is registered, and with which settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import prometheus_client
import pytest

from conch.config import Settings
from conch.kube.cache import Cache
from conch.kube.client import NODES, POD_MONITORS, PODS, SCALED_OBJECTS, Resource
from conch.kube.connection import Connection
from conch.kube.watch import SILENT_AFTER_S, Watch, WatchedKind, kopf_settings, watched_kinds

if TYPE_CHECKING:
    from conch.kube.client import Kube


class FakeKube:
    """Serves every kind but the optional ones of `absent`; each LIST is empty."""

    def __init__(self, absent: tuple[Resource, ...] = ()) -> None:
        self.absent = absent
        self.listed: list[tuple[str, str | None, str | None]] = []

    async def has_resource(self, resource: Resource) -> bool:
        return resource not in self.absent

    async def list(
        self, resource: Resource, namespace: str | None = None, *, label_selector: str | None = None, kept: Any = None
    ) -> tuple[list[dict[str, Any]], str]:
        assert kept is not None
        self.listed.append((resource.kind, namespace, label_selector))
        return [], "1"


def make_watch(kube: FakeKube, settings: Settings | None = None, clock: Any = None) -> Watch:
    settings = settings or Settings()
    return Watch(
        Cache(),
        lambda _, __: None,
        kube=cast("Kube", kube),
        connection=Connection.to("http://127.0.0.1:1"),
        settings=settings,
        kinds=watched_kinds(settings),
        fatal=pytest.fail,
        registry=prometheus_client.CollectorRegistry(),
        clock=clock or (lambda: 0.0),
    )


async def test_the_registry_holds_event_handlers_and_a_login_and_nothing_else() -> None:
    watch = make_watch(FakeKube())
    await watch.prime()
    registry = watch.registry()
    kinds = {kind.resource for kind in watched_kinds(Settings())}
    watched = registry._watching.get_all_handlers()
    assert {(handler.selector.group, handler.selector.plural) for handler in watched if handler.selector} == {
        (kind.api_version.rpartition("/")[0], kind.plural) for kind in kinds
    }
    assert [handler.id for handler in registry._activities.get_all_handlers()] == ["Watch.registry.<locals>.login"]
    for writing in (registry._indexing, registry._spawning, registry._changing, registry._webhooks):
        assert list(writing.get_all_handlers()) == []


async def test_every_child_kind_is_selected_on_the_server() -> None:
    kube = FakeKube()
    await make_watch(kube).prime()
    selectors = {kind: selector for kind, _, selector in kube.listed}
    unselected = {kind for kind, selector in selectors.items() if selector is None}
    assert unselected == {"InferenceService", "HorizontalPodAutoscaler", "ScaledObject", "Node"}
    assert set(selectors.values()) == {None, "app.kubernetes.io/managed-by=conch"}
    settings = kopf_settings(watched_kinds(Settings()))
    assert len(settings.watching.label_selectors) == len(selectors) - len(unselected)


async def test_optional_kinds_are_watched_only_where_they_exist() -> None:
    kube = FakeKube(absent=(SCALED_OBJECTS, POD_MONITORS))
    watch = make_watch(kube)
    await watch.prime()
    assert not {"ScaledObject", "PodMonitor"} & {kind for kind, _, _ in kube.listed}
    assert not {"ScaledObject", "PodMonitor"} & set(watch.ages())


async def test_in_namespaced_mode_nothing_cluster_scoped_is_read() -> None:
    kube = FakeKube()
    settings = Settings(watch_namespaces=("team", "other"))
    await make_watch(kube, settings).prime()
    assert {namespace for _, namespace, _ in kube.listed} == {"team", "other"}
    assert NODES not in {kind.resource for kind in watched_kinds(settings)}


def test_kopf_writes_nothing_scans_nothing_and_outlives_an_outage() -> None:
    settings = kopf_settings([WatchedKind(PODS, "a=b")])
    assert not settings.posting.enabled
    assert settings.scanning.disabled
    # The API server parses an integer here, and refuses "300.0".
    assert str(settings.watching.server_timeout).isdecimal()
    delays = iter(cast("Any", settings.networking.error_backoffs))
    assert [next(delays) for _ in range(8)] == [1, 1, 2, 3, 5, 10, 10, 10]


async def test_row_54_a_watch_that_was_never_opened_is_silent_in_the_end() -> None:
    now = [0.0]
    watch = make_watch(FakeKube(), clock=lambda: now[0])
    await watch.prime()
    for kind in watch._served:
        for path in watch._paths(kind.resource):
            watch._alive_at[path] = 0.0
    now[0] = SILENT_AFTER_S - 1
    assert watch.silent() == []
    watch._opened("/api/v1/pods", watch=True)
    now[0] = SILENT_AFTER_S + 1
    assert "Pod" not in watch.silent()
    assert "Deployment" in watch.silent()
    assert watch.ages()["Pod"] == 2
