"""Spec, signals, replicas and history → how many replicas, and why. Pure: no clock, no I/O, no logging.

The contract is the project's page on scaling: the largest known term raises at once, a reduction needs a whole hold of
knowing that fewer suffice, and what is unknown never reduces. Instants are seconds since the epoch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeVar

from conch.api.conditions import Reason
from conch.api.demands import instances

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from conch.api.inferenceservice import InferenceServiceSpec
    from conch.config import Settings

MIN_COVERAGE: Final = 0.6
UP_PERIOD_S: Final = 15.0
LANDED_S: Final = 15.0
UP_REPLICAS: Final = 4
DOWN_SHARE: Final = 0.1
DOWN_STEPS_PER_HOLD: Final = 5
DOWN_PERIOD_S: Final = 15.0
CAPACITY_MARGIN: Final = 1.25
CAPACITY_MEMORY_S: Final = 3600.0
DOWN_LOAD: Final = 0.8
DOWN_BUSY: Final = 0.7
DRAIN_S: Final = 20.0
LARGEST_EXTRAPOLATION: Final = 3.0
NOISE_SIGMAS: Final = 2.0
SLOPE_SIGMAS: Final = 3.0
LATE_STARTUPS: Final = 2.0
GAP_S: Final = 60.0
MISSING_LONG_S: Final = 600.0
STUCK_S: Final = 60.0
OVERLOAD: Final = 10.0
MOSTLY: Final = 0.95
ODD_GAUGE_S: Final = 90.0
ODD_GAUGE_MOVE: Final = 0.1
TURNS: Final = 6
TURNS_S: Final = 1800.0
FIGHT_S: Final = 1800.0
FIGHTS: Final = 2
MEMORY_HELD_S: Final = 300.0
MEMORY_SAMPLE_S: Final = 15.0
MEMORY_SAMPLES: Final = 40
MEMORY_LOAD_SPREAD: Final = 1.2
MEMORY_SPREAD: Final = 0.02
MEMORY_CORRELATION: Final = 0.8
MEMORY_FEWEST: Final = 8
FLOW_SAMPLES: Final = 32
SLOPE_RECENT_S: Final = 10.0
NEED_BUCKETS: Final = 20
OBSERVED_BUCKET_S: Final = 300.0

_NOTHING: Final = 1e-9

Number = TypeVar("Number", bound=float)


class QualityKind(StrEnum):
    """How far a signal can be believed; better first."""

    FRESH = "fresh"
    PARTIAL = "partial"
    STALE = "stale"
    MISSING = "missing"
    NON_FINITE = "non-finite"


@dataclass(frozen=True, slots=True)
class Quality:
    """One signal's quality: replicas with a good sample, of those that should have one."""

    kind: QualityKind
    covered: int = 0
    expected: int = 0
    age_s: float | None = None
    """Age of the newest sample, if there ever was one."""
    detail: str = ""
    """What went wrong, in words that don't change while it lasts."""

    @property
    def coverage(self) -> float:
        """Share of the replicas that were measured."""
        return self.covered / self.expected if self.expected else 0.0

    @property
    def known(self) -> bool:
        """Whether a reduction may rest on it."""
        return self.kind is QualityKind.FRESH or (self.kind is QualityKind.PARTIAL and self.coverage >= MIN_COVERAGE)


PerModel = tuple[tuple[str, float], ...]
"""A figure by model, summed over the replicas that were measured; always finite and never negative."""


@dataclass(frozen=True, slots=True)
class Signals:
    """What one service's ready replicas report; every figure is finite, or None when it isn't known."""

    queue: Quality
    flow: Quality
    memory: Quality
    waiting: PerModel | None = None
    successes: PerModel | None = None
    """Requests/s answered."""
    completions: float | None = None
    """Requests/s that ended, failures included."""
    in_system: PerModel | None = None
    busy: PerModel | None = None
    memory_share: float | None = None
    """Used share of the fullest accelerator, 0 to 1."""
    too_young: bool = False
    """No replica has been ready for long enough to have a sample."""
    configured: bool = True

    @property
    def worst(self) -> Quality:
        """The quality of queue and flow together: the worse one."""
        order = list(QualityKind)
        return max(self.queue, self.flow, key=lambda quality: order.index(quality.kind))


