"""What the servers of each pod template have loaded: asked of one ready pod, once (I/O through the probe given).

A reading costs a few requests to one pod and is kept in the status by the template's digest, so that neither a resync
nor a restart of the operator asks again. At most `AT_ONCE` run; whoever comes meanwhile waits for its turn where
servers answer quickly, and is told when to come back where they don't.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from conch import names
from conch.triton.probe import Unreadable
from conch.triton.readback import differences, planned_configs, revision, sentence

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from conch.api.inferenceservice import InferenceServiceSpec
    from conch.triton.readback import Loaded

Object = dict[str, Any]

AT_ONCE: Final = 4
"""Of 16 workers: where no pod can be reached, the others go on."""
PATIENCE_S: Final = 0.1
"""How long one waits for its turn while answers come as quickly: many that become ready at once are one write each."""
BUSY_RETRY_S: Final = 1.0
BUSY_PER_S: Final = 20.0
"""Of those that found it busy, so many come back a second, however many they are."""
FIRST_RETRY_S: Final = 15.0
LAST_RETRY_S: Final = 600.0
MAX_VERSIONS: Final = 64
"""Of one model, that the status tells: with more the API server would refuse all of it."""
_NO_PLAN: Final = "the plan of its pods can't be read by this version of the operator"


@dataclass(frozen=True)
class ReadModel:
    """One model as a server has it."""

    name: str
    versions: tuple[str, ...]
    max_batch_size: int


@dataclass(frozen=True)
class Reading:
    """What the server of one revision said."""

    revision: str
    models: tuple[ReadModel, ...] = ()
    drift: str = ""
    """What differs from the spec and what to write; empty: nothing."""
    error: str = ""
    """Why nothing could be read; empty: it could."""


@dataclass(frozen=True)
class Look:
    """What is known of the present template's models."""

    revision: str | None = None
    """Of the Deployment's template; None: there is none."""
    reading: Reading | None = None
    """None: not read by this process; the status may hold it."""
    again_after_s: float | None = None


class Server(Protocol):
    """What is needed of the probe."""

    async def read(self, address: str, models: Sequence[str]) -> dict[str, Loaded]:
        """Each model as the server at this address has loaded it. Raises Unreadable."""


@dataclass
class _Kept:
    reading: Reading
    failures: int = 0
    not_before: float = 0.0


class ModelReader:
    """Reads back what servers have loaded, by service; one event loop, no tasks of its own."""

    def __init__(self, server: Server, *, clock: Callable[[], float]) -> None:
        self._server = server
        self._clock = clock
        self._kept: dict[tuple[str, str], _Kept] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)
        # Whether the last server asked answered quickly; where none can be reached nobody waits for a turn.
        self._quick = True
        self._waiting: set[tuple[str, str]] = set()

    def forget(self, namespace: str, name: str) -> None:
        """The service is gone."""
        self._kept.pop((namespace, name), None)
        self._waiting.discard((namespace, name))

    async def look(
        self, service: Mapping[str, Any], spec: InferenceServiceSpec | None, children: Mapping[str, list[Object]]
    ) -> Look:
        """What is known, after asking a ready pod of the present template if nobody has yet; never raises."""
        metadata = service["metadata"]
        key = metadata["namespace"], metadata["name"]
        self._waiting.discard(key)  # it waits again where it still has to
        wanted = names.deployment(metadata["name"])
        live = next((item for item in children.get("Deployment", []) if item["metadata"]["name"] == wanted), None)
        if live is None:
            return Look()
        parts = revision(live["spec"]["template"], names.PLAN_ANNOTATION, names.SERVER_CONTAINER)
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        kept = self._kept.get(key)
        if kept is not None and kept.reading.revision != digest:
            kept = None
        told = (service.get("status") or {}).get("modelsRevision") == digest
        if spec is None or (told and kept is None):
            return Look(digest)
        now = self._clock()
        if kept is not None and (not kept.reading.error or now < kept.not_before):
            wait_s = None if not kept.reading.error else kept.not_before - now
            return Look(digest, kept.reading, wait_s)
        ready = _ready_pods(children, parts, only=_rolled_out(live))
        if not ready:
            return Look(digest, None if kept is None else kept.reading)
        if not await self._turn():
            self._waiting.add(key)
            wait_s = BUSY_RETRY_S + len(self._waiting) / BUSY_PER_S
            return Look(digest, None if kept is None else kept.reading, wait_s)
        failures = 0 if kept is None else kept.failures
        # Not the same pod each time: one that is cut off must not speak for all.
        address = ready[failures % len(ready)]["status"]["podIP"]
        try:
            reading = await self._read(address, digest, planned_configs(parts[0]), spec)
        finally:
            self._turns.release()
        self._quick = not reading.error and self._clock() - now < 2 * PATIENCE_S
        kept = self._kept[key] = _Kept(reading)
        if not reading.error:
            return Look(digest, reading)
        kept.failures = failures + 1
        wait_s = min(FIRST_RETRY_S * 2.0 ** min(failures, 16), LAST_RETRY_S)
        kept.not_before = self._clock() + wait_s
        return Look(digest, reading, wait_s)

    async def _turn(self) -> bool:
        """Whether there is a place among the few that ask; it has to be released."""
        if self._turns.locked() and not self._quick:
            return False
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self._turns.acquire()
        except TimeoutError:
            return False

    async def _read(self, address: str, digest: str, configs: Mapping[str, Any], spec: InferenceServiceSpec) -> Reading:
        if not configs:
            return Reading(digest, error=_NO_PLAN)
        try:
            # A paused or invalid spec may name other models than the pods hold.
            loaded = await self._server.read(address, [model.name for model in spec.models if model.name in configs])
        except Unreadable as error:
            return Reading(digest, error=str(error))
        found = [
            (model.name, differences(model, index, configs[model.name], loaded[model.name]))
            for index, model in enumerate(spec.models)
            if model.name in loaded
        ]
        models = tuple(
            ReadModel(model.name, _newest(loaded[model.name].versions), loaded[model.name].config.max_batch_size)
            for model in spec.models
            if model.name in loaded
        )
        return Reading(digest, models, sentence(found))


def _newest(versions: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(versions, key=int)[-MAX_VERSIONS:])


def _rolled_out(deployment: Mapping[str, Any]) -> bool:
    """Whether every pod is of the present template."""
    status = deployment.get("status") or {}
    seen = status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
    return bool(seen and status.get("updatedReplicas", 0) == status.get("replicas", 0))


def _ready_pods(children: Mapping[str, list[Object]], parts: tuple[str, str], *, only: bool) -> list[Object]:
    """Ready pods of exactly this template, oldest first; pods of a running rollout's old one say nothing of it.

    With `only` there are no others, and the plan alone tells: admission webhooks of clusters with a registry of their
    own rewrite the image in the pod, where the template keeps it.
    """
    found = []
    for pod in children.get("Pod", []):
        status = pod.get("status") or {}
        ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in status.get("conditions") or ())
        lives = ready and status.get("podIP") and "deletionTimestamp" not in pod["metadata"]
        own = revision(pod, names.PLAN_ANNOTATION, names.SERVER_CONTAINER)
        if lives and (own == parts or (only and own[0] == parts[0])):
            found.append(pod)
    return sorted(found, key=lambda pod: (pod["metadata"].get("creationTimestamp", ""), pod["metadata"]["name"]))
