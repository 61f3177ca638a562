"""The cluster as last seen, in memory: filled by watch events and by our own LISTs. No I/O; one event loop, no locks.

What it returns is shared: callers read it and never change it.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from conch.names import MANAGED_BY, MANAGED_BY_LABEL, SERVICE_LABEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

Object = dict[str, Any]
Objects = list[Object]

_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_SHARED_LENGTH = 64


class Change(NamedTuple):
    """An object that a LIST brought, altered or showed to be gone."""

    obj: Object
    deleted: bool


@dataclass(slots=True)
class _Entry:
    obj: Object
    seen_at: float


class _Gone(NamedTuple):
    """A uid that was removed: when that was seen, and the object's resourceVersion then."""

    at: float
    version: str


class Cache:
    """Objects by kind, namespace and name ("" for cluster-scoped ones), and children by service."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds: dict[str, dict[str, dict[str, _Entry]]] = {}
        self._children: dict[tuple[str, str], dict[str, dict[str, Object]]] = {}
        self._owners: dict[tuple[str, str], dict[str, str]] = {}
        self._gone: dict[str, dict[str, _Gone]] = {}

    def put(self, obj: Object) -> bool:
        """Store what an event or an answer to a write shows; true if that differs from what was stored."""
        return self._store(obj, self._clock())

    def remove(self, obj: Object) -> bool:
        """Forget a deleted object; true if it was stored. A successor of the same name stays."""
        kind, namespace, name, uid = _identity(obj)
        # A LIST that started before the deletion still carries the object and must not bring it back.
        version = obj["metadata"].get("resourceVersion", "")
        self._gone.setdefault(kind, {})[uid] = _Gone(self._clock(), version)
        entry = self._entry(kind, namespace, name)
        if entry is None or entry.obj["metadata"].get("uid", "") != uid:
            return False
        self._drop(kind, namespace, name)
        return True

    def replace(
        self, kind: str, namespaces: Sequence[str] | None, listed_items: Iterable[Object], list_started_at: float
    ) -> list[Change]:
        """Reconcile one kind with a LIST that began at `list_started_at` (this cache's clock), all namespaces if None.

        Whatever was seen since then wins over the LIST. What is older and absent is a ghost: kopf lists again after
        a 410 without telling what vanished meanwhile (R3).
        """
        changes: list[Change] = []
        listed: set[tuple[str, str]] = set()
        gone = self._gone.get(kind, {})
        for item in listed_items:
            _, namespace, name, _ = _identity(item)
            listed.add((namespace, name))
            entry = self._entry(kind, namespace, name)
            if entry is not None and entry.seen_at > list_started_at:
                continue
            if self._store(item, list_started_at):
                changes.append(Change(self._kinds[kind][namespace][name].obj, deleted=False))
        for namespace, name, entry in list(self._entries(kind, namespaces)):
            if (namespace, name) not in listed and entry.seen_at < list_started_at:
                self._drop(kind, namespace, name)
                changes.append(Change(entry.obj, deleted=True))
        self._gone[kind] = {uid: left for uid, left in gone.items() if left.at >= list_started_at}
        return changes

    def slim(self, listed: Object) -> Object:
        """What `replace` needs of a listed object, so that the rest is dropped on arrival: what is known is there."""
        kind, namespace, name, uid = _identity(listed)
        version = listed["metadata"].get("resourceVersion")
        entry = self._entry(kind, namespace, name)
        if entry is not None:
            known = entry.obj["metadata"]
            if known.get("uid", "") == uid and known.get("resourceVersion") == version:
                return entry.obj
        return slim(listed)

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """One object, or None."""
        entry = self._entry(kind, namespace, name)
        return None if entry is None else entry.obj

    def list(self, kind: str, namespace: str | None = None) -> Objects:
        """All objects of a kind, of one namespace or of all."""
        return [entry.obj for _, _, entry in self._entries(kind, None if namespace is None else (namespace,))]

    def children(self, namespace: str, service: str) -> dict[str, Objects]:
        """What carries the service's label and ours, by kind."""
        return {kind: list(objects.values()) for kind, objects in self._children.get((namespace, service), {}).items()}

    def replicas_owners(self, namespace: str, name: str) -> dict[str, str]:
        """Field managers of a Deployment's `spec.replicas`, as `replicas_owners` gives them; empty if unknown."""
        return dict(self._owners.get((namespace, name), {}))

    def __len__(self) -> int:
        """How many objects are stored."""
        return sum(len(objects) for namespaces in self._kinds.values() for objects in namespaces.values())

    def count(self, kind: str) -> int:
        """How many objects of a kind are stored."""
        return sum(len(objects) for objects in self._kinds.get(kind, {}).values())

    def _store(self, obj: Object, seen_at: float) -> bool:
        kind, namespace, name, uid = _identity(obj)
        metadata = obj["metadata"]
        entry = self._entry(kind, namespace, name)
        version, gone = metadata.get("resourceVersion", ""), self._gone.get(kind, {})
        if uid and uid in gone:
            # An object that lost our label was only out of sight; when it gets it back, it is newer than it was then.
            if not _newer(version, than=gone[uid].version):
                return False
            del gone[uid]
        if entry is not None:
            known = entry.obj["metadata"]
            if known.get("uid", "") == uid and known.get("resourceVersion") == version:
                entry.seen_at = max(entry.seen_at, seen_at)
                return False
            # The answer to a write is here before the events of what happened ahead of it.
            if known.get("uid", "") == uid and _newer(known.get("resourceVersion", ""), than=version):
                return False
            # kopf orders the events of one uid only: a predecessor's last can come after its successor's first.
            if known.get("uid", "") != uid and metadata.get("creationTimestamp", "") < known.get(
                "creationTimestamp", ""
            ):
                return False
        if kind == "Deployment":
            self._owners[namespace, name] = replicas_owners(obj)
        stored = _trimmed(kind, obj)
        same = entry is not None and kind in _TRIMS and _content(entry.obj) == _content(stored)
        if entry is not None:
            self._forget_child(kind, namespace, name, entry.obj)
        self._kinds.setdefault(kind, {}).setdefault(namespace, {})[name] = _Entry(stored, seen_at)
        service = _service_of(stored)
        if service is not None:
            self._children.setdefault((namespace, service), {}).setdefault(kind, {})[name] = stored
        return not same

    def _drop(self, kind: str, namespace: str, name: str) -> None:
        objects = self._kinds[kind][namespace]
        entry = objects.pop(name)
        if not objects:
            del self._kinds[kind][namespace]
        self._forget_child(kind, namespace, name, entry.obj)
        if kind == "Deployment":
            self._owners.pop((namespace, name), None)

    def _forget_child(self, kind: str, namespace: str, name: str, obj: Object) -> None:
        service = _service_of(obj)
        if service is None:
            return
        kinds = self._children.get((namespace, service), {})
        kinds.get(kind, {}).pop(name, None)
        if not kinds.get(kind):
            kinds.pop(kind, None)
        if not kinds:
            self._children.pop((namespace, service), None)

    def _entry(self, kind: str, namespace: str, name: str) -> _Entry | None:
        return self._kinds.get(kind, {}).get(namespace, {}).get(name)

    def _entries(self, kind: str, namespaces: Sequence[str] | None) -> Iterator[tuple[str, str, _Entry]]:
        by_namespace = self._kinds.get(kind, {})
        for namespace in list(by_namespace) if namespaces is None else namespaces:
            for name, entry in by_namespace.get(namespace, {}).items():
                yield namespace, name, entry


def replicas_owners(obj: Mapping[str, Any]) -> dict[str, str]:
    """Who owns a Deployment's `spec.replicas` (R1): manager → operation, as `Apply`, `Update` or `Apply/scale`.

    A manager with several entries shows them joined by commas.
    """
    owners: dict[str, str] = {}
    for entry in obj.get("metadata", {}).get("managedFields") or ():
        spec = (entry.get("fieldsV1") or {}).get("f:spec") or {}
        if "f:replicas" not in spec:
            continue
        how = entry.get("operation", "")
        if entry.get("subresource"):
            how = f"{how}/{entry['subresource']}"
        manager = entry.get("manager", "")
        owners[manager] = f"{owners[manager]},{how}" if manager in owners else how
    return owners


def slim(obj: Object) -> Object:
    """What is kept of an object, and who owns a Deployment's replicas."""
    stored = _trimmed(obj["kind"], obj)
    if obj["kind"] == "Deployment":
        stored["metadata"]["managedFields"] = [
            {**_only(entry, "manager", "operation", "subresource"), "fieldsV1": {"f:spec": {"f:replicas": {}}}}
            for entry in obj["metadata"].get("managedFields") or ()
            if "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
        ]
    return stored


def _newer(version: str, *, than: str) -> bool:
    """Whether one resourceVersion came after another: the API promises an order since 1.35, etcd always gave it."""
    return version.isdecimal() and than.isdecimal() and int(version) > int(than)


def _identity(obj: Mapping[str, Any]) -> tuple[str, str, str, str]:
    metadata = obj["metadata"]
    return obj["kind"], metadata.get("namespace") or "", metadata["name"], metadata.get("uid", "")


def _service_of(obj: Mapping[str, Any]) -> str | None:
    labels = obj["metadata"].get("labels") or {}
    return labels.get(SERVICE_LABEL) if labels.get(MANAGED_BY_LABEL) == MANAGED_BY else None


def _content(obj: Mapping[str, Any]) -> Object:
    metadata = {key: value for key, value in obj["metadata"].items() if key != "resourceVersion"}
    return {**obj, "metadata": metadata}


def _trimmed(kind: str, obj: Object) -> Object:
    metadata = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    annotations = metadata.get("annotations")
    if annotations and _LAST_APPLIED in annotations:
        metadata["annotations"] = {key: value for key, value in annotations.items() if key != _LAST_APPLIED}
    trim = _TRIMS.get(kind)
    whole = {**obj, "metadata": metadata}
    return _shared(whole if trim is None else trim(whole))  # type: ignore[no-any-return]


def _shared(value: Any) -> Any:
    """A copy that shares its keys and short strings with every other object: a third of the memory."""
    if isinstance(value, dict):
        return {sys.intern(key): _shared(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shared(item) for item in value]
    if type(value) is str and len(value) <= _SHARED_LENGTH:
        return sys.intern(value)
    return value


_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "labels",
    "ownerReferences",
)


def _only(source: Mapping[str, Any] | None, *keys: str) -> Object:
    return {key: source[key] for key in keys if key in source} if source else {}


def _pod(obj: Object) -> Object:
    annotations = obj["metadata"].get("annotations") or {}
    kept = {key: value for key, value in annotations.items() if "conch.dev/" in key or key == _DELETION_COST}
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    trimmed_status = _only(status, "phase", "podIP", "reason", "message", "startTime")
    trimmed_status["conditions"] = [
        _only(item, "type", "status", "reason", "message", "lastTransitionTime")
        for item in status.get("conditions") or ()
    ]
    for field in ("initContainerStatuses", "containerStatuses"):
        if status.get(field):
            trimmed_status[field] = [
                _only(item, "name", "ready", "started", "restartCount", "state", "lastState", "image")
                for item in status[field]
            ]
    trimmed_spec = _only(spec, "nodeName", "terminationGracePeriodSeconds", "nodeSelector", "schedulingGates")
    for field in ("initContainers", "containers"):
        if spec.get(field):
            trimmed_spec[field] = [_only(item, "name", "image", "resources", "restartPolicy") for item in spec[field]]
    return {
        **_only(obj, "apiVersion", "kind"),
        "metadata": {**_only(obj["metadata"], *_METADATA), **({"annotations": kept} if kept else {})},
        "spec": trimmed_spec,
        "status": trimmed_status,
    }


def _node(obj: Object) -> Object:
    status = obj.get("status") or {}
    return {
        **_only(obj, "apiVersion", "kind"),
        "metadata": _only(obj["metadata"], *_METADATA),
        "spec": _only(obj.get("spec"), "unschedulable", "taints"),
        "status": {
            **_only(status, "allocatable", "capacity"),
            # Without the heartbeat times, a kubelet's report of nothing new is no news.
            "conditions": [
                _only(item, "type", "status", "reason", "lastTransitionTime") for item in status.get("conditions") or ()
            ],
        },
    }


def _without_status(obj: Object) -> Object:
    # Nobody reads it, and each pod's change is one of its budget's, too.
    return {key: value for key, value in obj.items() if key != "status"}


_TRIMS: Mapping[str, Callable[[Object], Object]] = {
    "Pod": _pod,
    "Node": _node,
    "PodDisruptionBudget": _without_status,
    "Service": _without_status,
}