@dataclass(frozen=True, slots=True)
class ScalingSpec:
    """What the decision needs of a spec and of the operator's settings; times in seconds, memory as a share."""

    min_replicas: int = 1
    max_replicas: int = 4
    mode: str = "Automatic"
    queue_target: float = 8.0
    memory_max: float = 0.9
    capacity: float | None = None
    startup_s: float = 60.0
    hold_s: float = 300.0
    floor: bool = False
    slots: tuple[tuple[str, int], ...] = (("model", 1),)
    """Instances of each model in one replica."""
    accelerators: int = 1
    resource: str = "nvidia.com/gpu"
    shared: bool = False
    """Whether others may use the same accelerators, so that their metrics are of all together."""
    node_autoscaling: bool = False
    tick_s: float = 5.0
    window_s: float = 30.0

    @classmethod
    def of(cls, spec: InferenceServiceSpec, settings: Settings) -> ScalingSpec:
        """From a parsed spec and the operator's settings."""
        scaling, accelerator = spec.scaling, spec.accelerator
        return cls(
            min_replicas=scaling.min_replicas,
            max_replicas=scaling.max_replicas,
            mode=scaling.mode,
            queue_target=scaling.queue_depth.target,
            memory_max=scaling.gpu_memory.max / 100,
            capacity=scaling.capacity.per_replica,
            startup_s=scaling.startup,
            hold_s=scaling.scale_down.hold,
            floor=scaling.when_metrics_missing == "Floor",
            slots=tuple((model.name, instances(model, accelerator.devices)) for model in spec.models),
            accelerators=accelerator.devices,
            resource=accelerator.noun,
            shared=accelerator.shared,
            node_autoscaling=settings.node_autoscaling,
            tick_s=settings.tick_s,
            window_s=settings.metrics_window_s,
        )

    @property
    def memory_matters(self) -> bool:
        """Whether accelerator memory can block or raise; `gpuMemory.max: 100` switches the term off."""
        return self.accelerators > 0 and self.memory_max < 1 and not self.shared


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What Kubernetes shows of one service's replicas."""

    wanted: int
    """The Deployment's spec.replicas."""
    ready: int = 0
    landed: int | None = None
    """Those of `ready` that have been so for `LANDED_S`; None: all."""
    starting: tuple[float, ...] = ()
    """When each pod that is placed but not ready was placed."""
    unschedulable: int = 0
    terminating: int = 0
    free: int | None = None
    """Further replicas that the free accelerators take; None when not known."""
    rollout: bool = False
    foreign: str | None = None
    """Whoever else owns spec.replicas now."""
    second_scaler: str | None = None
    """An autoscaler that targets our Deployment, as KIND NAME."""


@dataclass(frozen=True, slots=True)
class Flow:
    """One tick's flow, kept for slopes."""

    at: float
    waiting: float
    arrivals: float | None


@dataclass(frozen=True, slots=True)
class History:
    """What the decision remembers; bounded, and safe to lose: an empty one reduces nothing for a whole hold."""

    watching_since: float | None = None
    """Since when the signals have been known without a long gap."""
    known_at: float | None = None
    missing_since: float | None = None
    needs: tuple[tuple[float, int], ...] = ()
    """The fewest replicas that would have sufficed: the largest in each slice of the hold."""
    flows: tuple[Flow, ...] = ()
    saturated: tuple[float, int] | None = None
    """Since when these many replicas have all had requests waiting."""
    observed: tuple[tuple[float, float], ...] = ()
    """Requests/s per replica under load: the largest in each five minutes of the last hour."""
    memory: tuple[tuple[float, float, float], ...] = ()
    """Instant, memory share, requests in system per replica."""
    memory_known: tuple[float, float] | None = None
    last_up: float | None = None
    last_down: float | None = None
    up_window: tuple[float, int] | None = None
    turns: tuple[float, ...] = ()
    last_direction: int = 0
    foreign_since: float | None = None
    taken_back: tuple[float, ...] = ()
    stuck_since: float | None = None
    odd_gauge: tuple[float, float] | None = None

    @classmethod
    def rebuilt(cls, last_up: float | None, last_down: float | None) -> History:
        """After a restart, from status.scaling: the hold begins anew, the last step keeps its rights."""
        return cls(last_up=last_up, last_down=last_down)


class Direction(StrEnum):
    """What a decision does."""

    UP = "Up"
    DOWN = "Down"
    HOLD = "Hold"


class TermName(StrEnum):
    """What can ask for replicas."""

    NONE = ""
    BOUNDS = "bounds"
    QUEUE_DEPTH = "queueDepth"
    SURGE = "surge"
    GPU_MEMORY = "gpuMemory"
    FLOOR = "floor"


class Rail(StrEnum):
    """What can stop or clip a decision."""

    NONE = ""
    MAX_REPLICAS = "maxReplicas"
    UP_LIMIT = "upLimit"
    FREE_ACCELERATORS = "freeAccelerators"
    LATE_REPLICAS = "lateReplicas"
    METRICS = "metrics"
    METRICS_MISSING = "whenMetricsMissing"
    STUCK_SERVER = "stuckServer"
    ROLLOUT = "rollout"
    SECOND_SCALER = "secondScaler"
    PERSON = "person"
    EXTERNAL = "external"
    FLAPPING = "flapping"


@dataclass(frozen=True, slots=True)
class Term:
    """What one term asks for; None when it can't tell."""

    name: TermName
    replicas: int | None
    message: str


