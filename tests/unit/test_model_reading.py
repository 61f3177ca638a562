"""When a pod is asked for what it has loaded: once for each template, never by two at once, seldom when it is "
"silent."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from child_makers import make_deployment, make_pod
from conch.api.inferenceservice import parse_service
from conch.reconcile.observation import NOTHING
from conch.reconcile.reading import (
    AT_ONCE,
    BUSY_PER_S,
    BUSY_RETRY_S,
    FIRST_RETRY_S,
    LAST_RETRY_S,
    MAX_VERSIONS,
    Look,
    ModelReader,
)
from conch.reconcile.status import StatusInputs, build_status
from conch.triton.modelconfig import model_config
from conch.workload.deployment import template_inputs
from fake_server import FakeServer, make_loaded
from makers import make_service, stored

if TYPE_CHECKING:
    from collections.abc import Mapping

    from conch.api.inferenceservice import InferenceServiceSpec

Object = dict[str, Any]
NOW = "2026-11-30T10:00:00Z"
SERVICE = stored(make_service({"models[0].maxBatchSize": 8}))
OTHER = stored(make_service({"models[0].maxBatchSize": 16}))


@dataclass
class World:
    """A reader, a server, a clock, and the children of one service."""

    service: Object = field(default_factory=lambda: dict(SERVICE))
    server: FakeServer = field(default_factory=FakeServer)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.reader = ModelReader(self.server, clock=lambda: self.now)
        self.deployment = make_deployment(self.service)
        self.pods = [make_pod(ready_at="10.0.0.1", of=self.deployment)]
        self.loads()

    @property
    def spec(self) -> InferenceServiceSpec:
        return parse_service(self.service)

    def loads(self, **changes: Any) -> None:
        """The server has what is asked for, some fields changed."""
        config = model_config(self.spec.models[0], gpu=True)
        self.server.loaded = {"resnet50": make_loaded(config, **changes)}

    async def look(self) -> Look:
        children = {"Deployment": [self.deployment], "Pod": self.pods}
        return await self.reader.look(self.service, self.spec, children)

    async def status(self) -> Object:
        """A pass: what it would write becomes the service's status."""
        inputs = StatusInputs(
            service=self.service,
            spec=self.spec,
            template_inputs=template_inputs(self.spec),
            observation=_observed(self.deployment, ready=bool(self.pods)),
            scaling=None,
            strategy=None,
            free_accelerators=None,
            error=None,
            look=await self.look(),
        )
        status = build_status(inputs, NOW)
        self.service = {**self.service, "status": status}
        return status


def _observed(deployment: Mapping[str, Any], *, ready: bool) -> Any:
    inputs = deployment["metadata"]["annotations"]["conch.dev/template-inputs"]
    return replace(NOTHING, exists=True, wanted=1, ready=int(ready), rolled_out=ready, template_inputs=inputs)


def drift(status: Object) -> tuple[str, str, str]:
    condition = next(one for one in status["conditions"] if one["type"] == "ModelConfigDrift")
    return condition["status"], condition["reason"], condition["message"]


async def test_a_ready_pod_is_asked_once_for_its_template() -> None:
    world = World()
    for _ in range(3):
        look = await world.look()
        assert look.reading is not None
        assert (look.reading.drift, look.reading.error, look.again_after_s) == ("", "", None)
        world.now += 3600
    assert world.server.asked == ["10.0.0.1"]


async def test_another_template_is_asked_anew_and_only_of_its_own_pods() -> None:
    world = World()
    first = await world.look()
    world.service, world.deployment = dict(OTHER), make_deployment(OTHER)
    world.loads()
    look = await world.look()
    # The old pod is ready still; it says nothing of the new template.
    assert (look.reading, look.again_after_s) == (None, None)
    assert look.revision != first.revision
    world.pods.append(make_pod("new", ready_at="10.0.0.2", of=world.deployment))
    look = await world.look()
    assert look.reading is not None
    assert world.server.asked == ["10.0.0.1", "10.0.0.2"]


async def test_a_restart_asks_nobody_and_keeps_the_words() -> None:
    world = World()
    world.loads(max_batch_size=1)
    before = await world.status()
    assert drift(before)[:2] == ("True", "ConfigDiffers")
    world.reader = ModelReader(world.server, clock=lambda: 0.0)
    assert await world.status() == before
    assert len(world.server.asked) == 1


