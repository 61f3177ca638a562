"""A service's children as last seen → what runs, what is ready and what is wrong. Pure."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from conch import names
from conch.api.conditions import Reason
from conch.triton import failures

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from conch.api.accelerator import Accelerator
    from conch.api.inferenceservice import InferenceServiceSpec

MAX_QUOTE: Final = 800
MAX_EXPLAINED: Final = 16
"""Pods, the newest that don't serve, whose problems are told."""
_PULL_REASONS: Final = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
_FETCH_DISK_FULL: Final = 7
"""The exit code of `conch fetch` for a volume without room (storage/errors.py)."""
_KILLED: Final = (137, 143)
"""Exit codes of SIGKILL and SIGTERM."""
_ENDED: Final = frozenset({"Succeeded", "Failed"})
# What changes from try to try though the cause doesn't (R11): the prefixes of Triton's log lines in both formats, other
# instants, addresses in memory, and the identifiers of containers and pods. A model's digest is no identifier.
_CHANGING: Final = re.compile(
    r"\b[IWE]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ [\w./-]+:\d+\] ?"
    r"|\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(Z|[+-]\d\d:?\d\d)?( [IWE])?( \d+)?( [\w./-]+:\d+\])? ?"
    r"|\b0x[0-9a-fA-F]+\b"
    r"|(?<!sha256:)\b[0-9a-f]{64}\b"
    # Some stand behind an underscore: Triton's keys of shared memory.
    r"|(?<![0-9a-f])[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"
    # Folders that Triton and Python's tempfile make anew for each process.
    r"|(?<=/tmp/)(?:python_env_\w{6}|folder\w{6}|tmp\w{8})\b"
)
_CRASH_LOOP: Final = "CrashLoopBackOff"
# Of what registries and the runtime say, in the order of what helps most.
_PULL_CAUSES: Final = (
    (re.compile(r"x509|certificate"), ", its registry's certificate is not trusted"),
    (
        re.compile(r"\b40[13]\b|unauthorized|forbidden|denied|authorization failed", re.IGNORECASE),
        ", access is refused",
    ),
    (re.compile(r"not found|manifest unknown|\b404\b", re.IGNORECASE), ", its registry has no such image"),
    (
        re.compile(r"no such host|i/o timeout|connection refused|deadline exceeded|unreachable", re.IGNORECASE),
        ", its registry doesn't answer",
    ),
    (re.compile(r"no space left on device"), ", the node's disk is full"),
    (re.compile(r"no match for platform|exec format"), ", it isn't built for the node's kind of processor"),
)
_IMAGE_IN_MESSAGE: Final = re.compile(r'image "([^"]+)"')


@dataclass(frozen=True)
class Problem:
    """Why a pod doesn't serve; the message is stable while the cause is (R11)."""

    reason: Reason
    message: str
    models: tuple[tuple[str, str], ...] = ()
    """The models that broke, each with the cause."""


@dataclass(frozen=True)
class Observation:
    """What the children show."""

    exists: bool
    """Whether there is a Deployment at all."""
    wanted: int
    ready: int
    rolled_out: bool
    """Whether every pod was made from the present template and at least one of them answers."""
    template_inputs: str
    """What the Deployment's template was made from."""
    problems: tuple[Problem, ...]
    pending_pods: int
    """Pods that the scheduler could not place."""


NOTHING: Final = Observation(
    exists=False, wanted=0, ready=0, rolled_out=False, template_inputs="", problems=(), pending_pods=0
)


def observe(
    children: Mapping[str, list[dict[str, Any]]], service: str, spec: InferenceServiceSpec | None
) -> Observation:
    """Read the Deployment and the pods of one service."""
    wanted_name = names.deployment(service)
    deployments = [item for item in children.get("Deployment", []) if item["metadata"]["name"] == wanted_name]
    # An evicted pod stays as Failed until it is collected; what it suffered says nothing of its successor.
    pods = [
        pod
        for pod in children.get("Pod", [])
        if "deletionTimestamp" not in pod["metadata"] and (pod.get("status") or {}).get("phase") not in _ENDED
    ]
    # Newest first; the name decides among equals, or the order of the cache would alter the status (R11).
    pods.sort(key=_age, reverse=True)
    # Explaining a server's words takes a millisecond or two, and a thousand replicas break in the same way.
    found: list[Problem | None] = list(
        itertools.islice(filter(None, (_pod_problem(pod, spec) for pod in pods)), MAX_EXPLAINED)
    )
    if not any(_has_served(pod) for pod in pods):
        found.append(_eviction(_of_same_template(children.get("Pod", []), pods)))
    problems = tuple(dict.fromkeys(problem for problem in found if problem is not None))
    pending = sum(1 for pod in pods if _unschedulable(pod) is not None)
    if not deployments:
        return replace(NOTHING, problems=problems, pending_pods=pending)
    deployment = deployments[0]
    status, metadata = deployment.get("status") or {}, deployment["metadata"]
    replicas, ready = status.get("replicas", 0), status.get("readyReplicas", 0)
    seen = status.get("observedGeneration", 0) >= metadata.get("generation", 0)
    return Observation(
        exists=True,
        wanted=deployment["spec"].get("replicas", 1),
        ready=ready,
        rolled_out=bool(seen and ready and status.get("updatedReplicas", 0) == replicas),
        template_inputs=(metadata.get("annotations") or {}).get(names.TEMPLATE_INPUTS_ANNOTATION, ""),
        problems=(*problems, *_deployment_problems(deployment)) if ready < replicas or not replicas else problems,
        pending_pods=pending,
    )