@dataclass(frozen=True, slots=True)
class Limit:
    """Why fewer replicas are ordered than something asks for."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that people should see as an Event, once while it lasts."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Decision:
    """How many replicas there should be, and why."""

    replicas: int
    direction: Direction
    term: TermName
    rail: Rail
    message: str
    """One sentence."""
    terms: tuple[Term, ...]
    next_history: History
    """What was observed; `after_step` adds the step once it is written."""
    take_back: bool = False
    """The write claims spec.replicas from whoever owns it."""
    computed_reduction: bool = False
    limit: Limit | None = None
    notices: tuple[Notice, ...] = ()
    settled: bool = False
    """The same inputs give the same decision at any later instant."""


def decide(spec: ScalingSpec, signals: Signals, replicas: ReplicaState, history: History, now: float) -> Decision:
    """Decide about one service.

    Args:
        spec: bounds, targets and times.
        signals: what the ready replicas report.
        replicas: what Kubernetes shows.
        history: the `next_history` of the last decision, or `after_step` of it.
        now: seconds since the epoch.
    """
    seen, enough = _observe(spec, signals, replicas, history, now)
    stopped = _stopped(spec, replicas, seen, now)
    if stopped is not None:
        return stopped
    taking_back = replicas.foreign is not None
    terms = _terms(spec, signals, replicas, seen, now)
    notices = _notices(spec, seen, now)
    base = min(max(replicas.wanted, spec.min_replicas), spec.max_replicas)
    raised, winner, rail, limit = _raised(spec, replicas, seen, terms=terms, base=base, now=now)

    def decided(count: int, term: TermName, rail: Rail, message: str, **more: bool) -> Decision:
        direction = (
            Direction.UP if count > replicas.wanted else Direction.DOWN if count < replicas.wanted else Direction.HOLD
        )
        return Decision(
            count, direction, term, rail, message, terms, seen, taking_back, limit=limit, notices=notices, **more
        )

    if raised > base:
        return decided(raised, winner.name, rail, winner.message)
    if base > replicas.wanted:
        return decided(base, TermName.BOUNDS, rail, f"minReplicas is {spec.min_replicas}")
    if base < replicas.wanted:
        return decided(base, TermName.BOUNDS, rail, f"maxReplicas is {spec.max_replicas}")
    lowered = _lowered(spec, signals, replicas, seen, enough=enough, now=now)
    quiet = not (taking_back or replicas.starting or limit or notices or _total(signals.waiting))
    if rail is not Rail.NONE:
        message = limit.message if limit is not None else f"{winner.message}, and the last step is still fresh"
        return decided(base, winner.name, rail, message)
    if lowered.replicas < base:
        return decided(lowered.replicas, TermName.NONE, lowered.rail, lowered.message, computed_reduction=True)
    return decided(base, TermName.NONE, lowered.rail, lowered.message, settled=lowered.settled and quiet)


def after_step(history: History, decision: Decision, replicas_before: int, now: float) -> History:
    """The history once a decision has been written and read back."""
    taken = (*(t for t in history.taken_back if now - t < FIGHT_S), now)[-8:] if decision.take_back else None
    history = replace(history, foreign_since=None, taken_back=taken) if taken is not None else history
    if decision.direction is Direction.HOLD:
        return history
    sign = 1 if decision.direction is Direction.UP else -1
    turns = tuple(t for t in history.turns if now - t < TURNS_S)
    if history.last_direction == -sign:
        turns = (*turns, now)[-2 * TURNS :]
    history = replace(history, turns=turns, last_direction=sign)
    if sign < 0:
        return replace(history, last_down=now)
    window = history.up_window
    if window is None or now - window[0] >= UP_PERIOD_S:
        window = (now, replicas_before)
    return replace(history, last_up=now, up_window=window)


def rested(history: History, until: float) -> History:
    """The history after a time in which everything stayed as it was and nobody needed to ask."""
    if history.known_at is None:
        return history
    flows = (*history.flows, replace(history.flows[-1], at=until))[-FLOW_SAMPLES:] if history.flows else ()
    needs = (*history.needs, (until, history.needs[-1][1]))[-3 * NEED_BUCKETS :] if history.needs else ()
    return replace(history, known_at=until, flows=flows, needs=needs)


def hold_s(spec: ScalingSpec, history: History, now: float) -> float:
    """The hold that applies now: doubled while the decisions turn to and fro."""
    return spec.hold_s * (2 if _flapping(history, now) else 1)


def late_replicas(spec: ScalingSpec, replicas: ReplicaState, now: float) -> int:
    """Pods that have been starting for so long that nobody should count on them."""
    return sum(1 for at in replicas.starting if now - at > LATE_STARTUPS * spec.startup_s)


def capacity(spec: ScalingSpec, history: History) -> float | None:
    """Requests/s that one replica serves: declared, else observed; never beyond 1.25 of what was seen under load."""
    seen = max((rate for _, rate in history.observed), default=None)
    if spec.capacity is None:
        return seen
    return spec.capacity if seen is None else min(spec.capacity, CAPACITY_MARGIN * seen)


def memory_unknown(spec: ScalingSpec, history: History, now: float) -> bool:
    """Whether accelerator memory matters and has not been known for longer than a known value is held."""
    return spec.memory_matters and _memory_share(spec, history, now) is None


# --- what is remembered


def _observe(
    spec: ScalingSpec, signals: Signals, replicas: ReplicaState, history: History, now: float
) -> tuple[History, int | None]:
    """What is remembered after this tick, and how many replicas would suffice now."""
    foreign_since = (history.foreign_since or now) if replicas.foreign is not None else None
    missing = signals.waiting is None and not signals.too_young
    history = replace(
        history,
        foreign_since=foreign_since,
        missing_since=(history.missing_since or now) if missing else None,
        turns=tuple(t for t in history.turns if now - t < TURNS_S),
    )
    history = _observe_flow(spec, signals, replicas, history, now)
    history = _observe_memory(spec, signals, replicas, history, now)
    history = _observe_oddities(spec, signals, history, now)
    enough = _enough(spec, signals, replicas, history, now)
    return _observe_need(spec, history, enough, now), enough


def _observe_flow(spec: ScalingSpec, signals: Signals, replicas: ReplicaState, history: History, now: float) -> History:
    waiting, completions = _total(signals.waiting), signals.completions
    if waiting is None or not signals.queue.known:
        return replace(history, saturated=None)
    waiting *= _scale(signals.queue)
    spacing = max(spec.tick_s, spec.window_s / 8) * 0.9
    flows = history.flows
    if not flows or now - flows[-1].at >= spacing:
        kept = [flow for flow in flows if now - flow.at <= 3 * spec.window_s]
        arrivals = None
        if completions is not None and signals.flow.known:
            arrivals = _arrivals(spec, waiting, completions * _scale(signals.flow), kept, now)
        flows = (*kept, Flow(now, waiting, arrivals))[-FLOW_SAMPLES:]
    # Under load each replica has somebody waiting: what it completes then is what it can do.
    in_system = _total(signals.in_system)
    real = in_system is None or waiting <= OVERLOAD * in_system + spec.queue_target
    saturated = real and signals.queue.kind is QualityKind.FRESH and waiting >= max(1, replicas.ready)
    since = history.saturated
    if not saturated:
        since = None
    elif since is None or since[1] != replicas.ready:
        since = (now, replicas.ready)
    observed = tuple((at, rate) for at, rate in history.observed if now - at < CAPACITY_MEMORY_S)
    # A rate's window must lie wholly within the load and see the same replicas all along: the idle time before it, or
    # those that had not started yet, would make a replica look slow.
    whole = since is not None and now - since[0] >= spec.window_s + spec.tick_s
    if whole and completions and signals.flow.kind is QualityKind.FRESH:
        observed = _largest(observed, now, completions / max(1, signals.flow.covered), OBSERVED_BUCKET_S, 16)
    return replace(history, flows=flows, saturated=since, observed=observed)


def _arrivals(spec: ScalingSpec, waiting: float, completions: float, flows: Sequence[Flow], now: float) -> float:
    """Flow balance: what ended plus what the queue gained; completions alone saturate under overload."""
    earlier = _about(flows, now - SLOPE_RECENT_S, spec.window_s / 2)
    gained = 0.0 if earlier is None else (waiting - earlier.waiting) / (now - earlier.at)
    return max(0.0, completions + gained)


def _observe_memory(
    spec: ScalingSpec, signals: Signals, replicas: ReplicaState, history: History, now: float
) -> History:
    share, load = signals.memory_share, _total(signals.in_system)
    if share is None or not spec.memory_matters:
        return history
    history = replace(history, memory_known=(now, share))
    if load is None or (history.memory and now - history.memory[-1][0] < MEMORY_SAMPLE_S):
        return history
    per_replica = load * _scale(signals.flow) / max(1, replicas.ready)
    return replace(history, memory=(*history.memory, (now, share, per_replica))[-MEMORY_SAMPLES:])


def _observe_oddities(spec: ScalingSpec, signals: Signals, history: History, now: float) -> History:
    waiting, in_system = _total(signals.waiting), _total(signals.in_system)
    stuck = bool(_stuck_models(signals))
    odd = history.odd_gauge
    # A queue that is really there shows in the time its requests spent: by Little's law at least as many in the system.
    disagrees = (
        waiting is not None
        and in_system is not None
        and not stuck
        and signals.queue.kind is QualityKind.FRESH
        and waiting > 2 * in_system + spec.queue_target
    )
    if not disagrees or waiting is None:
        odd = None
    elif odd is None or abs(waiting - odd[1]) > max(1.0, ODD_GAUGE_MOVE * odd[1]):
        odd = (now, waiting)
    return replace(history, stuck_since=(history.stuck_since or now) if stuck else None, odd_gauge=odd)


def _observe_need(spec: ScalingSpec, history: History, enough: int | None, now: float) -> History:
    width = spec.hold_s / NEED_BUCKETS
    horizon = now - 2 * spec.hold_s - width
    needs = tuple((at, need) for at, need in history.needs if at > horizon)
    if enough is None:
        return replace(history, needs=needs)
    gap = history.known_at is None or now - history.known_at > max(GAP_S, 3 * spec.tick_s)
    since = now if gap or history.watching_since is None else history.watching_since
    needs = _largest(needs, now, enough, width, 3 * NEED_BUCKETS)
    return replace(history, needs=needs, watching_since=since, known_at=now)


# --- who else decides


def _stopped(spec: ScalingSpec, replicas: ReplicaState, seen: History, now: float) -> Decision | None:
    def hold(rail: Rail, reason: Reason, message: str, *, settled: bool) -> Decision:
        limit = Limit(reason, message)
        return Decision(
            replicas.wanted, Direction.HOLD, TermName.NONE, rail, message, (), seen, limit=limit, settled=settled
        )

    if spec.mode == "External":
        message = "scaling.mode is External: replicas are left to another scaler"
        return replace(hold(Rail.EXTERNAL, Reason.UNLIMITED, message, settled=True), limit=None)
    if spec.mode == "Advisory":
        return None  # nothing is written, so nobody is fought
    if replicas.second_scaler is not None:
        message = (
            f"{replicas.second_scaler} also scales this Deployment, so Conch stopped writing replicas: delete it, or "
            "set scaling.mode to External"
        )
        return hold(Rail.SECOND_SCALER, Reason.SECOND_SCALER, message, settled=True)
    if replicas.foreign is None:
        return None
    if sum(1 for at in seen.taken_back if now - at < FIGHT_S) >= FIGHTS:
        message = (
            f"{replicas.foreign} keeps changing replicas, so Conch stopped writing them for a while: make it stop, or "
            "set scaling.mode to External"
        )
        return hold(Rail.SECOND_SCALER, Reason.SECOND_SCALER, message, settled=False)
    if now - (seen.foreign_since or now) < spec.hold_s:
        message = f"{replicas.foreign} changed replicas; this holds for scaleDown.hold and is then taken back"
        return hold(Rail.PERSON, Reason.PERSON_SCALED, message, settled=False)
    return None


# --- up


def _terms(spec: ScalingSpec, signals: Signals, replicas: ReplicaState, seen: History, now: float) -> tuple[Term, ...]:
    terms = [
        _queue_depth(spec, signals, replicas, seen, now),
        _surge(spec, signals, replicas, seen, now),
        _gpu_memory(spec, replicas, seen, now),
    ]
    if spec.floor and seen.missing_since is not None and now - seen.missing_since >= MISSING_LONG_S:
        terms.append(Term(TermName.FLOOR, spec.min_replicas, "metrics are missing, and whenMetricsMissing is Floor"))
    return tuple(terms)


def _queue_depth(spec: ScalingSpec, signals: Signals, replicas: ReplicaState, seen: History, now: float) -> Term:
    waiting = _believed(spec, signals, seen, now)
    if waiting is None:
        return Term(TermName.QUEUE_DEPTH, None, "queue depth: not known")
    model, most = max(waiting, key=lambda pair: pair[1], default=("", 0.0))
    # Missing pods count as empty, unless enough were measured to speak for the rest.
    most *= _scale(signals.queue)
    held = round(spec.queue_target * max(1, replicas.ready))
    which = f" for {model}" if len(waiting) > 1 else ""
    where = _replicas(max(1, replicas.ready))
    message = f"queue depth: {_number(most)} requests wait{which} where {where} may hold {held}"
    left = _left_at_landing(spec, signals, seen, now)
    if left < 1:
        message = f"{message}, but it is draining"
    needed = _ceil(most * left / spec.queue_target)
    if needed > replicas.wanted and _is_stuck(spec, seen, now):
        # More replicas can't drain what is queued inside a server that answers nobody.
        return Term(TermName.QUEUE_DEPTH, replicas.wanted, "queue depth: requests wait in a server that answers none")
    # The queue grows all the while replicas start: what is ordered must land, and show in the queue, before a longer
    # queue orders more.
    landed = max(1, replicas.ready if replicas.landed is None else replicas.landed)
    return Term(TermName.QUEUE_DEPTH, min(needed, landed + max(UP_REPLICAS, landed)), message)


def _left_at_landing(spec: ScalingSpec, signals: Signals, seen: History, now: float) -> float:
    """Share of the queue that is left when a replica ordered now lands, if it goes on draining as it does.

    Rests on what was seen and on no belief about capacity; a queue that empties by failing its requests isn't draining.
    """
    earlier = _about(seen.flows, now - SLOPE_RECENT_S, SLOPE_RECENT_S / 2)
    latest = seen.flows[-1] if seen.flows else None
    answered = _total(signals.successes)
    if earlier is None or latest is None or latest.at <= earlier.at or not signals.flow.known:
        return 1.0
    if answered is None or answered < MOSTLY * (signals.completions or 0.0) or not 0 < latest.waiting < earlier.waiting:
        return 1.0
    slope = (latest.waiting - earlier.waiting) / (latest.at - earlier.at)
    return max(0.0, 1 + slope * (spec.startup_s + spec.tick_s) / latest.waiting)


def _surge(spec: ScalingSpec, signals: Signals, replicas: ReplicaState, seen: History, now: float) -> Term:
    one = capacity(spec, seen)
    if one is None or one <= 0:
        return Term(TermName.SURGE, None, "surge: the capacity of a replica is not known")
    waiting = _believed(spec, signals, seen, now)
    arrivals = seen.flows[-1].arrivals if seen.flows else None
    if waiting is None or arrivals is None or not signals.flow.known or _is_stuck(spec, seen, now):
        return Term(TermName.SURGE, None, "surge: arrivals are not known")
    lead_s = spec.startup_s + spec.tick_s
    landing = min(arrivals + _slope(spec, seen, now) * lead_s, LARGEST_EXTRAPOLATION * arrivals)
    wait_now = _sum(waiting) * _scale(signals.queue)
    backlog = _backlog_at_landing(spec, replicas, one=one, arrivals=(arrivals + landing) / 2, waiting=wait_now, now=now)
    certain = max(0.0, landing - NOISE_SIGMAS * math.sqrt(landing / spec.window_s))
    # A backlog is not worth replicas that would be idle before they have started.
    drain_s = max(DRAIN_S, spec.startup_s)
    needed = _ceil(certain / one + backlog / (one * drain_s))
    message = (
        f"surge: {_number(landing)} requests/s are to be served and {_number(backlog)} wait when new replicas land, "
        f"at {_number(one)} requests/s for each replica"
    )
    return Term(TermName.SURGE, needed, message)


def _backlog_at_landing(
    spec: ScalingSpec, replicas: ReplicaState, *, one: float, arrivals: float, waiting: float, now: float
) -> float:
    """The queue when a replica ordered now becomes ready; those that start already land one by one before."""
    horizon = now + spec.startup_s + spec.tick_s
    landings = sorted(
        min(max(at + spec.startup_s, now + spec.tick_s), horizon)
        for at in replicas.starting
        if now - at <= LATE_STARTUPS * spec.startup_s
    )
    backlog, serving, at = waiting, replicas.ready, now
    for landing in [*landings, horizon]:
        backlog = max(0.0, backlog + (arrivals - serving * one) * (landing - at))
        serving, at = serving + 1, landing
    return backlog


def _slope(spec: ScalingSpec, seen: History, now: float) -> float:
    """Growth of the arrivals, in requests/s each second; 0 unless it is more than noise and has gone on.

    A step looks like a ramp for as long as the rate's window, so growth counts only if the window before, the last
    window and the last seconds all show it.
    """
    window = spec.window_s
    points = [_about(seen.flows, now - age, window / 4) for age in (2 * window, window, SLOPE_RECENT_S, 0.0)]
    slopes = []
    for earlier, later in pairwise(points):
        if earlier is None or later is None or earlier.arrivals is None or later.arrivals is None:
            return 0.0
        if later.at <= earlier.at:
            return 0.0
        slopes.append((later.arrivals - earlier.arrivals) / (later.at - earlier.at))
    first, last = points[0], points[-1]
    if first is None or last is None or first.arrivals is None or last.arrivals is None:
        return 0.0
    noise = math.sqrt((first.arrivals + last.arrivals) / window)
    if last.arrivals - first.arrivals <= SLOPE_SIGMAS * noise:
        return 0.0
    return max(0.0, min(slopes))


def _gpu_memory(spec: ScalingSpec, replicas: ReplicaState, seen: History, now: float) -> Term:
    share = _memory_share(spec, seen, now)
    if spec.shared:
        return Term(TermName.GPU_MEMORY, None, "GPU memory: not used, since others share the accelerator")
    if share is None:
        return Term(TermName.GPU_MEMORY, None, "GPU memory: not known")
    if share <= spec.memory_max:
        return Term(TermName.GPU_MEMORY, 1, "GPU memory: within gpuMemory.max")
    if _memory_line(seen) is None:
        return Term(TermName.GPU_MEMORY, 1, "GPU memory: above gpuMemory.max, but it does not move with load")
    message = f"GPU memory: it grows with load and passed gpuMemory.max, {round(100 * spec.memory_max)} %"
    # One at a time: how far the next replica relieves the others shows only once it serves.
    coming = bool(replicas.starting or replicas.unschedulable) or replicas.ready < replicas.wanted
    landed = seen.last_up is None or now - seen.last_up > spec.startup_s
    return Term(TermName.GPU_MEMORY, replicas.wanted + (0 if coming or not landed else 1), message)


def _raised(
    spec: ScalingSpec, replicas: ReplicaState, seen: History, *, terms: Iterable[Term], base: int, now: float
) -> tuple[int, Term, Rail, Limit | None]:
    """The count after the rails of the way up, the winning term, the rail that clipped it, and what people see."""
    least = Term(TermName.BOUNDS, spec.min_replicas, f"minReplicas is {spec.min_replicas}")
    winner = max((*terms, least), key=lambda term: term.replicas or 0)
    late = late_replicas(spec, replicas, now)
    limit = _standing_limit(spec, replicas, late)
    wanted = winner.replicas or 0
    # One replacement for all that are late: if it is late too, more of them would only hold more accelerators. In a
    # rollout the late ones are the new spec's, beside old ones that serve, and a replacement would fail like them.
    if late and not replicas.rollout and wanted > replicas.wanted - late:
        winner = replace(winner, message="one replacement for replicas that do not become ready")
        wanted += 1
    if wanted <= base:
        return base, winner, Rail.NONE, limit
    rail, count = Rail.NONE, wanted
    if count > spec.max_replicas:
        rail, count = Rail.MAX_REPLICAS, spec.max_replicas
        limit = limit or Limit(
            Reason.MAX_REPLICAS, "more replicas than scaling.maxReplicas would be needed; raise it if they may be used"
        )
    cap = _accelerator_cap(spec, replicas)
    if cap is not None and count > max(cap, base):
        rail, count = Rail.FREE_ACCELERATORS, max(cap, base)
        limit = Limit(Reason.NO_FREE_ACCELERATOR, _no_room(spec))
    step = _up_limit(base, seen, now)
    if count > step:
        rail, count = Rail.UP_LIMIT, max(step, base)
    return count, winner, rail, limit


def _standing_limit(spec: ScalingSpec, replicas: ReplicaState, late: int) -> Limit | None:
    if replicas.unschedulable and not spec.node_autoscaling:
        return Limit(Reason.NO_FREE_ACCELERATOR, _no_room(spec))
    if late:
        message = (
            "a replica has been starting for more than twice scaling.startup: it is not counted on, and one "
            "replacement is ordered when it is needed"
        )
        return Limit(Reason.CANNOT_BECOME_READY, message)
    return None


def _no_room(spec: ScalingSpec) -> str:
    if spec.accelerators:
        return (
            f"a replica waits for {spec.accelerators} {spec.resource} and no matching one is free: free one or add a "
            "node; no more are ordered until then"
        )
    return "a replica waits for a node with room: free some or add a node; no more are ordered until then"


def _accelerator_cap(spec: ScalingSpec, replicas: ReplicaState) -> int | None:
    if spec.node_autoscaling:
        return None  # pending pods are what makes nodes come
    placed = replicas.ready + len(replicas.starting)
    if replicas.free is None or not spec.accelerators:
        return placed + 1 if replicas.unschedulable else None
    return placed + replicas.free + 1


def _up_limit(base: int, seen: History, now: float) -> int:
    window = seen.up_window
    start = window[1] if window is not None and 0 <= now - window[0] < UP_PERIOD_S else base
    return start + max(UP_REPLICAS, start)


# --- down


@dataclass(frozen=True, slots=True)
class _Lowered:
    replicas: int
    rail: Rail
    message: str
    settled: bool = False


def _lowered(
    spec: ScalingSpec, signals: Signals, replicas: ReplicaState, seen: History, *, enough: int | None, now: float
) -> _Lowered:
    """The count after a step down, if one is due; else the present one and what forbids it."""
    count = replicas.wanted
    forbidden = _unknown(spec, signals, replicas, seen, now)
    if forbidden is not None:
        return _Lowered(count, *forbidden)
    if _stuck_models(signals):
        return _Lowered(
            count, Rail.STUCK_SERVER, "requests wait and none is answered: a stuck server is not an idle one"
        )
    if replicas.rollout:
        return _Lowered(count, Rail.ROLLOUT, "a rollout runs, so no replica is taken away")
    if count <= spec.min_replicas:
        return _Lowered(count, Rail.NONE, "nothing asks for more than minReplicas", settled=not seen.turns)
    if enough is None:
        message = "what fewer replicas could serve is not known, so none is taken away"
        return _Lowered(count, Rail.METRICS, message)
    if enough >= count:
        return _Lowered(count, Rail.NONE, "all replicas are needed")
    rail = Rail.FLAPPING if _flapping(seen, now) else Rail.NONE
    lowest = max(_enough_all_along(spec, seen, count, now), enough, spec.min_replicas)
    if lowest >= count:
        return _Lowered(count, rail, "fewer replicas might do; scaleDown.hold decides")
    target = max(lowest, count - max(1, int(count * DOWN_SHARE)))
    return _Lowered(target, rail, f"{_replicas(target)} would have sufficed during the whole scaleDown.hold")


def _unknown(
    spec: ScalingSpec, signals: Signals, replicas: ReplicaState, seen: History, now: float
) -> tuple[Rail, str] | None:
    """What is not known, and so forbids every reduction."""
    if signals.too_young and replicas.ready == 0:
        return Rail.NONE, "no replica is ready yet, so none is taken away"
    if not signals.configured:
        return Rail.METRICS, "no Prometheus is configured, so replicas stay as they are"
    if not signals.queue.known or not signals.flow.known:
        if seen.missing_since is not None and now - seen.missing_since >= MISSING_LONG_S:
            policy = "Floor" if spec.floor else "Hold"
            return Rail.METRICS_MISSING, f"metrics have long been missing: whenMetricsMissing is {policy}"
        return Rail.METRICS, "the metrics are not known well enough to take a replica away"
    if memory_unknown(spec, seen, now):
        return Rail.METRICS, "GPU memory is not known, so no replica is taken away; gpuMemory.max: 100 ignores it"
    return None


def _enough_all_along(spec: ScalingSpec, seen: History, count: int, now: float) -> int:
    """The most replicas that were needed during the hold; `count` while the hold or the last step forbids a step."""
    hold_for = hold_s(spec, seen, now)
    step_every = min(hold_for, max(hold_for / DOWN_STEPS_PER_HOLD, DOWN_PERIOD_S))
    if (
        seen.watching_since is None
        or now - seen.watching_since < hold_for
        or (seen.last_up is not None and now - seen.last_up < hold_for)
        or (seen.last_down is not None and now - seen.last_down < step_every)
    ):
        return count
    # A slice bears its start, so the one that reaches into the hold counts as well.
    begins = now - hold_for - spec.hold_s / NEED_BUCKETS
    return max((need for at, need in seen.needs if at > begins), default=count)


def _enough(spec: ScalingSpec, signals: Signals, replicas: ReplicaState, seen: History, now: float) -> int | None:
    """The what-if: the fewest replicas that would meet the targets now; None when that can't be told."""
    if not signals.queue.known or not signals.flow.known or _stuck_models(signals):
        return None
    believed = _believed(spec, signals, seen, now)
    if believed is None:
        return None
    # A replica that wasn't measured counts as one whose queue is at its target.
    unmeasured = max(0, replicas.ready - signals.queue.covered) * spec.queue_target
    most = max((count for _, count in believed), default=0.0) + unmeasured
    by_flow = _enough_for_flow(spec, signals, seen)
    by_memory = _enough_for_memory(spec, signals, replicas, seen, now)
    if by_flow is None or by_memory is None:
        return None
    return max(1, _ceil(most / spec.queue_target), by_flow, by_memory)


