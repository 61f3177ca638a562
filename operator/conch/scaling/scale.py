"""The only writer of replicas: /scale, under its own field manager, fenced by a live read (I/O; RULES R1, R2)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Protocol

from conch import names
from conch.kube.cache import replicas_owners
from conch.kube.client import DEPLOYMENTS
from conch.kube.errors import Conflict, NotFound

if TYPE_CHECKING:
    from conch.kube.client import Resource


_UNCLAIMED: Final = frozenset({names.WORKLOAD_MANAGER, "before-first-apply"})


class ScaleApi(Protocol):
    """What is needed of the Kubernetes client."""

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        """One object, read from the server; None if it does not exist."""

    async def apply(
        self, body: dict[str, Any], *, manager: str, force: bool = True, subresource: str | None = None
    ) -> dict[str, Any]:
        """Server-side apply; Conflict when the body's resourceVersion is old or a field has another owner."""


class Outcome(StrEnum):
    """What became of a decision."""

    WRITTEN = "written"
    UNCHANGED = "unchanged"
    DROPPED = "dropped"


@dataclass(frozen=True)
class Written:
    """The outcome and the replicas that the server shows after it; None where nothing was read."""

    outcome: Outcome
    replicas: int | None
    why: str = ""


async def write_scale(
    kube: ScaleApi,
    namespace: str,
    name: str,
    replicas: int,
    *,
    decided_on: int,
    uid: str | None = None,
    take_back: bool = False,
) -> Written:
    """Carry out one decision, or drop it when the cluster is no longer what it was decided on.

    The live read gives the resourceVersion that the write carries, so whatever happens in between makes it fail (R2).
    A decision is never retried: the next tick makes a new one.

    Args:
        kube: the client.
        namespace: of the Deployment.
        name: of the Deployment.
        replicas: what was decided.
        decided_on: spec.replicas as the decision saw it. A reduction is written only if that is still the live value:
            otherwise "raise to 5", decided on a stale 3, would cut a live 7.
        uid: of the Deployment that was decided on; a successor of the same name is another one.
        take_back: claim the field from whoever owns it; without this it is only written while it is ours.

    Raises:
        ApiError: other than 404 and 409, which drop the decision.
    """
    live = await kube.get(DEPLOYMENTS, namespace, name)
    if live is None or "deletionTimestamp" in live["metadata"]:
        return Written(Outcome.DROPPED, None, "the Deployment is gone")
    if uid is not None and live["metadata"].get("uid") != uid:
        return Written(Outcome.DROPPED, None, "the Deployment was made anew")
    shown = live["spec"].get("replicas", 1)
    if shown == replicas and not take_back:
        return Written(Outcome.UNCHANGED, shown)
    if shown != decided_on and not shown < replicas > decided_on:
        return Written(Outcome.DROPPED, shown, "replicas changed since the decision")
    # Where we own the field together with others, as after taking back a value that we left as it was, an unforced
    # apply is refused for ever; where somebody else owns it alone, it must be: a person was faster than our cache.
    owners = replicas_owners(live).keys()
    ours = names.SCALING_MANAGER in owners or owners <= _UNCLAIMED
    return await _apply(kube, live, replicas, force=take_back or ours)


async def claim(kube: ScaleApi, deployment: dict[str, Any]) -> Written:
    """Take the ownership of replicas of a Deployment as it was just read or applied, at the value it has (R1).

    Without it the next apply of the workload, which names no replicas, would reset them to 1. If the Deployment has
    changed since, nothing is written; the event of that change leads here again.
    """
    if "deletionTimestamp" in deployment["metadata"]:
        return Written(Outcome.DROPPED, None, "the Deployment is going")
    return await _apply(kube, deployment, deployment["spec"].get("replicas", 1), force=True)


async def _apply(kube: ScaleApi, live: dict[str, Any], replicas: int, *, force: bool) -> Written:
    metadata = live["metadata"]
    body = {
        "apiVersion": "autoscaling/v1",
        "kind": "Scale",
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "resourceVersion": metadata["resourceVersion"],
        },
        "spec": {"replicas": replicas},
    }
    try:
        answer = await kube.apply(body, manager=names.SCALING_MANAGER, force=force, subresource="scale")
    except (Conflict, NotFound) as error:
        return Written(Outcome.DROPPED, None, str(error))
    return Written(Outcome.WRITTEN, (answer.get("spec") or {}).get("replicas", replicas))