def _age(pod: Mapping[str, Any]) -> tuple[str, str]:
    return pod["metadata"].get("creationTimestamp", ""), pod["metadata"]["name"]


def _has_served(pod: Mapping[str, Any]) -> bool:
    """Whether a pod is ready or was: then an earlier one's eviction is history."""
    status = pod.get("status") or {}
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in status.get("conditions") or ())
    return ready or any(one.get("started") or one.get("restartCount") for one in status.get("containerStatuses") or ())


def _of_same_template(every: Iterable[Mapping[str, Any]], alive: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
    """The pods of the newest living one's template: thousands that ended are kept, some of them for weeks."""
    if not alive:
        return list(every)
    newest = _template_hash(alive[0])
    return [pod for pod in every if _template_hash(pod) == newest]


def _template_hash(pod: Mapping[str, Any]) -> str | None:
    found: str | None = (pod["metadata"].get("labels") or {}).get("pod-template-hash")
    return found


def _eviction(pods: Iterable[Mapping[str, Any]]) -> Problem | None:
    """What the newest evicted pod suffered: the successor of a pod that fills a disk fills the next one."""
    evicted = [pod for pod in pods if (pod.get("status") or {}).get("reason") == "Evicted"]
    if not evicted:
        return None
    said = str(max(evicted, key=_age)["status"].get("message") or "")
    if "ephemeral" in said or "disk" in said.lower() or "inode" in said:
        return Problem(
            Reason.DISK_FULL,
            "A pod was evicted because its node ran out of disk, where downloaded models lie: use nodes with more "
            "disk, fewer or smaller models, or a pvc:// or image:// source, which isn't copied.",
        )
    if "memory" in said:
        return Problem(
            Reason.EVICTED,
            "A pod was evicted because its node ran out of memory: use nodes with more memory, or raise "
            "spec.resources.memory to what the models really take.",
        )
    # Its figures differ from pod to pod.
    return Problem(Reason.EVICTED, f"A pod was evicted: {_quote(re.sub(r'[0-9][0-9.]*[KMGTi]*', 'N', said))}")


def _deployment_problems(deployment: Mapping[str, Any]) -> Iterable[Problem]:
    for condition in (deployment.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            # The message names the one pod that was tried last.
            tried = re.compile(rf'"{re.escape(deployment["metadata"]["name"])}-[a-z0-9-]+"')
            said = tried.sub("", str(condition.get("message") or ""))
            yield Problem(Reason.SERVER_FAILED, f"Pods can't be created: {_quote(said)}")
        if condition.get("reason") == "ProgressDeadlineExceeded":
            yield Problem(Reason.CANNOT_BECOME_READY, "The new pods did not become ready within the progress deadline.")


def _pod_problem(pod: Mapping[str, Any], spec: InferenceServiceSpec | None) -> Problem | None:
    blocked = _unschedulable(pod)
    if blocked is not None:
        return _scheduling_problem(blocked, spec)
    status = pod.get("status") or {}
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        problem = _container_problem(container, spec)
        if problem is not None:
            return problem
    return None


def _unschedulable(pod: Mapping[str, Any]) -> str | None:
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("message") or "no reason given")
    return None


def _scheduling_problem(scheduler: str, spec: InferenceServiceSpec | None) -> Problem:
    if spec is not None and _lacks_accelerator(spec.accelerator, scheduler):
        wanted = spec.accelerator
        which = f" on a node labelled {' or '.join(wanted.products)}" if wanted.products else ""
        return Problem(
            Reason.NO_FREE_ACCELERATOR,
            f"A pod waits for {wanted.devices} {wanted.noun}{which} and none is free: free one, add a node, or lower "
            "spec.scaling.minReplicas.",
        )
    # The scheduler counts nodes in its sentence; its own reasons without the counts stay the same from try to try.
    _, _, causes = scheduler.partition(": ")
    reasons = sorted(
        {part.strip(" .").lstrip("0123456789 ") for part in (causes or scheduler).split(". ")[0].split(",")}
    )
    return Problem(Reason.UNSCHEDULABLE, f"A pod can't be placed: {_quote('; '.join(reasons))}.")


def _lacks_accelerator(accelerator: Accelerator, scheduler: str) -> bool:
    if accelerator.claim is not None:
        return "cannot allocate all claims" in scheduler
    return bool(accelerator.count) and f"Insufficient {accelerator.resource}" in scheduler


def _container_problem(container: Mapping[str, Any], spec: InferenceServiceSpec | None) -> Problem | None:
    name, state = container.get("name"), container.get("state") or {}
    waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
    last = (container.get("lastState") or {}).get("terminated") or {}
    if waiting.get("reason") in _PULL_REASONS:
        return _pull_problem(container, str(waiting.get("message") or ""))
    if waiting.get("reason") in {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}:
        return _start_problem(str(name), str(waiting.get("message") or ""), spec)
    failed = ended if ended.get("exitCode") else {}
    if not failed and not container.get("ready") and (last.get("exitCode") or waiting.get("reason") == _CRASH_LOOP):
        failed = last
    if not failed:
        return None
    if failed.get("reason") == "OOMKilled":
        return _memory_problem(str(name))
    said = str(failed.get("message") or "")
    if failed.get("reason") in {"StartError", "ContainerCannotRun"}:
        return _start_problem(str(name), said, spec)
    if name == names.FETCH_CONTAINER:
        reason = Reason.DISK_FULL if failed.get("exitCode") == _FETCH_DISK_FULL else Reason.FETCH_FAILED
        return Problem(reason, f"The model can't be fetched: {_quote(said)}")
    return _explained(said, spec) or _exit_problem(failed.get("exitCode"), said)


def _exit_problem(code: object, said: str) -> Problem:
    if code in _KILLED:
        # Nearly always the kubelet, after the start-up probe's last failure.
        return Problem(
            Reason.SERVER_FAILED,
            "Triton was killed, as it is when it isn't ready within three times spec.scaling.startup: raise that if "
            "the "
            f"models take longer to load. Its last words: {_quote(said)}",
        )
    return Problem(Reason.SERVER_FAILED, f"Triton exited with code {code}: {_quote(said)}")


def _memory_problem(container: str) -> Problem:
    if container == names.FETCH_CONTAINER:
        return Problem(
            Reason.OUT_OF_MEMORY,
            "The fetching of the models was killed for want of memory, of which it needs a fixed little: look whether "
            "its node runs out of memory; if not, it is a fault of Conch.",
        )
    return Problem(
        Reason.OUT_OF_MEMORY, f"Container {container} was killed for want of memory: raise spec.resources.memory."
    )


def _start_problem(container: str, said: str, spec: InferenceServiceSpec | None) -> Problem:
    explained = _explained(said, spec) if container == names.SERVER_CONTAINER else None
    return explained or Problem(Reason.SERVER_FAILED, f"Container {container} can't start: {_quote(said)}")


def _explained(said: str, spec: InferenceServiceSpec | None) -> Problem | None:
    """The server's words in ours, when they are known."""
    models = [] if spec is None else [model.name for model in spec.models]
    found = failures.explain(said, models, accelerator=spec is not None and spec.accelerator.devices > 0)
    if not found:
        return None
    broken = tuple((failure.model, failure.cause) for failure in found if failure.model is not None)
    return Problem(found[0].reason, failures.sentence(found), broken)


def _pull_problem(container: Mapping[str, Any], said: str) -> Problem:
    own, quoted = container.get("image"), _IMAGE_IN_MESSAGE.search(said)
    image = quoted[1] if quoted else own
    if image != own:
        # An image volume is pulled for the container that mounts it.
        where = "the spec.models[].source.uri that names it"
    elif container.get("name") == names.FETCH_CONTAINER:
        where = "the operator's setting CONCH_FETCH_IMAGE"
    else:
        where = "spec.runtime.image"
    why = next((words for pattern, words in _PULL_CAUSES if pattern.search(said)), "")
    return Problem(
        Reason.IMAGE_PULL_FAILED,
        f"The image {image} can't be pulled{why}: check {where} and the access to its registry.",
    )


def _quote(text: Any) -> str:
    """The end of what a program said, on one line; that is where the cause stands."""
    line = " ".join(_CHANGING.sub("", str(text or "")).split()) or "it gave no reason"
    return line if len(line) <= MAX_QUOTE else f"…{line[-MAX_QUOTE:]}"