def _enough_for_flow(spec: ScalingSpec, signals: Signals, seen: History) -> int | None:
    one = capacity(spec, seen)
    scale = 1 / signals.flow.coverage if signals.flow.coverage else 1.0
    if one:
        arrivals = max((signals.completions or 0.0) * scale, (seen.flows[-1].arrivals or 0.0) if seen.flows else 0.0)
        return _ceil(arrivals / (one * DOWN_LOAD))
    # Without a capacity, time at work tells. Each instance at work has a request in the system: an upper bound of it.
    at_work = signals.busy if signals.busy is not None else signals.in_system
    if at_work is None:
        return None
    slots = dict(spec.slots)
    return max((_ceil(busy * scale / (slots.get(model, 1) * DOWN_BUSY)) for model, busy in at_work), default=0)


def _enough_for_memory(
    spec: ScalingSpec, signals: Signals, replicas: ReplicaState, seen: History, now: float
) -> int | None:
    if not spec.memory_matters:
        return 1
    if _memory_share(spec, seen, now) is None:
        return None
    line = _memory_line(seen)
    if line is None:
        return 1  # weights, or an arena that never shrinks: fewer replicas hold no more of it each
    base, per_load = line
    load = _total(signals.in_system)
    if load is None:
        return None
    room = spec.memory_max - base
    if room <= 0:
        return replicas.wanted
    return _ceil(load * _scale(signals.flow) * per_load / room)


