"""The one maker of an InferenceService's status and of every condition in it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from conch.api.conditions import MAX_MESSAGE, Condition, ConditionType, Reason
from conch.reconcile.errors import ReconcileError, Stalled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from conch.api.inferenceservice import InferenceServiceSpec
    from conch.reconcile.observation import Observation, Problem
    from conch.reconcile.reading import Look
    from conch.workload.deployment import Strategy
    from conch.workload.fit import Fit

MAX_WAITING: Final = 16
"""Reasons of waiting pods that are told; the CRD allows no more."""


class Scaling(Protocol):
    """What the autoscaler last decided about one service."""

    @property
    def metrics_stale(self) -> Condition:
        """Whether the metrics can be believed."""

    @property
    def scaling_limited(self) -> Condition:
        """Whether a rail holds the replicas below what is wanted."""

    def to_status(self) -> dict[str, Any]:
        """The content of status.scaling."""


_STATUSES: Final = {"True": True, "False": False, "Unknown": None}
_REASONS: Final = frozenset(Reason)


@dataclass(frozen=True)
class StatusInputs:
    """Everything that a status is made from."""

    service: Mapping[str, Any]
    spec: InferenceServiceSpec | None
    template_inputs: str | None
    """What the wanted template is made from; None while the spec is invalid."""
    observation: Observation
    scaling: Scaling | None
    strategy: Strategy | None
    """The strategy that the running rollout began with; None while nothing rolls and none was chosen."""
    free_accelerators: int | None
    error: ReconcileError | None
    fit: Fit | None = None
    """Whether the cluster can run the spec at all; None: not looked at."""
    memory_used: int | None = None
    """Bytes that these models were seen to use on an accelerator; None: not measured since the operator started."""
    models_digest: str | None = None
    """Of the models in the spec; what was measured of others says nothing."""
    look: Look | None = None
    """What is known of the models that the servers have loaded."""


def first_sight(service: Mapping[str, Any], now: str) -> dict[str, Any]:
    """The status of a generation that was just seen: kstatus calls it in progress before any slow work is done."""
    previous = dict(service.get("status") or {})
    conditions = list(previous.get("conditions") or [])
    generation = service["metadata"]["generation"]
    # What stalled the old spec says nothing of the new one, and kstatus would read it as Failed at once.
    seen = (
        Condition(ConditionType.RECONCILING, True, Reason.ROLLING_OUT, "The new spec was seen."),
        Condition(ConditionType.STALLED, False, Reason.ROLLING_OUT, "The new spec was seen."),
    )
    fresh = {c.type: c.to_dict(generation=generation, previous=conditions, now=now) for c in seen}
    # Each keeps its place, so that the list never looks changed by its order alone.
    previous["conditions"] = [fresh.pop(c.get("type"), c) for c in conditions] + list(fresh.values())
    previous["observedGeneration"] = generation
    return previous


def build_status(inputs: StatusInputs, now: str) -> dict[str, Any]:
    """The whole status; equal inputs give an equal status, so an unchanged one is not written (R11)."""
    metadata = inputs.service["metadata"]
    previous: dict[str, Any] = inputs.service.get("status") or {}
    old_conditions = previous.get("conditions") or []
    generation, observation = metadata["generation"], inputs.observation
    served = _served(inputs, old_conditions)
    # While nothing answers, the last served generation is still remembered: the old pods may come back.
    served_generation = generation if served else _generation_of(old_conditions, ConditionType.READY)
    conditions = [
        (_ready(inputs, served=served), served_generation),
        (_reconciling(inputs, served=served), generation),
        (_stalled(inputs), generation),
        (_metrics_stale(inputs), generation),
        (_scaling_limited(inputs), generation),
        (_rollout_blocked(inputs, served=served), generation),
        (_capacity_constrained(inputs), generation),
        (_model_config_drift(inputs), generation),
    ]
    status: dict[str, Any] = {
        "observedGeneration": generation,
        "replicas": {
            "ready": observation.ready,
            "wanted": observation.wanted,
            "summary": f"{observation.ready}/{observation.wanted}",
        },
        "conditions": [
            condition.to_dict(generation=seen, previous=old_conditions, now=now) for condition, seen in conditions
        ],
    }
    if inputs.scaling is not None:
        status["scaling"] = inputs.scaling.to_status()
    elif "scaling" in previous:
        status["scaling"] = previous["scaling"]  # history for the autoscaler's first tick after a restart
    if inputs.spec is not None and inputs.spec.accelerator.devices:
        status["gpus"] = _gpus(inputs, previous.get("gpus") or {})
    status |= _models(inputs, previous)
    if inputs.strategy is not None:
        status["rollout"] = {"strategy": inputs.strategy.name, "reason": inputs.strategy.reason}
    elif "rollout" in previous:
        status["rollout"] = previous["rollout"]
    return status


def _served(inputs: StatusInputs, old: list[dict[str, Any]]) -> bool:
    """Whether this generation has been served; once true it stays so, whatever scaling and failures do (R10)."""
    if isinstance(inputs.error, Stalled) or inputs.template_inputs is None:
        return False
    observation = inputs.observation
    # With an error some child still has its old form, though the pods are the wanted ones.
    if inputs.error is None and observation.rolled_out and observation.template_inputs == inputs.template_inputs:
        return True
    generation: int = inputs.service["metadata"]["generation"]
    return _generation_of(old, ConditionType.READY) == generation


def _generation_of(conditions: list[dict[str, Any]], type_: ConditionType) -> int:
    return next((c.get("observedGeneration", 0) for c in conditions if c.get("type") == type_), 0)


def _ready(inputs: StatusInputs, *, served: bool) -> Condition:
    observation, error = inputs.observation, inputs.error
    if observation.ready and served and error is not None:
        return Condition(
            ConditionType.READY, True, Reason(error.reason), f"Requests are answered. Not all is done: {error.message}"
        )
    if observation.ready and (served or _paused(inputs)):
        return Condition(ConditionType.READY, True, Reason.READY, "Requests are answered.")
    if observation.ready and isinstance(error, Stalled):
        return Condition(
            ConditionType.READY, True, Reason(error.reason), "Requests are answered by the last valid spec."
        )
    if observation.ready:
        return Condition(
            ConditionType.READY, True, Reason.ROLLING_OUT, "Requests are answered while the new spec is rolled out."
        )
    if isinstance(error, Stalled):
        return Condition(ConditionType.READY, False, Reason(error.reason), error.message)
    problem = _first(observation.problems)
    if problem is not None:
        return Condition(ConditionType.READY, False, problem.reason, problem.message)
    if error is not None:
        return Condition(ConditionType.READY, False, Reason(error.reason), error.message)
    if _paused(inputs):
        return Condition(ConditionType.READY, False, Reason.PAUSED, "spec.paused is true and no replica is ready.")
    if served:
        return Condition(ConditionType.READY, False, Reason.NO_READY_REPLICAS, "No replica is ready.")
    return Condition(ConditionType.READY, False, Reason.STARTING, "The first replica starts.")


def _reconciling(inputs: StatusInputs, *, served: bool) -> Condition:
    if isinstance(inputs.error, Stalled):
        return Condition(ConditionType.RECONCILING, False, Reason(inputs.error.reason), "The spec must change first.")
    if _paused(inputs):
        return Condition(ConditionType.RECONCILING, False, Reason.PAUSED, "spec.paused is true: nothing is changed.")
    if served:
        return Condition(ConditionType.RECONCILING, False, Reason.SETTLED, "The spec is served.")
    if inputs.error is not None:
        return Condition(ConditionType.RECONCILING, True, Reason(inputs.error.reason), inputs.error.message)
    if inputs.observation.ready:
        return Condition(ConditionType.RECONCILING, True, Reason.ROLLING_OUT, "The new spec is rolled out.")
    return Condition(ConditionType.RECONCILING, True, Reason.STARTING, "The first replica starts.")


def _stalled(inputs: StatusInputs) -> Condition:
    if isinstance(inputs.error, Stalled):
        return Condition(ConditionType.STALLED, True, Reason(inputs.error.reason), inputs.error.message)
    return Condition(ConditionType.STALLED, False, Reason.VALID, "The spec is valid.")


def _metrics_stale(inputs: StatusInputs) -> Condition:
    if inputs.scaling is not None:
        return inputs.scaling.metrics_stale
    return _as_it_was(inputs, ConditionType.METRICS_STALE)


def _scaling_limited(inputs: StatusInputs) -> Condition:
    if inputs.scaling is not None:
        return inputs.scaling.scaling_limited
    return _as_it_was(inputs, ConditionType.SCALING_LIMITED)


def _as_it_was(inputs: StatusInputs, type_: ConditionType) -> Condition:
    """After a restart the last word stands until the first tick: otherwise each restart writes every status twice."""
    for old in (inputs.service.get("status") or {}).get("conditions") or []:
        if old.get("type") == type_ and old.get("status") in _STATUSES and old.get("reason") in _REASONS:
            return Condition(type_, _STATUSES[old["status"]], Reason(old["reason"]), old.get("message", ""))
    return Condition(type_, None, Reason.NOT_CONFIGURED, "No scaling decision was made yet.")


def _rollout_blocked(inputs: StatusInputs, *, served: bool) -> Condition:
    problem = _first(inputs.observation.problems)
    if served or not inputs.observation.ready or problem is None or isinstance(inputs.error, Stalled):
        return Condition(ConditionType.ROLLOUT_BLOCKED, False, Reason.NOT_BLOCKED, "Nothing blocks a rollout.")
    return Condition(ConditionType.ROLLOUT_BLOCKED, True, problem.reason, f"The old pods serve on. {problem.message}")


def _capacity_constrained(inputs: StatusInputs) -> Condition:
    verdict = inputs.fit
    if verdict is None:
        for old in (inputs.service.get("status") or {}).get("conditions") or []:
            if old.get("type") == ConditionType.CAPACITY_CONSTRAINED:
                return _as_it_was(inputs, ConditionType.CAPACITY_CONSTRAINED)
        return Condition(ConditionType.CAPACITY_CONSTRAINED, None, Reason.NODES_UNKNOWN, "Not looked at yet.")
    constrained = None if verdict.suits is None else not verdict.suits
    return Condition(ConditionType.CAPACITY_CONSTRAINED, constrained, verdict.reason, verdict.message)


def _gpus(inputs: StatusInputs, previous: Mapping[str, Any]) -> dict[str, Any]:
    assert inputs.spec is not None  # noqa: S101 - the caller checked
    accelerator, observation = inputs.spec.accelerator, inputs.observation
    gpus: dict[str, Any] = {"resource": accelerator.noun, "perReplica": accelerator.devices}
    if inputs.memory_used is not None and inputs.models_digest is not None:
        gpus |= {"memoryUsed": f"{inputs.memory_used // 2**20}Mi", "memoryOf": inputs.models_digest}
    elif "memoryUsed" in previous and previous.get("memoryOf") == inputs.models_digest:
        gpus |= {key: previous[key] for key in ("memoryUsed", "memoryOf")}
    if observation.pending_pods:
        gpus["waiting"] = [
            {"reason": str(problem.reason), "message": problem.message[:MAX_MESSAGE]}
            for problem in observation.problems
            if problem.reason in {Reason.NO_FREE_ACCELERATOR, Reason.UNSCHEDULABLE}
        ][:MAX_WAITING]
        if inputs.free_accelerators is not None:
            gpus["free"] = inputs.free_accelerators
    return gpus


def _model_config_drift(inputs: StatusInputs) -> Condition:
    """Whether the servers have the models as the spec asks; what they said of this template stands until another's."""
    type_, look = ConditionType.MODEL_CONFIG_DRIFT, inputs.look
    reading = None if look is None else look.reading
    if reading is not None and reading.error:
        message = f"What the servers have loaded isn't known: {reading.error}."
        return Condition(type_, None, Reason.CONFIG_UNREADABLE, message)
    if reading is not None and reading.drift:
        return Condition(type_, True, Reason.CONFIG_DIFFERS, reading.drift)
    if reading is not None:
        return Condition(type_, False, Reason.CONFIG_AS_WRITTEN, "The servers have the models as the spec asks.")
    if _was_read(inputs) or _was_unreadable(inputs):
        return _as_it_was(inputs, type_)
    return Condition(type_, None, Reason.CONFIG_NOT_READ, "No pod of this spec was ready yet.")


