"""What `make bench` measures on real Triton pods: how soon a load step is answered by an order, and what is lost."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final

from operators import hurry_operator, install_operator, wait_until
from sandbox import Sandbox
from services import SLOW, SLOW_CAPACITY, Background, Service, Trail, restricted_namespace

if TYPE_CHECKING:
    from sandbox import Region

NAMESPACE: Final = "bench-pods"
STEPS: Final = 3
"""Load steps measured; the slowest order counts."""
SETTLED_S: Final = 60.0


def pod_figures() -> dict[str, Any]:
    """Times in seconds, counts of requests; a region of its own comes up for it and goes."""
    sandbox = Sandbox.up(f"bench-pods-{os.getpid()}", owner=os.getpid(), tell=lambda _: None)
    try:
        region = sandbox.region()
        with region.network():
            install_operator(region)
            hurry_operator(region)
            return measure(region)
    finally:
        sandbox.down(keep_logs=False)


def measure(region: Region, namespace: str = NAMESPACE) -> dict[str, Any]:
    """The figures, on a region that has the operator."""
    restricted_namespace(region, namespace)
    began = time.monotonic()
    service = Service(region, namespace, "bench", SLOW).apply().wait_ready()
    ready_s = time.monotonic() - began
    delays: list[float] = []
    path: list[int] = []
    requests, lost = 0, {"all": 0, "scale_down": 0}
    for _ in range(STEPS):
        with Background(service.url(), rate=1) as load, Trail(service) as trail:
            time.sleep(3)
            step = time.monotonic()
            load.rate(2.4 * SLOW_CAPACITY)
            delays.append(trail.wait(lambda count: count > 1, "replicas to rise", SETTLED_S) - step)
            time.sleep(20)
            eased_s = load.load.elapsed_s
            load.rate(0.4 * SLOW_CAPACITY)
            trail.wait(lambda count: count == 1, "replicas to fall", 2 * SETTLED_S)
            wait_until(lambda: len(service.pods()) == 1, SETTLED_S, "the drained pods to be gone", 0.5)
        result = load.result()
        requests += result.total
        lost["all"] += result.failed
        lost["scale_down"] += sum(1 for record in result.failures if record.end_s >= eased_s)
        path += trail.steps
    service.delete(wait=True)
    return {
        "apply_to_ready_s": ready_s,
        "step_to_patch_s": max(delays),
        "steps_to_patch_s": delays,
        "lost_in_scale_down": lost["scale_down"],
        "lost_in_all": lost["all"],
        "requests_total": requests,
        "replicas_path": path,
    }


if __name__ == "__main__":
    for name, value in pod_figures().items():
        print(f"{name}: {value}")