# --- small parts


def _stuck_models(signals: Signals) -> list[str]:
    """Models whose requests wait while none is answered."""
    if signals.waiting is None or signals.successes is None:
        return []
    answered = dict(signals.successes)
    return [model for model, count in signals.waiting if count > 0 and answered.get(model, 1.0) <= 0]


def _is_stuck(spec: ScalingSpec, seen: History, now: float) -> bool:
    """Whether it has lasted for longer than the rate's window needs to see a first answer."""
    return seen.stuck_since is not None and now - seen.stuck_since >= max(STUCK_S, 2 * spec.window_s)


def _gauge_is_odd(spec: ScalingSpec, seen: History, now: float) -> bool:
    return seen.odd_gauge is not None and now - seen.odd_gauge[0] >= max(ODD_GAUGE_S, 3 * spec.window_s)


def _believed(spec: ScalingSpec, signals: Signals, seen: History, now: float) -> PerModel | None:
    """The queue, or what the counters say of it where the gauge has long contradicted them."""
    return signals.in_system if _gauge_is_odd(spec, seen, now) else signals.waiting


def _notices(spec: ScalingSpec, seen: History, now: float) -> tuple[Notice, ...]:
    notices = []
    if _is_stuck(spec, seen, now):
        notices.append(Notice("ServerStuck", "requests wait and none is answered; look at the replicas' logs"))
    if _gauge_is_odd(spec, seen, now):
        message = "the queue's gauge stands still while the counters show a short queue; the counters are used instead"
        notices.append(Notice("QueueGaugeIgnored", message))
    if _flapping(seen, now):
        message = "replicas went up and down more than 6 times in 30 minutes; scaleDown.hold is doubled"
        notices.append(Notice("ScalingFlaps", message))
    return tuple(notices)