async def test_a_restart_keeps_the_words_of_servers_that_cannot_be_read_until_their_turn_comes() -> None:
    world = World()
    world.server.silent = "a ready server can't be reached on port 8000"
    before = await world.status()
    # Of a thousand such services most wait for a turn at first.
    others = [World(server=FakeServer(held=asyncio.Event())) for _ in range(AT_ONCE)]
    world.reader = ModelReader(others[0].server, clock=lambda: 0.0)
    for number, other in enumerate(others):
        other.reader, other.server = world.reader, others[0].server
        other.service = {**other.service, "metadata": {**other.service["metadata"], "namespace": f"n{number}"}}
    asking = [asyncio.ensure_future(other.look()) for other in others]
    await asyncio.sleep(0)
    assert await world.status() == before
    for task in asking:
        task.cancel()
    # What a new spec's servers say is another matter.
    other_spec = {**OTHER, "metadata": {**OTHER["metadata"], "generation": 2}, "status": before}
    world.service, world.deployment = other_spec, make_deployment(OTHER)
    assert drift(await world.status())[1] == "ConfigNotRead"


async def test_r11_a_pass_that_learns_nothing_new_writes_nothing() -> None:
    world = World()
    pods, world.pods = world.pods, []
    starting = await world.status()
    assert drift(starting) == ("Unknown", "ConfigNotRead", "No pod of this spec was ready yet.")
    assert await world.status() == starting
    world.pods = pods
    ready = await world.status()
    # One write brings both that it is ready and what it has loaded.
    assert drift(ready)[:2] == ("False", "ConfigAsWritten")
    assert await world.status() == ready


async def test_row_81_a_smaller_batch_in_the_server_is_a_condition_that_says_what_to_write() -> None:
    world = World()
    world.loads(max_batch_size=1)
    status, _, message = drift(await world.status())
    assert status == "True"
    assert message == (
        'Model "resnet50": spec.models[0].maxBatchSize is 8 in the spec and 1 in the server: set it to 1, or build the '
        "model for batches of 8."
    )


async def test_the_status_shows_each_model_as_its_server_has_it() -> None:
    world = World()
    status = await world.status()
    assert status["models"] == [{"name": "resnet50", "versions": ["1"], "maxBatchSize": 8, "ready": True}]
    world.pods = []
    assert (await world.status())["models"][0]["ready"] is False


async def test_a_silent_pod_is_unknown_and_is_asked_again_with_back_off_only() -> None:
    world = World()
    world.server.silent = "a ready server can't be reached on port 8000"
    status = await world.status()
    message = "What the servers have loaded isn't known: a ready server can't be reached on port 8000."
    assert drift(status) == ("Unknown", "ConfigUnreadable", message)
    assert "modelsRevision" not in status
    waits = []
    for _ in range(12):
        look = await world.look()
        assert look.again_after_s is not None
        waits.append(look.again_after_s)
        asked = len(world.server.asked)
        world.now += look.again_after_s / 2
        assert (await world.look()).again_after_s == pytest.approx(look.again_after_s / 2)
        assert len(world.server.asked) == asked
        world.now += look.again_after_s / 2
        await world.look()
        assert len(world.server.asked) == asked + 1
    assert waits[0] == FIRST_RETRY_S
    assert waits[-1] == LAST_RETRY_S
    assert await world.status() == status
    world.server.silent = ""
    world.now += LAST_RETRY_S
    assert drift(await world.status())[:2] == ("False", "ConfigAsWritten")


async def test_the_next_try_asks_another_pod() -> None:
    world = World()
    world.pods.append(make_pod("b", created="2026-01-02T00:00:00Z", ready_at="10.0.0.2", of=world.deployment))
    world.server.silent = "x"
    for _ in range(3):
        look = await world.look()
        world.now += look.again_after_s or 0.0
    assert world.server.asked == ["10.0.0.1", "10.0.0.2", "10.0.0.1"]


async def test_only_so_many_are_asked_at_once_and_the_others_come_back_soon() -> None:
    server = FakeServer(held=asyncio.Event())
    worlds = [World(server=server) for _ in range(AT_ONCE + 3)]
    reader = worlds[0].reader
    for number, world in enumerate(worlds):
        world.reader = reader
        world.service = {**world.service, "metadata": {**world.service["metadata"], "namespace": f"n{number}"}}
    asking = [asyncio.ensure_future(world.look()) for world in worlds]
    await asyncio.sleep(0)
    assert len(server.asked) == AT_ONCE
    await asyncio.wait(asking[AT_ONCE:])
    done = [task.result() for task in asking if task.done()]
    # The more wait, the later each comes back.
    assert [look.again_after_s for look in done] == [BUSY_RETRY_S + number / BUSY_PER_S for number in (1, 2, 3)]
    assert server.held is not None
    server.held.set()
    await asyncio.gather(*asking)
    assert len(server.asked) == AT_ONCE