def _was_unreadable(inputs: StatusInputs) -> bool:
    """Whether servers of this generation couldn't be read when the status was written: so until the next try."""
    metadata = inputs.service["metadata"]
    conditions = (inputs.service.get("status") or {}).get("conditions") or ()
    return any(
        old.get("type") == ConditionType.MODEL_CONFIG_DRIFT
        and old.get("reason") == Reason.CONFIG_UNREADABLE
        and old.get("observedGeneration") == metadata["generation"]
        for old in conditions
    )


def _was_read(inputs: StatusInputs) -> bool:
    """Whether the status holds what a server of the present template said."""
    revision = None if inputs.look is None else inputs.look.revision
    return revision is not None and (inputs.service.get("status") or {}).get("modelsRevision") == revision


def _models(inputs: StatusInputs, previous: Mapping[str, Any]) -> dict[str, Any]:
    """status.models and the revision that they were read of."""
    if inputs.spec is None:
        return {key: previous[key] for key in ("models", "modelsRevision") if key in previous}
    look, observation = inputs.look, inputs.observation
    known: dict[str, dict[str, Any]] = {}
    revision = {}
    if look is not None and look.reading is not None and not look.reading.error:
        known = {
            model.name: {"versions": list(model.versions), "maxBatchSize": model.max_batch_size}
            for model in look.reading.models
        }
        revision = {"modelsRevision": look.reading.revision}
    elif _was_read(inputs):
        keys = ("versions", "maxBatchSize")
        known = {
            model["name"]: {key: model[key] for key in keys if key in model} for model in previous.get("models") or ()
        }
        revision = {"modelsRevision": previous["modelsRevision"]}
    broken = {name: cause for problem in observation.problems for name, cause in problem.models}
    models: list[dict[str, Any]] = []
    for model in inputs.spec.models:
        told: dict[str, Any] = {"name": model.name, **known.get(model.name, {})}
        if model.name in broken and model.name not in known:
            told |= {"ready": False, "message": broken[model.name][:MAX_MESSAGE]}
        elif not observation.ready:
            told["ready"] = False
        elif model.name in known:
            told["ready"] = True
        models.append(told)
    return {"models": models, **revision}


def _paused(inputs: StatusInputs) -> bool:
    return inputs.spec is not None and inputs.spec.paused


def _first(problems: tuple[Problem, ...]) -> Problem | None:
    return problems[0] if problems else None