def _flapping(seen: History, now: float) -> bool:
    return sum(1 for at in seen.turns if now - at < TURNS_S) > TURNS


def _memory_share(spec: ScalingSpec, seen: History, now: float) -> float | None:
    """The last known share; a gauge that comes and goes is held for a while, not for ever."""
    if not spec.memory_matters or seen.memory_known is None or now - seen.memory_known[0] > MEMORY_HELD_S:
        return None
    return seen.memory_known[1]


def _memory_line(seen: History) -> tuple[float, float] | None:
    """Share at no load and share per request in a replica, if memory moves with load; else None."""
    samples = seen.memory
    if len(samples) < MEMORY_FEWEST:
        return None
    shares, loads = [share for _, share, _ in samples], [load for _, _, load in samples]
    if max(shares) - min(shares) < MEMORY_SPREAD or max(loads) < MEMORY_LOAD_SPREAD * min(loads) + _NOTHING:
        return None
    mean_share, mean_load = sum(shares) / len(shares), sum(loads) / len(loads)
    covariance = sum((load - mean_load) * (share - mean_share) for load, share in zip(loads, shares, strict=True))
    load_spread = sum((load - mean_load) ** 2 for load in loads)
    share_spread = sum((share - mean_share) ** 2 for share in shares)
    if min(load_spread, share_spread) <= 0 or covariance / math.sqrt(load_spread * share_spread) < MEMORY_CORRELATION:
        return None
    per_load = covariance / load_spread
    return mean_share - per_load * mean_load, per_load