async def test_many_that_become_ready_at_once_are_all_asked_in_one_pass_while_servers_answer_quickly() -> None:
    server = FakeServer(held=asyncio.Event())
    worlds = [World(server=server) for _ in range(3 * AT_ONCE)]
    for number, world in enumerate(worlds):
        world.reader = worlds[0].reader
        world.service = {**world.service, "metadata": {**world.service["metadata"], "namespace": f"n{number}"}}
    asking = [asyncio.ensure_future(world.look()) for world in worlds]
    await asyncio.sleep(0)
    assert len(server.asked) == AT_ONCE
    assert server.held is not None
    server.held.set()
    looks = await asyncio.gather(*asking)
    assert all(look.reading is not None and not look.reading.error for look in looks)


@pytest.mark.parametrize("silent", ["", "x"])
async def test_where_servers_are_silent_nobody_waits_for_a_turn(silent: str) -> None:
    server = FakeServer(silent=silent)
    worlds = [World(server=server) for _ in range(AT_ONCE + 2)]
    for number, world in enumerate(worlds):
        world.reader = worlds[0].reader
        world.service = {**world.service, "metadata": {**world.service["metadata"], "namespace": f"n{number}"}}
    await worlds[0].look()
    server.held = asyncio.Event()
    asking = [asyncio.ensure_future(world.look()) for world in worlds[1:]]
    for _ in range(3):
        await asyncio.sleep(0)
    assert asking[-1].done() is bool(silent)
    server.held.set()
    await asyncio.gather(*asking)


@pytest.mark.parametrize(
    "pod",
    [
        {},
        {"ready_at": ""},
        {"ready_at": "10.0.0.9", "deleted": True},
    ],
)
async def test_pods_that_are_not_ready_have_no_address_or_go_are_not_asked(pod: dict[str, Any]) -> None:
    world = World()
    world.pods = [make_pod(**pod, of=world.deployment)]
    look = await world.look()
    assert (look.reading, look.again_after_s, world.server.asked) == (None, None, [])


async def test_without_a_deployment_or_a_spec_nothing_is_asked() -> None:
    world = World()
    assert await world.reader.look(world.service, world.spec, {"Pod": world.pods}) == Look()
    look = await world.reader.look(world.service, None, {"Deployment": [world.deployment], "Pod": world.pods})
    assert look.reading is None
    assert world.server.asked == []


async def test_a_service_that_is_gone_is_forgotten() -> None:
    world = World()
    await world.look()
    world.reader.forget("default", "vision")
    await world.look()
    assert len(world.server.asked) == 2


async def test_a_model_of_more_versions_than_a_status_holds_is_told_by_its_newest() -> None:
    world = World()
    numbers = [str(number) for number in range(1, 101)]
    config = model_config(world.spec.models[0], gpu=True)
    world.server.loaded = {"resnet50": make_loaded(config, versions=sorted(numbers))}
    told = (await world.status())["models"][0]["versions"]
    assert told == numbers[-MAX_VERSIONS:], "the API server would refuse a longer list, and with it the whole status"


async def test_a_plan_that_nobody_can_read_is_unknown_and_not_as_written() -> None:
    world = World()
    template = world.deployment["spec"]["template"]
    template["metadata"]["annotations"] = {"conch.dev/model-plan": "{}"}
    world.pods = [make_pod(ready_at="10.0.0.1", of=world.deployment)]
    status, reason, message = drift(await world.status())
    assert (status, reason) == ("Unknown", "ConfigUnreadable")
    assert "plan" in message
    assert world.server.asked == []


@pytest.mark.parametrize(("updated", "asked"), [(1, ["10.0.0.1"]), (0, [])])
async def test_pods_whose_image_an_admission_webhook_rewrote_are_asked_once_all_are_of_the_template(
    updated: int, asked: list[str]
) -> None:
    world = World()
    world.deployment = make_deployment(world.service, updated=updated)
    pod = copy.deepcopy(make_pod(ready_at="10.0.0.1", of=world.deployment))
    for container in pod["spec"]["containers"]:
        container["image"] = f"mirror.example/{container['image']}@sha256:{'0' * 64}"
    world.pods = [pod]
    await world.look()
    assert world.server.asked == asked


async def test_whoever_has_stopped_waiting_delays_nobody() -> None:
    server = FakeServer(held=asyncio.Event())
    worlds = [World(server=server) for _ in range(AT_ONCE + 2)]
    for number, world in enumerate(worlds):
        world.reader = worlds[0].reader
        world.service = {**world.service, "metadata": {**world.service["metadata"], "namespace": f"n{number}"}}
    asking = [asyncio.ensure_future(world.look()) for world in worlds[:AT_ONCE]]
    await asyncio.sleep(0)
    gone, waits = worlds[-2:]
    assert (await gone.look()).again_after_s == BUSY_RETRY_S + 1 / BUSY_PER_S
    gone.pods = []  # it is scaled to nothing
    await gone.look()
    assert (await waits.look()).again_after_s == BUSY_RETRY_S + 1 / BUSY_PER_S
    assert server.held is not None
    server.held.set()
    await asyncio.gather(*asking)
