"""The steps of a reconcile that write children: claim names, apply, prune. I/O through the client given."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from conch import names
from conch.api.conditions import Reason
from conch.kube.client import RESOURCE_BY_KIND
from conch.kube.errors import Conflict, Invalid
from conch.reconcile.errors import Stalled, Waiting
from conch.workload.desired import first_difference

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from conch.kube.client import Resource

Object = dict[str, Any]

MAX_REPAIRS: Final = 3
REPAIR_WINDOW_S: Final = 60.0
REMEMBERED: Final = 1000
PODS_NEED: Final = frozenset({"ServiceAccount", "NetworkPolicy", "ResourceClaimTemplate"})
NAMED_BY_PODS: Final = frozenset({"ResourceClaimTemplate", "ServiceAccount"})
"""Kinds that a pod template names: a pod of an old revision that starts again needs its own."""
OPTIONAL: Final = frozenset({"PodMonitor"}) | NAMED_BY_PODS
"""Kinds of which a service may want no child any more."""
OLD_OWNER_RETRY_S: Final = 2.0


class Kube(Protocol):
    """The verbs that these steps use."""

    async def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """One object, read live."""

    async def apply(self, body: Object, *, manager: str) -> Object:
        """Server-side apply."""

    async def merge(self, body: Object, *, manager: str) -> Object:
        """JSON merge patch."""

    async def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str, resource_version: str | None
    ) -> bool:
        """Delete with preconditions."""


class Cache(Protocol):
    """Where the answers of writes go, so that the next reconcile reads them."""

    def put(self, obj: Object) -> bool:
        """Store an object."""

    def remove(self, obj: Object) -> bool:
        """Forget an object."""


@dataclass
class RepairLimit:
    """At most three repairs of a child a minute: two controllers that disagree must not fight in a loop."""

    clock: Callable[[], float]
    _repairs: dict[str, deque[float]] = field(default_factory=dict)

    def allows(self, uid: str) -> bool:
        """Whether one more repair is in order now; if so it is counted."""
        now = self.clock()
        if len(self._repairs) > REMEMBERED:
            self._repairs = {u: times for u, times in self._repairs.items() if now - times[-1] < REPAIR_WINDOW_S}
        times = self._repairs.setdefault(uid, deque(maxlen=MAX_REPAIRS))
        if len(times) == MAX_REPAIRS and now - times[0] < REPAIR_WINDOW_S:
            return False
        times.append(now)
        return True


def owned_by(child: Mapping[str, Any], uid: str) -> bool:
    """Whether the object's controller is the resource with this uid."""
    owners = child["metadata"].get("ownerReferences") or []
    return any(owner.get("controller") and owner.get("uid") == uid for owner in owners)


def live_child(children: Mapping[str, list[Object]], wanted: Mapping[str, Any]) -> Object | None:
    """The cached child that a wanted object would be applied to."""
    name = wanted["metadata"]["name"]
    return next((item for item in children.get(wanted["kind"], []) if item["metadata"]["name"] == name), None)


async def check_names(
    kube: Kube,
    service: Object,
    wanted: Iterable[Mapping[str, Any]],
    children: Mapping[str, list[Object]],
    *,
    just_checked: bool = False,
) -> dict[str, list[Object]]:
    """Refuse to write anything while a name is another's (R5); the children, with those that the cache doesn't show.

    What the cache shows as ours needs no look; everything else is read live, since an object without our labels is in
    no watch. Taken for missing, our own Deployment would be made anew over the live one, with its replicas reset (R1)
    and new images (R7). With `just_checked`, what is not in the cache is taken for missing without a look.
    """
    uid, namespace = service["metadata"]["uid"], service["metadata"]["namespace"]
    wanted = list(wanted)
    unknown = [] if just_checked else [child for child in wanted if live_child(children, child) is None]
    found = await asyncio.gather(
        *(kube.get(RESOURCE_BY_KIND[child["kind"]], namespace, child["metadata"]["name"]) for child in unknown)
    )
    cached = [live for child in wanted if (live := live_child(children, child)) is not None]
    for live in [*cached, *(item for item in found if item is not None)]:
        if owned_by(live, uid) or _lost_its_owner(live, service["metadata"]["name"]):
            continue
        kind, name = live["kind"], live["metadata"]["name"]
        if owner_name(live) not in {None, service["metadata"]["name"]}:
            raise Stalled(
                Reason.NAME_CONFLICT,
                f"{kind} {name} belongs to the InferenceService {owner_name(live)}: rename metadata.name.",
            )
        if owner_name(live) is not None:
            # The children of a predecessor of the same name; the garbage collector is on its way.
            raise Waiting(
                Reason.NAME_CONFLICT,
                f"{kind} {name} belongs to a deleted InferenceService of this name and is being removed.",
                OLD_OWNER_RETRY_S,
            )
        raise Stalled(
            Reason.NAME_CONFLICT,
            f"{kind} {name} exists and isn't Conch's: rename metadata.name, or delete the {kind}.",
        )
    every = {kind: list(items) for kind, items in children.items()}
    for live in found:
        if live is not None:
            every.setdefault(live["kind"], []).append(live)
    return every


