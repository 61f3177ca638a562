"""The ends of the long stories: nothing is written in a minute of rest, and a fight is limited.

Both began with the shared operator, so the other files' tests, dropped watches included, ran beside them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from stories import port_is_back, until, versions

if TYPE_CHECKING:
    from apiserver import ApiServer
    from fault_proxy import FaultProxy, Request
    from long_stories import LongStories

    from operators import LocalOperator

pytestmark = pytest.mark.cluster

QUIET_S = 60.0
REPAIRS_PER_MINUTE = 3


def repairs(asked: list[Request]) -> list[Request]:
    """Each is an apply; where that alone is refused, a merge that puts the port back, and the apply once more.

    The rival may come between those two, so the merge counts, and not the apply after it.
    """
    found: list[Request] = []
    merged = False
    for one in asked:
        if one.resource == "services" and one.name == "vision" and one.carried_out:
            applied = one.query.get("force") == "true"
            if not (applied and merged):
                found.append(one)
            merged = not applied
    return found


def test_r8_row_39_a_fight_over_a_child_is_limited_and_ends_as_the_spec_says(
    api: ApiServer, proxy: FaultProxy, long_stories: LongStories
) -> None:
    fight = long_stories.fight
    until("the last repair", lambda: fight.rival.gave_up() and port_is_back(api, fight.namespace), limit_s=100)
    times = [write.at for write in repairs(proxy.writes(fight.mark, namespace=fight.namespace))]
    assert fight.rival.edits >= REPAIRS_PER_MINUTE
    assert len(times) > REPAIRS_PER_MINUTE
    for first, fourth in zip(times, times[REPAIRS_PER_MINUTE:], strict=False):
        assert fourth - first > 55


def test_r11_no_write_in_60_s_of_steady_state(
    api: ApiServer, proxy: FaultProxy, long_stories: LongStories, leader: LocalOperator
) -> None:
    quiet = long_stories.quiet
    time.sleep(max(0.0, QUIET_S - (time.monotonic() - quiet.began)))
    assert proxy.writes(quiet.mark, namespace=quiet.namespace) == []
    assert versions(api, quiet.namespace) == quiet.versions
    # The same by the operator's own count, of all namespaces, for as long as nothing else happens here.
    before = leader.writes()
    time.sleep(2)
    assert leader.writes() == before
