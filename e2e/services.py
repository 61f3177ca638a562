"""An InferenceService under test: the sample with some fields changed, applied, watched, and asked for inferences."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import numpy.typing as npt
import yaml

from conch import names
from load import Load, Result, check_infer, infer_answer, infer_request
from operators import NAMESPACE, ROOT, wait_reachable, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from sandbox import AnyRegion

SAMPLE: Final = ROOT / "manifests" / "samples" / "filetype.yaml"
KIND: Final = f"{names.SERVICE_PLURAL}.{names.GROUP}"
READY_LIMIT_S: Final = 90.0
GONE_LIMIT_S: Final = 90.0
PATIENCE_S: Final = 60.0
"""A client's; what waits behind replicas that start late on a busy machine isn't lost."""
SCRIPT: Final = b"#!/usr/bin/env python3\nimport os\nprint(os.getcwd())\n"

SLOW: Final[dict[str, Any]] = {
    "models[0].maxBatchSize": 1,
    "models[0].batching": {},
    "models[0].parameters.sandbox_compute_ms": "200",
    "models[0].queue.timeout": "60s",
    "scaling.queueDepth.target": 3,
    "scaling.scaleDown.hold": "5s",
}
"""One replica serves 5 requests a second, so that little load needs many replicas; the hold is short."""
SLOW_CAPACITY: Final = 5.0
NO_GPU: Final[dict[str, Any]] = {"accelerator.count": 0}


def inference() -> tuple[bytes, dict[str, str]]:
    """Body and headers that ask for the type of a small Python script."""
    text = np.full((1, 2048), 256, np.int32)
    text[0, : len(SCRIPT)] = np.frombuffer(SCRIPT, np.uint8)
    return infer_request(bytes=text)


def set_field(spec: dict[str, Any], path: str, value: Any) -> None:
    """Set `models[0].source.uri` in place, with the objects on the way there; None removes the field."""
    here: Any = spec
    *way, last = path.replace("[", ".").replace("]", "").split(".")
    for step in way:
        here = here[int(step)] if isinstance(here, list) else here.setdefault(step, {})
    if value is None:
        here.pop(last, None)
    else:
        here[last] = copy.deepcopy(value)


class Service:
    """One InferenceService; `fields` are paths into its spec, such as `scaling.minReplicas`, None removes one."""

    def __init__(
        self, region: AnyRegion, namespace: str, name: str = "filetype", fields: Mapping[str, Any] | None = None
    ) -> None:
        self.region = region
        self.namespace = namespace
        self.name = name
        self.object: dict[str, Any] = yaml.safe_load(SAMPLE.read_text())
        self.object["metadata"] = {"name": name, "namespace": namespace}
        self.change(fields or {})

    # --- writing

    def change(self, fields: Mapping[str, Any]) -> Self:
        """Alter the object here, not yet in the cluster."""
        for path, value in fields.items():
            set_field(self.object["spec"], path, value)
        return self

    def apply(self, fields: Mapping[str, Any] | None = None) -> Self:
        """Apply as a user does, with some more fields changed."""
        self.change(fields or {})
        self.region.apply(copy.deepcopy(self.object))
        return self

    def delete(self, *, wait: bool = False) -> None:
        """Delete the resource; its children are the garbage collector's."""
        self.region.kubectl("delete", KIND, self.name, "-n", self.namespace, f"--wait={str(wait).lower()}")

    # --- looking

    def get(self) -> dict[str, Any]:
        """The resource as stored."""
        return self.region.get(KIND, self.name, "-n", self.namespace)

    def status(self) -> dict[str, Any]:
        """Its status; empty before the first."""
        status: dict[str, Any] = self.get().get("status") or {}
        return status

    def deployment(self) -> dict[str, Any]:
        """The Deployment of its pods."""
        return self.region.get("deployment", names.deployment(self.name), "-n", self.namespace)

    def pods(self) -> list[dict[str, Any]]:
        """Its pods, also those that go."""
        found: list[dict[str, Any]] = self.region.get(
            "pods", "-n", self.namespace, "-l", f"{names.SERVICE_LABEL}={self.name}"
        )["items"]
        return found

    def events(self, reason: str) -> list[str]:
        """Messages of the resource's Events of one reason."""
        where = f"involvedObject.kind={names.SERVICE_KIND},involvedObject.name={self.name},reason={reason}"
        found = self.region.get("events", "-n", self.namespace, "--field-selector", where)["items"]
        return [str(event["message"]) for event in found]

    # --- waiting

    def wait(
        self, what: str, true: Callable[[dict[str, Any]], object], limit_s: float = READY_LIMIT_S
    ) -> dict[str, Any]:
        """The status once something is true of it; TimeoutError quotes the last one."""
        last: dict[str, Any] = {}

        def look() -> bool:
            last.clear()
            last.update(self.status())
            return bool(true(last))

        try:
            wait_until(look, limit_s, what, 0.5)
        except TimeoutError as error:
            raise TimeoutError(
                f"waited {limit_s:g} s for {what} of {self.name}: {json.dumps(last, indent=1)}"
            ) from error
        return last

    def wait_ready(self, replicas: int = 1, limit_s: float = READY_LIMIT_S) -> Self:
        """Until the present spec is served by so many replicas, and by no other pod."""
        generation = self.get()["metadata"]["generation"]

        def ready(status: dict[str, Any]) -> bool:
            found = condition(status, "Ready")
            counts = status.get("replicas", {})
            return (
                found.get("status") == "True"
                and found.get("observedGeneration") == generation
                and counts.get("ready") == counts.get("wanted") == replicas
            )

        self.wait(f"{replicas} ready", ready, limit_s)
        wait_reachable(self.url())
        return self

    def wait_condition(self, type_: str, status: str, *, limit_s: float = READY_LIMIT_S, says: str = "") -> str:
        """The message of a condition once it has a status, and says something."""

        def true(found: dict[str, Any]) -> bool:
            seen = condition(found, type_)
            return seen.get("status") == status and says in str(seen.get("message"))

        return str(condition(self.wait(f"{type_}={status} ({says})", true, limit_s), type_)["message"])

    def wait_replicas(self, true: Callable[[int], bool], what: str, limit_s: float = READY_LIMIT_S) -> int:
        """The Deployment's spec.replicas, once something is true of it."""
        found: list[int] = []

        def look() -> bool:
            found[:] = [int(self.deployment()["spec"]["replicas"])]
            return true(found[0])

        wait_until(look, limit_s, f"{what} replicas of {self.name}", 0.5)
        return found[0]

    # --- asking

    def url(self) -> str:
        """The model behind the Service that clients call."""
        address = self.region.get("service", names.clients_service(self.name), "-n", self.namespace)["spec"][
            "clusterIP"
        ]
        return f"http://{address}:{names.HTTP_PORT}/v2/models/{self.object['spec']['models'][0]['name']}/infer"

    def infer(self) -> npt.NDArray[np.float32]:
        """One real inference through the Service."""
        body, headers = inference()
        request = urllib.request.Request(self.url(), data=body, headers={**headers, "Connection": "close"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            content = answer.read()
            got = {name.lower(): value for name, value in answer.headers.items()}
        assert check_infer(200, got, content) is None
        scores: npt.NDArray[np.float32] = infer_answer(got, content)["target_label"][0]
        return scores


def condition(status: Mapping[str, Any], type_: str) -> dict[str, Any]:
    """A condition by its type; empty when it isn't there."""
    found: list[dict[str, Any]] = status.get("conditions") or []
    return next((item for item in found if item["type"] == type_), {})


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Whether a pod answers and isn't told to go."""
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions") or [])
    return ready and "deletionTimestamp" not in pod["metadata"]


def left_in(region: AnyRegion, namespace: str) -> list[str]:
    """Everything in a namespace that its creation didn't bring, Events aside, as KIND/NAME."""
    listed = region.kubectl("api-resources", "--verbs=list", "--namespaced", "-o", "name").split()
    kinds = ",".join(kind for kind in listed if kind not in {"events", "events.events.k8s.io"})
    found = region.kubectl("get", kinds, "-n", namespace, "-o", "name", "--ignore-not-found").split()
    return sorted(set(found) - {"serviceaccount/default", "configmap/kube-root-ca.crt"})


def restricted_namespace(region: AnyRegion, name: str) -> None:
    """A namespace in which Pod Security refuses everything that isn't `restricted`."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    region.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})


# --- load beside a test


class Background:
    """A load in a thread of its own, so that a test may wait for kubectl meanwhile."""

    def __init__(self, url: str, rate: float, seed: int | None = None) -> None:
        body, headers = inference()
        self.load = Load(url, body, rate, headers=headers, seed=seed, timeout_s=PATIENCE_S)
        self._loop = asyncio.new_event_loop()
        self._begun, self._end = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._work())
        self._loop.close()

    async def _work(self) -> None:
        async with self.load:
            self._begun.set()
            await self._end.wait()

    def __enter__(self) -> Self:
        self._thread.start()  # in the network of the thread that enters
        assert self._begun.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(self.load.timeout_s + 30)

    def rate(self, rate: float) -> None:
        """Change the arrivals per second."""
        self._loop.call_soon_threadsafe(setattr, self.load, "rate", rate)

    def result(self) -> Result:
        """What ended so far; complete after the block."""
        return self.load.result()


# --- replicas over time


class Trail:
    """Every value of a Deployment's spec.replicas during a block, as the API server's watch tells it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.values: list[tuple[float, int]] = []
        """Instant (time.monotonic) and value, also of updates that didn't change it."""
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._read, name="trail", daemon=True)

    def __enter__(self) -> Self:
        region = self._service.region
        self._process = region.popen(
            [
                *region.kubectl_argv(), "get", "deployment", names.deployment(self._service.name),
                "-n", self._service.namespace, "--watch", "-o", "jsonpath={.spec.replicas}{'\\n'}",
            ],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._thread.start()
        wait_until(lambda: self.values, 20, "the watch of the Deployment", 0.05)
        return self

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.values.append((time.monotonic(), int(line)))

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait(10)
        self._thread.join(10)
        self._process.stdout.close()

    @property
    def steps(self) -> list[int]:
        """Values in order, each change once."""
        return [count for count, _ in groupby(value for _, value in self.values)]

    def wait(self, true: Callable[[int], bool], what: str, limit_s: float = 60.0) -> float:
        """Until something is true of the newest value; the instant at which it came (time.monotonic)."""
        wait_until(lambda: true(self.values[-1][1]), limit_s, what, 0.05)
        return next(at for at, count in self.values if true(count) and at >= self._since(true))

    def _since(self, true: Callable[[int], bool]) -> float:
        """When it began to be true for the last time."""
        untrue = [at for at, count in self.values if not true(count)]
        return max(untrue, default=0.0)


# --- other parts of a region


def leader(region: AnyRegion) -> str:
    """The operator pod that holds the Lease; its identity is the pod's name and a suffix of its own."""
    lease = region.get("lease", names.LEASE_NAME, "-n", NAMESPACE)
    return str(lease["spec"].get("holderIdentity") or "").rpartition("_")[0]


def kill_container(region: AnyRegion, namespace: str, pod: str, container: str) -> None:
    """SIGKILL to a container's first process, as the kernel or a crash would end it: no preStop, no grace."""
    statuses = region.get("pod", pod, "-n", namespace)["status"]["containerStatuses"]
    identifier = next(item["containerID"] for item in statuses if item["name"] == container)
    region.ctr("tasks", "kill", "--signal", "SIGKILL", identifier.rpartition("/")[2])


@contextlib.contextmanager
def held_gpus(region: AnyRegion, namespace: str, count: int) -> Iterator[None]:
    """Somebody else's pod that holds so many GPUs."""
    if not count:
        yield
        return
    name = "holder"
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": "holder",
                    "image": "sandbox.local/triton:1",
                    "command": ["sleep", "infinity"],
                    "resources": {"limits": {"nvidia.com/gpu": str(count)}, "requests": {"cpu": "1m"}},
                }
            ],
        },
    }
    region.apply(pod)
    try:
        wait_until(
            lambda: region.get("pod", name, "-n", namespace)["status"].get("phase") == "Running",
            30,
            "the holder to run",
        )
        yield
    finally:
        region.kubectl("delete", "pod", name, "-n", namespace, "--wait=true", "--grace-period=0", "--force")


def free_gpus(region: AnyRegion) -> int:
    """GPUs that no pod on the node has requested."""
    pods = region.get("pods", "-A")["items"]
    taken = 0
    for pod in pods:
        if pod["status"].get("phase") in {"Succeeded", "Failed"} or "nodeName" not in pod["spec"]:
            continue
        for item in pod["spec"]["containers"]:
            taken += int((item.get("resources", {}).get("limits") or {}).get("nvidia.com/gpu", 0))
    return region.allocatable_gpus() - taken


def prometheus_value(region: AnyRegion, promql: str) -> float | None:
    """One number that Prometheus gives; None when it gives none."""
    url = f"{region.prometheus_url}/api/v1/query?{urllib.parse.urlencode({'query': promql})}"
    with urllib.request.urlopen(url, timeout=5) as answer:
        found = json.load(answer)["data"]["result"]
    return float(found[0]["value"][1]) if found else None
