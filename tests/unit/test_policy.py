"""The scaling decision in tables and by properties."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.api.conditions import Reason
from conch.config import Settings
from conch.scaling.policy import (
    GAP_S,
    MISSING_LONG_S,
    Decision,
    Direction,
    History,
    Quality,
    QualityKind,
    Rail,
    ReplicaState,
    ScalingSpec,
    Signals,
    TermName,
    after_step,
    capacity,
    decide,
    rested,
)
from makers import make_model, make_spec

NOW = 1_800_000_000.0
TICK = 5.0
FRESH = Quality(QualityKind.FRESH, 1, 1)
UNKNOWN = [QualityKind.STALE, QualityKind.MISSING, QualityKind.NON_FINITE]
SPEC = ScalingSpec(min_replicas=1, max_replicas=10, hold_s=300, accelerators=0, capacity=10.0)


def measured(waiting: float = 0.0, rate: float = 0.0, **more: object) -> Signals:
    values: dict[str, object] = {
        "queue": FRESH,
        "flow": FRESH,
        "memory": FRESH,
        "waiting": (("model", waiting),),
        "successes": (("model", rate),),
        "completions": rate,
        "in_system": (("model", max(waiting, rate / 10)),),
        "busy": (("model", rate / 10),),
    }
    return Signals(**{**values, **more})  # type: ignore[arg-type]


def unmeasured(kind: QualityKind = QualityKind.MISSING) -> Signals:
    bad = Quality(kind, 0, 1)
    return Signals(queue=bad, flow=bad, memory=bad)


def serving(count: int, **more: object) -> ReplicaState:
    return ReplicaState(**{"wanted": count, "ready": count, **more})  # type: ignore[arg-type]


class Run:
    """Ticks on made-up signals; every decision is carried out at once and its pods are ready after `startup_s`."""

    def __init__(self, spec: ScalingSpec, count: int, history: History | None = None) -> None:
        self.spec, self.count, self.history, self.now = spec, count, history or History(), NOW
        self.decisions: list[Decision] = []

    def tick(self, signals: Signals, **state: object) -> Decision:
        if signals.queue is FRESH:
            every = Quality(QualityKind.FRESH, self.count, self.count)
            signals = replace(signals, queue=every, flow=every if signals.flow is FRESH else signals.flow)
        decision = decide(self.spec, signals, serving(self.count, **state), self.history, self.now)
        self.history = decision.next_history
        if decision.replicas != self.count or decision.take_back:
            self.history = after_step(self.history, decision, self.count, self.now)
            self.count = decision.replicas
        self.decisions.append(decision)
        self.now += TICK
        return decision

    def ticks(self, seconds: float, signals: Signals, **state: object) -> list[Decision]:
        return [self.tick(signals, **state) for _ in range(math.ceil(seconds / TICK))]


def idle_for_a_hold(spec: ScalingSpec = SPEC, count: int = 5) -> Run:
    run = Run(spec, count)
    run.ticks(spec.hold_s - TICK, measured())
    assert run.count == count
    return run


@pytest.mark.parametrize(
    ("waiting", "replicas", "wanted"),
    [(0, 1, 1), (8, 1, 1), (9, 1, 2), (31, 2, 4), (100, 1, 5), (16, 2, 2)],
)
def test_queue_depth_asks_for_waiting_over_target_and_waits_for_what_it_ordered(
    waiting: int, replicas: int, wanted: int
) -> None:
    decision = decide(replace(SPEC, capacity=None), measured(waiting, 10), serving(replicas), History(), NOW)
    assert decision.replicas == wanted


def test_an_up_step_says_the_term_and_the_figures() -> None:
    decision = decide(replace(SPEC, capacity=None), measured(31, 20), serving(2), History(), NOW)
    assert (decision.direction, decision.term) == (Direction.UP, TermName.QUEUE_DEPTH)
    assert decision.message == "queue depth: 31 requests wait where 2 replicas may hold 16"


def test_row_2_a_backlog_raises_while_averages_look_fine() -> None:
    assert decide(SPEC, measured(waiting=40, rate=10), serving(1), History(), NOW).direction is Direction.UP


def test_replicas_that_have_just_landed_order_no_more_before_their_effect_shows() -> None:
    spec = replace(SPEC, capacity=None)
    just = decide(spec, measured(300, 10), ReplicaState(wanted=5, ready=5, landed=1), History(), NOW)
    later = decide(spec, measured(300, 10), ReplicaState(wanted=5, ready=5, landed=5), History(), NOW)
    assert (just.replicas, later.replicas) == (5, 10)


def test_a_queue_that_drains_before_a_new_replica_lands_orders_none() -> None:
    run = Run(replace(SPEC, capacity=None), 3)
    for waiting in (24, 20, 24):
        run.tick(measured(waiting, 30))
    run.tick(measured(300, 30))
    ordered = run.count
    for waiting in (250, 200, 150, 100, 50):
        run.tick(measured(waiting, 40))
    assert run.count == ordered > 3


def test_a_queue_that_empties_by_failing_its_requests_is_not_draining() -> None:
    run = Run(replace(SPEC, capacity=None), 3)
    for waiting in (24, 300, 250, 200):
        run.tick(measured(waiting, 10, completions=40.0))
        run.now += 10
    assert run.count > 7


def test_two_models_are_judged_by_the_longer_queue_and_it_is_named() -> None:
    signals = replace(measured(rate=10), waiting=(("a", 4.0), ("b", 30.0)))
    decision = decide(replace(SPEC, capacity=None), signals, serving(1), History(), NOW)
    assert decision.replicas == 4
    assert "for b" in decision.message


def test_surge_counts_arrivals_and_not_only_what_a_saturated_server_completes() -> None:
    run = Run(replace(SPEC, queue_target=1000.0), 1)
    for second in range(0, 20, 5):
        decision = run.tick(measured(waiting=20.0 * second, rate=10))
    assert decision.term is TermName.SURGE or run.count > 2


def test_surge_counts_starting_replicas_by_their_own_landing_time() -> None:
    history = History()
    for second in (0, 5, 10, 15):
        decision = decide(
            replace(SPEC, queue_target=1e5), measured(10.0 * second, 10), serving(1), history, NOW + second
        )
        history = decision.next_history
    surge = replace(SPEC, queue_target=1e5)
    alone = decide(surge, measured(200, 10), ReplicaState(wanted=1, ready=1), history, NOW + 20)
    started = (NOW - 40.0, NOW - 40.0)
    helped = decide(surge, measured(200, 10), ReplicaState(wanted=3, ready=1, starting=started), history, NOW + 20)
    by_name = [{term.name: term.replicas or 0 for term in d.terms}[TermName.SURGE] for d in (alone, helped)]
    assert by_name[0] > by_name[1]


def test_a_steady_load_is_not_taken_for_a_ramp() -> None:
    run = Run(replace(SPEC, capacity=10.0), 3)
    run.ticks(200, measured(waiting=0, rate=25))
    assert run.count == 3


def test_a_declared_capacity_is_never_believed_beyond_a_quarter_above_what_was_seen() -> None:
    run = Run(replace(SPEC, capacity=100.0, max_replicas=1), 1)
    run.ticks(120, measured(waiting=20, rate=8))
    assert capacity(run.spec, run.history) == pytest.approx(10.0)


def test_a_capacity_is_observed_only_once_the_load_fills_the_whole_window() -> None:
    run = Run(replace(SPEC, capacity=None, max_replicas=1), 1)
    run.ticks(20, measured(waiting=20, rate=3))
    assert capacity(run.spec, run.history) is None
    run.ticks(40, measured(waiting=20, rate=9))
    assert capacity(run.spec, run.history) == pytest.approx(9.0)


def test_replicas_that_land_during_the_load_do_not_make_the_others_look_slow() -> None:
    run = Run(replace(SPEC, capacity=None, queue_target=1e6), 1)
    for second in range(0, 200, 5):
        run.count = 1 if second < 20 else 5
        run.tick(measured(waiting=500, rate=10 if second < 20 else min(50, 10 + 1.3 * (second - 20))))
    assert capacity(run.spec, run.history) == pytest.approx(10.0)


# --- rails of the way up


def test_rail_up_at_most_four_or_double_in_fifteen_seconds() -> None:
    run = Run(replace(SPEC, max_replicas=100), 10)
    flood = measured(waiting=0, rate=5000)
    decision = run.tick(flood)
    assert (decision.replicas, decision.rail) == (20, Rail.UP_LIMIT)
    assert run.tick(flood).replicas == 20
    run.now += 15
    assert run.tick(flood).replicas == 40


def test_rail_orders_stop_at_the_free_accelerators_and_one_pending_pod() -> None:
    spec = replace(SPEC, accelerators=1, memory_max=1.0)
    decision = decide(spec, measured(waiting=80, rate=10), serving(2, free=1), History(), NOW)
    assert (decision.replicas, decision.rail) == (4, Rail.FREE_ACCELERATORS)
    assert decision.limit is not None
    assert decision.limit.reason is Reason.NO_FREE_ACCELERATOR


@pytest.mark.parametrize("free", [0, None])
def test_rail_pods_pending_for_lack_of_accelerators_are_not_ordered_again(free: int | None) -> None:
    spec = replace(SPEC, accelerators=1, memory_max=1.0)
    state = ReplicaState(wanted=3, ready=2, unschedulable=1, free=free)
    decision = decide(spec, measured(waiting=80, rate=10), state, History(), NOW)
    assert (decision.replicas, decision.direction) == (3, Direction.HOLD)
    assert decision.limit is not None
    assert "nvidia.com/gpu" in decision.limit.message


def test_node_autoscaling_wants_pending_pods_up_to_the_order() -> None:
    spec = replace(SPEC, accelerators=1, memory_max=1.0, node_autoscaling=True)
    state = ReplicaState(wanted=3, ready=2, unschedulable=1, free=0)
    assert decide(spec, measured(waiting=80, rate=10), state, History(), NOW).replicas > 3


def test_rail_a_late_replica_of_a_rollout_gets_no_replacement() -> None:
    surge = ReplicaState(wanted=1, ready=1, starting=(NOW - 2 * SPEC.startup_s - 1,), rollout=True)
    assert decide(SPEC, measured(waiting=0, rate=1), surge, History(), NOW).replicas == 1


def test_rail_a_late_replica_gets_one_replacement_and_no_cascade() -> None:
    spec = replace(SPEC, capacity=None)
    late = NOW - 2 * spec.startup_s - 1
    first = decide(spec, measured(waiting=24, rate=10), ReplicaState(3, 2, starting=(late,)), History(), NOW)
    assert first.replicas == 4
    assert first.limit is not None
    assert first.limit.reason is Reason.CANNOT_BECOME_READY
    second = decide(spec, measured(waiting=24, rate=10), ReplicaState(4, 2, starting=(late, late)), History(), NOW)
    assert second.replicas == 4
    recovered = decide(spec, measured(waiting=8, rate=10), ReplicaState(4, 3, starting=(late,)), History(), NOW)
    assert recovered.replicas == 4


def test_max_replicas_clips_and_says_so() -> None:
    decision = decide(replace(SPEC, max_replicas=2), measured(waiting=80, rate=10), serving(2), History(), NOW)
    assert (decision.replicas, decision.rail) == (2, Rail.MAX_REPLICAS)
    assert decision.limit is not None
    assert "maxReplicas" in decision.limit.message


# --- rails of the way down


def test_row_13_replicas_go_one_step_at_a_time_after_a_hold() -> None:
    run = idle_for_a_hold()
    run.ticks(400, measured())
    counts = [5, *(d.replicas for d in run.decisions)]
    assert run.count == 1
    assert all(before - after <= 1 for before, after in pairwise(counts))


def test_row_29_a_large_service_loses_a_tenth_at_a_time() -> None:
    run = Run(replace(SPEC, max_replicas=100), 50)
    run.ticks(300 + 2 * TICK, measured())
    assert run.count == 45


def test_row_30_a_replica_goes_only_if_the_rest_would_carry_the_load() -> None:
    run = Run(SPEC, 2)
    run.ticks(1000, measured(waiting=0, rate=9))
    assert run.count == 2
    run.ticks(400, measured(waiting=0, rate=7))
    assert run.count == 1


def test_without_a_capacity_time_at_work_decides_what_the_rest_would_carry() -> None:
    spec = replace(SPEC, capacity=None)
    busy, idle = Run(spec, 2), Run(spec, 2)
    busy.ticks(1000, measured(rate=9, busy=(("model", 0.9),)))
    idle.ticks(1000, measured(rate=9, busy=(("model", 0.5),)))
    assert (busy.count, idle.count) == (2, 1)


def test_row_16_no_traffic_is_zero_and_scales_down() -> None:
    run = idle_for_a_hold(count=2)
    run.ticks(100, measured(0, 0, busy=(), in_system=()))
    assert run.count == 1


@pytest.mark.parametrize("kind", UNKNOWN)
def test_row_14_and_15_and_22_nothing_unknown_reduces(kind: QualityKind) -> None:
    run = idle_for_a_hold()
    decisions = run.ticks(3000, unmeasured(kind))
    assert run.count == 5
    assert decisions[0].rail is Rail.METRICS
    assert decisions[-1].rail is Rail.METRICS_MISSING


@pytest.mark.parametrize("kind", UNKNOWN)
def test_row_22_one_unknown_signal_of_several_forbids_a_reduction(kind: QualityKind) -> None:
    bad = Quality(kind, 0, 1)
    for signals in (replace(measured(), queue=bad), replace(measured(), flow=bad)):
        run = idle_for_a_hold()
        run.ticks(1000, signals)
        assert run.count == 5


def test_row_27_fallback_raises_to_the_floor_and_never_lowers() -> None:
    spec = replace(SPEC, floor=True, min_replicas=3)
    run = Run(spec, 5)
    run.ticks(MISSING_LONG_S + 60, unmeasured())
    assert run.count == 5
    assert "Floor" in run.decisions[-1].message
    assert Run(spec, 2).tick(unmeasured()).replicas == 3


def test_row_17_bounds_hold_without_any_metric() -> None:
    for count, wanted in ((0, 1), (12, 10)):
        decision = decide(SPEC, unmeasured(), serving(count), History(), NOW)
        assert (decision.replicas, decision.term) == (wanted, TermName.BOUNDS)


def test_row_24_restart_reduces_nothing_for_a_hold_and_then_does() -> None:
    run = Run(SPEC, 5, History.rebuilt(NOW - 1000, None))
    run.ticks(SPEC.hold_s - TICK, measured())
    assert run.count == 5
    run.ticks(200, measured())
    assert run.count == 1


def test_rail_restart_a_users_bounds_act_at_once() -> None:
    assert decide(replace(SPEC, max_replicas=2), measured(), serving(5), History(), NOW).replicas == 2
    assert decide(replace(SPEC, min_replicas=7), measured(), serving(5), History(), NOW).replicas == 7


def test_a_step_up_keeps_its_replicas_for_a_hold_also_across_a_restart() -> None:
    run = idle_for_a_hold()
    run.history = replace(run.history, last_up=run.now - 100)
    run.ticks(190, measured())
    assert run.count == 5


def test_row_8_a_lost_scrape_only_pauses_the_hold_and_a_long_gap_restarts_it() -> None:
    short, long = idle_for_a_hold(), idle_for_a_hold()
    short.tick(unmeasured())
    short.ticks(2 * TICK, measured())
    assert short.count == 4
    long.ticks(GAP_S + 2 * TICK, unmeasured())
    long.ticks(200, measured())
    assert long.count == 5


def test_rail_partial_coverage_scales_up_by_coverage() -> None:
    partial = Quality(QualityKind.PARTIAL, 3, 4)
    decision = decide(replace(SPEC, capacity=None), measured(30, 10, queue=partial), serving(4), History(), NOW)
    assert decision.replicas == 5


def test_rail_partial_below_sixty_percent_counts_missing_pods_as_zero_for_up() -> None:
    half = Quality(QualityKind.PARTIAL, 2, 4)
    decision = decide(replace(SPEC, capacity=None), measured(30, 10, queue=half), serving(4), History(), NOW)
    assert decision.replicas == 4


def test_rail_partial_counts_missing_pods_as_at_target_for_down() -> None:
    partial = Quality(QualityKind.PARTIAL, 3, 5)
    decision = decide(SPEC, measured(8, 1, queue=partial, flow=partial), serving(5), History(), NOW)
    assert decision.next_history.needs == ((NOW, 3),)


def test_rail_half_of_the_pods_missing_never_reduces() -> None:
    half = Quality(QualityKind.PARTIAL, 2, 4)
    run = Run(SPEC, 4)
    run.ticks(2000, measured(queue=half, flow=half))
    assert run.count == 4


def test_rail_a_stuck_server_is_not_idle_and_is_told_once_it_lasts() -> None:
    run = Run(SPEC, 5)
    stuck = measured(waiting=3, rate=0)
    decisions = run.ticks(1000, stuck)
    assert run.count == 5
    assert decisions[5].notices == ()
    assert decisions[-1].rail is Rail.STUCK_SERVER
    assert [notice.reason for notice in decisions[-1].notices] == ["ServerStuck"]


def test_row_12_and_19_a_gauge_that_never_resets_is_checked_against_the_counters() -> None:
    run = Run(SPEC, 4)
    decisions = run.ticks(1500, measured(waiting=30, rate=4, in_system=(("model", 0.4),)))
    assert run.count == 1
    assert "QueueGaugeIgnored" in [notice.reason for notice in decisions[-1].notices]


def test_rail_no_reduction_while_a_rollout_runs() -> None:
    run = idle_for_a_hold()
    assert run.tick(measured(), rollout=True).rail is Rail.ROLLOUT
    run.ticks(500, measured(), rollout=True)
    assert run.count == 5


def test_rail_more_than_six_turns_in_half_an_hour_double_the_hold() -> None:
    run = idle_for_a_hold()
    run.history = replace(run.history, turns=tuple(run.now - 60 * i for i in range(7, 0, -1)))
    decisions = run.ticks(290, measured())
    assert run.count == 5
    assert [notice.reason for notice in decisions[0].notices] == ["ScalingFlaps"]
    run.ticks(300, measured())
    assert run.count < 5


def test_turns_are_counted_only_where_the_direction_changes() -> None:
    run = Run(SPEC, 5)
    down = decide(SPEC, measured(), serving(12), History(), NOW)
    up = decide(SPEC, measured(), serving(0), History(), NOW)
    for decision in (down, down, up, up, down):
        run.history = after_step(run.history, decision, 5, NOW)
    assert len(run.history.turns) == 2


# --- memory


def loaded(load: float, share: float | None) -> Signals:
    return measured(0, load, in_system=(("model", load),), memory_share=share)


MEMORY = replace(SPEC, accelerators=1, capacity=1000.0)


def test_row_10_memory_that_never_falls_blocks_nothing_and_is_no_idleness() -> None:
    run = Run(MEMORY, 3)
    run.ticks(600, loaded(0.5, 0.97))
    assert run.count < 3
    message = {term.name: term.message for term in run.decisions[-1].terms}[TermName.GPU_MEMORY]
    assert "does not move with load" in message


def test_memory_that_grows_with_load_raises_by_one() -> None:
    run = Run(replace(MEMORY, capacity=1e6), 2)
    for step in range(60):
        run.tick(loaded(step, 0.5 + 0.008 * step))
    assert run.count >= 3
    ups = [d for d in run.decisions if d.direction is Direction.UP]
    assert {d.term for d in ups} == {TermName.GPU_MEMORY}


def test_memory_of_the_survivors_blocks_a_reduction_only_where_it_would_pass_the_limit() -> None:
    for share_per_request, count in ((0.02, 3), (0.002, 1)):
        run = Run(replace(MEMORY, capacity=1e6, memory_max=0.8), 4)
        for step in range(400):
            load = 60.0 + 10 * (step % 2 if step % 6 < 3 else 0)
            run.tick(loaded(load, 0.2 + share_per_request * load / run.count))
        assert run.count == count


def test_row_8_memory_that_comes_and_goes_is_held_for_a_while_and_then_unknown() -> None:
    run = idle_for_a_hold(replace(SPEC, accelerators=1))
    assert run.count == 5
    seen = measured(memory_share=0.5)
    fresh = Run(replace(SPEC, accelerators=1), 5)
    fresh.ticks(290, seen)
    fresh.ticks(30, measured())
    assert fresh.count == 4
    gone = Run(replace(SPEC, accelerators=1), 5)
    gone.ticks(100, seen)
    gone.ticks(3000, measured(memory=Quality(QualityKind.MISSING, 0, 5)))
    assert "GPU memory is not known" in gone.decisions[-1].message


def test_unknown_memory_can_be_switched_off() -> None:
    run = Run(replace(SPEC, accelerators=1, memory_max=1.0), 5)
    run.ticks(1000, measured())
    assert run.count == 1


# --- who else decides


def test_row_39_an_autoscaler_that_targets_us_stops_every_write() -> None:
    state = serving(3, second_scaler="HorizontalPodAutoscaler theirs")
    decision = decide(SPEC, measured(waiting=500, rate=1), state, History(), NOW)
    assert (decision.replicas, decision.rail) == (3, Rail.SECOND_SCALER)
    assert decision.limit is not None
    assert "HorizontalPodAutoscaler theirs" in decision.limit.message


def test_r1_a_persons_scale_holds_and_is_then_taken_back() -> None:
    run = Run(SPEC, 7)
    held = run.ticks(SPEC.hold_s, measured(), foreign="kubectl")
    assert {d.rail for d in held} == {Rail.PERSON}
    assert run.count == 7
    taken = run.tick(measured(), foreign="kubectl")
    assert taken.take_back
    assert run.history.taken_back == (run.now - TICK,)


def test_row_39_whoever_changes_replicas_again_and_again_is_not_fought() -> None:
    history = History(taken_back=(NOW - 900, NOW - 400))
    decision = decide(SPEC, measured(waiting=500, rate=1), serving(3, foreign="helm"), history, NOW)
    assert (decision.replicas, decision.rail) == (3, Rail.SECOND_SCALER)
    assert "helm" in decision.message


def test_external_never_asks_for_anything() -> None:
    spec = replace(SPEC, mode="External")
    for count, waiting in ((0, 0), (3, 1000), (50, 0)):
        assert decide(spec, measured(waiting, 5), serving(count), History(), NOW).replicas == count


def test_advisory_decides_like_automatic_whoever_owns_replicas() -> None:
    spec = replace(SPEC, mode="Advisory")
    state = serving(1, second_scaler="HorizontalPodAutoscaler theirs", foreign="kubectl")
    assert decide(spec, measured(waiting=40, rate=10), state, History(), NOW).direction is Direction.UP


def test_row_3_of_scaling_without_prometheus_nothing_is_reduced() -> None:
    run = Run(SPEC, 5)
    run.ticks(2000, replace(unmeasured(), configured=False))
    assert run.count == 5


def test_a_rested_history_goes_on_where_it_was() -> None:
    run = Run(SPEC, 1)
    run.ticks(10, measured())
    rest = rested(run.history, run.now + 5000)
    assert rest.known_at == run.now + 5000
    later = decide(SPEC, measured(), serving(1), rest, run.now + 5005)
    assert later.next_history.watching_since == NOW


def test_the_spec_is_read_with_units_and_instances() -> None:
    spec = ScalingSpec.of(
        make_spec({"scaling.gpuMemory.max": 80, "models[0].instances.count": 2, "accelerator.count": 2}),
        Settings(),
    )
    assert (spec.memory_max, spec.slots, spec.accelerators) == (0.8, (("resnet50", 4),), 2)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ({"instances": {"count": 2}}, 4),
        ({"instances": {"count": 2, "kind": "CPU"}}, 2),
        ({"instances": {"kind": "Model"}}, 1),
        ({"format": "OpenVINO"}, 1),
        ({"instances": {"count": 3, "gpus": [1]}}, 3),
        ({"instanceGroups": [{"name": "a", "count": 2}, {"name": "b", "kind": "CPU"}]}, 5),
    ],
)
def test_the_instances_of_every_group_work_side_by_side(model: dict[str, Any], count: int) -> None:
    spec = make_spec(models=[make_model(**model)], accelerator={"count": 2})
    assert ScalingSpec.of(spec, Settings()).slots == (("resnet50", count),)


# --- properties

kinds = st.sampled_from(QualityKind)
figures = st.one_of(st.none(), st.floats(0, 1e6).map(lambda value: (("model", value),)))


@st.composite
def qualities(draw: st.DrawFn) -> Quality:
    expected = draw(st.integers(0, 20))
    return Quality(draw(kinds), draw(st.integers(0, expected)), expected)


@st.composite
def any_signals(draw: st.DrawFn) -> Signals:
    return Signals(
        queue=draw(qualities()),
        flow=draw(qualities()),
        memory=draw(qualities()),
        waiting=draw(figures),
        successes=draw(figures),
        completions=draw(st.one_of(st.none(), st.floats(0, 1e6))),
        in_system=draw(figures),
        busy=draw(figures),
        memory_share=draw(st.one_of(st.none(), st.floats(0.001, 1))),
        too_young=draw(st.booleans()),
    )


@st.composite
def any_state(draw: st.DrawFn) -> ReplicaState:
    return ReplicaState(
        wanted=draw(st.integers(0, 30)),
        ready=draw(st.integers(0, 30)),
        starting=tuple(draw(st.lists(st.floats(NOW - 1000, NOW), max_size=5))),
        unschedulable=draw(st.integers(0, 3)),
        free=draw(st.one_of(st.none(), st.integers(0, 20))),
        rollout=draw(st.booleans()),
    )


@st.composite
def any_spec(draw: st.DrawFn) -> ScalingSpec:
    least = draw(st.integers(1, 10))
    return ScalingSpec(
        min_replicas=least,
        max_replicas=draw(st.integers(least, 25)),
        queue_target=draw(st.floats(0.1, 100)),
        capacity=draw(st.one_of(st.none(), st.floats(0.1, 1000))),
        hold_s=draw(st.floats(1, 600)),
        floor=draw(st.booleans()),
        accelerators=draw(st.integers(0, 2)),
        node_autoscaling=draw(st.booleans()),
    )


def _history(spec: ScalingSpec, signals: Signals) -> History:
    run = Run(spec, spec.min_replicas)
    run.ticks(60, signals)
    return replace(run.history, watching_since=NOW - 10_000)


@given(any_spec(), any_signals(), any_signals(), any_state())
def test_every_decision_is_within_the_bounds_and_the_up_limit_and_says_why(
    spec: ScalingSpec, before: Signals, signals: Signals, state: ReplicaState
) -> None:
    decision = decide(spec, signals, state, _history(spec, before), NOW + 60)
    assert spec.min_replicas <= decision.replicas <= spec.max_replicas
    base = min(max(state.wanted, spec.min_replicas), spec.max_replicas)
    assert decision.replicas <= base + max(4, base)
    texts = [decision.message, *(term.message for term in decision.terms)]
    assert all(text and "nan" not in text and "inf" not in text.replace("infer", "") for text in texts)
    assert all(len(text) < 300 for text in texts)


@given(any_spec(), any_signals(), any_signals(), any_state())
def test_nothing_unknown_ever_reduces_below_the_bounds_clamp(
    spec: ScalingSpec, before: Signals, signals: Signals, state: ReplicaState
) -> None:
    decision = decide(spec, signals, state, _history(spec, before), NOW + 60)
    memory_gone = spec.memory_matters and decision.next_history.memory_known is None
    if not signals.queue.known or not signals.flow.known or memory_gone or signals.waiting is None or state.rollout:
        assert decision.replicas >= min(state.wanted, spec.max_replicas)


@given(any_spec(), st.lists(any_signals(), min_size=1, max_size=30), st.integers(1, 25))
def test_nothing_is_reduced_within_a_hold_after_the_start(spec: ScalingSpec, many: list[Signals], count: int) -> None:
    start = min(max(count, spec.min_replicas), spec.max_replicas)
    spec = replace(spec, hold_s=600)
    run = Run(spec, start)
    for signals in many:
        before = run.count
        assert run.tick(signals).replicas >= before


@given(st.floats(0, 1000), st.floats(0, 1000), st.floats(0, 100), st.integers(1, 10))
def test_more_waiting_requests_never_ask_for_fewer_replicas(a: float, b: float, rate: float, count: int) -> None:
    few, many = sorted((a, b))
    fewer = decide(SPEC, measured(few, rate), serving(count), History(), NOW).replicas
    more = decide(SPEC, measured(many, rate), serving(count), History(), NOW).replicas
    assert fewer <= more


@given(any_spec(), st.lists(any_signals(), max_size=40))
def test_the_history_stays_bounded(spec: ScalingSpec, many: list[Signals]) -> None:
    run = Run(spec, spec.min_replicas)
    for signals in many * 10:
        run.tick(signals)
    history = run.history
    sizes = (history.needs, history.flows, history.observed, history.memory, history.turns, history.taken_back)
    assert all(len(part) <= 80 for part in sizes)