def _largest(
    slices: tuple[tuple[float, Number], ...], now: float, value: Number, width_s: float, most: int
) -> tuple[tuple[float, Number], ...]:
    """Keep the largest value of each slice of time; a slice bears the instant of its start."""
    if slices and now - slices[-1][0] < width_s:
        start, largest = slices[-1]
        return slices if value <= largest else (*slices[:-1], (start, value))
    return (*slices, (now, value))[-most:]


def _about(flows: Sequence[Flow], at: float, within_s: float) -> Flow | None:
    nearest = min(flows, key=lambda flow: abs(flow.at - at), default=None)
    return nearest if nearest is not None and abs(nearest.at - at) <= within_s else None


def _scale(quality: Quality) -> float:
    """What the sum over the measured replicas is multiplied by to speak for all, where enough were measured."""
    if quality.kind is QualityKind.PARTIAL and quality.coverage >= MIN_COVERAGE:
        return 1 / quality.coverage
    return 1.0


def _total(figures: PerModel | None) -> float | None:
    return None if figures is None else _sum(figures)


def _sum(figures: PerModel) -> float:
    return sum(value for _, value in figures)


def _ceil(value: float) -> int:
    # A tick's rounding error must not order a replica; what is beyond any bound is clipped there.
    return math.ceil(min(value, 1e6) - 1e-6)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}".removesuffix(".0")  # noqa: PLR2004 - two digits


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"