def _lost_its_owner(live: Mapping[str, Any], service: str) -> bool:
    """Whether the object is marked as this service's child and has no controller at all.

    A hand edit took it away, or the service was deleted without its children and made again: it is taken back.
    """
    metadata = live["metadata"]
    controlled = any(owner.get("controller") for owner in metadata.get("ownerReferences") or [])
    return not controlled and names.child_labels(service).items() <= (metadata.get("labels") or {}).items()


def owner_name(live: Mapping[str, Any]) -> str | None:
    """The InferenceService that is the object's controller, of whatever version of the API; None if it has none."""
    for owner in live["metadata"].get("ownerReferences") or []:
        group = str(owner.get("apiVersion", "")).partition("/")[0]
        if owner.get("controller") and owner.get("kind") == names.SERVICE_KIND and group == names.GROUP:
            return str(owner.get("name"))
    return None


@dataclass(frozen=True)
class Applied:
    """What applying the children did."""

    written: tuple[Object, ...]
    repaired: tuple[str, ...]
    """What was put back, as `Service demo: spec.ports[http].port`."""
    postponed: bool
    """Whether a repair waits because too many were made in the last minute."""
    unfinished: bool
    """Whether children of a new service are left to the next pass."""


async def apply_children(
    kube: Kube,
    cache: Cache,
    wanted: list[Object],
    children: Mapping[str, list[Object]],
    *,
    limit: RepairLimit,
    last: Callable[[Object], Awaitable[Object]],
) -> Applied:
    """Apply what differs: first everything that pods need, then, with `last`, the Deployment.

    Of a new service only these; the rest takes another turn in the queue, so that among a thousand new services the
    first GPU is asked for before the last Service is made, not after.
    """
    changes, repaired, postponed = [], [], False
    for child in wanted:
        live = live_child(children, child)
        difference = "" if live is None else first_difference(live, child)
        if difference is None:
            continue
        if live is not None and _digest(live) == _digest(child):
            if not limit.allows(live["metadata"]["uid"]):
                postponed = True
                continue
            repaired.append(f"{child['kind']} {child['metadata']['name']}: {difference}")
        changes.append(child)
    deployment = next((child for child in changes if child["kind"] == "Deployment"), None)
    if deployment is not None and live_child(children, deployment) is None:
        urgent = [child for child in changes if child["kind"] in PODS_NEED or child is deployment]
        unfinished, changes = len(urgent) < len(changes), urgent
    else:
        unfinished = False
    before = [child for child in changes if child["kind"] != "Deployment"]
    written = list(await _all(put(kube, child, live_child(children, child)) for child in before))
    written += [await last(child) for child in changes if child["kind"] == "Deployment"]
    for child in written:
        cache.put(child)
    return Applied(tuple(written), tuple(repaired), postponed, unfinished)


async def put(kube: Kube, child: Object, live: Object | None) -> Object:
    """Apply one child, also over a hand edit that an apply alone can't undo.

    A list whose items have a key keeps those of other keys: where a person changed port 8000 to 8888, ours would be a
    second port of the same name, which the server refuses. Then the lists are replaced whole, and applied again.
    """
    try:
        return await kube.apply(child, manager=names.WORKLOAD_MANAGER)
    except Invalid:
        if live is None:
            raise
        identity = {key: live["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")}
        await kube.merge({**child, "metadata": identity}, manager=names.WORKLOAD_MANAGER)
        unfenced = {key: value for key, value in child["metadata"].items() if key != "resourceVersion"}
        return await kube.apply({**child, "metadata": unfenced}, manager=names.WORKLOAD_MANAGER)


async def _all(calls: Iterable[Awaitable[Object]]) -> list[Object]:
    # Every call ends before the first error is raised: a cancelled write may have happened without our knowing.
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def prune(
    kube: Kube, cache: Cache, service: Object, wanted: list[Object], children: Mapping[str, list[Object]]
) -> list[str]:
    """Delete children that are no longer wanted: only ours, and only as they were seen (R6)."""
    keep = {(child["kind"], child["metadata"]["name"]) for child in wanted}
    kinds = {child["kind"] for child in wanted} | OPTIONAL
    removed = []
    for kind in sorted(kinds & children.keys()):
        for live in children[kind]:
            metadata = live["metadata"]
            if (kind, metadata["name"]) in keep or not owned_by(live, service["metadata"]["uid"]):
                continue
            if "deletionTimestamp" in metadata:
                continue
            try:
                await kube.delete(
                    RESOURCE_BY_KIND[kind],
                    metadata["namespace"],
                    metadata["name"],
                    uid=metadata["uid"],
                    resource_version=metadata["resourceVersion"],
                )
            except Conflict:
                continue  # it changed since it was seen; the event of that change brings us back
            cache.remove(live)
            removed.append(f"{kind} {metadata['name']}")
    return removed


def _digest(child: Mapping[str, Any]) -> str | None:
    annotations: Mapping[str, str] = child["metadata"].get("annotations") or {}
    return annotations.get(names.DESIRED_ANNOTATION)
