"""Stories that take a minute: they begin with the shared operator and run beside the other tests."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from apiserver import ApiServer
from stories import create, edit_port, made, port_is_back, served, settled, until, versions

if TYPE_CHECKING:
    from fault_proxy import FaultProxy

    from sandbox import Region

RIVAL_S: Final = 20.0
"""How long the rival goes on; by then it has lost patience, and Conch has long used up its repairs."""


@dataclass(frozen=True)
class Quiet:
    """Three services that nobody touches, and what there was when they had come to rest."""

    namespace: str
    began: float
    mark: int
    versions: dict[str, str]


@dataclass(frozen=True)
class Fight:
    """A service whose Service somebody else keeps changing for a while."""

    namespace: str
    mark: int
    rival: Rival


@dataclass(frozen=True)
class LongStories:
    """Both."""

    quiet: Quiet
    fight: Fight


class Rival:
    """Another controller that wants a Service to have another port, and puts it back as often as it is changed."""

    def __init__(self, region: Region, namespace: str) -> None:
        self._api = ApiServer(region)
        self._namespace = namespace
        self._over = threading.Event()
        self.edits = 0
        self._thread = threading.Thread(target=self._run, name="rival", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        deadline = time.monotonic() + RIVAL_S
        while not self._over.wait(0.1) and time.monotonic() < deadline:
            if port_is_back(self._api, self._namespace):
                edit_port(self._api, self._namespace)
                self.edits += 1
        self._api.close()

    def gave_up(self) -> bool:
        """Whether it fights no more."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Give up now."""
        self._over.set()
        self._thread.join(30)


def begin(region: Region, proxy: FaultProxy) -> LongStories:
    """Begin both; the clock of the quiet one runs once all has settled."""
    api = ApiServer(region)
    for namespace in ("t-fight", "t-quiet"):
        api.create_namespace(namespace)
    made(api, "t-fight")
    fight = Fight("t-fight", proxy.mark(), Rival(region, "t-fight"))
    for name in ("one", "two", "three"):
        create(api, "t-quiet", name=name)
    for name in ("one", "two", "three"):
        settled(api, "t-quiet", name)
    served(api, "t-quiet", "one")

    def rests() -> bool:
        before = versions(api, "t-quiet")
        time.sleep(2.5)
        return before == versions(api, "t-quiet")

    until("the services to come to rest", rests)
    quiet = Quiet("t-quiet", time.monotonic(), proxy.mark(), versions(api, "t-quiet"))
    api.close()
    return LongStories(quiet, fight)
