"""`make bench`: measure the operator on a real control plane, print the figures, write build/bench.json and a page.

Without pods: apply → Deployment at 1, 100 and 1,000 services, writes per service, start, idle. With pods (--pods, the
default): a load step, and what scale-down costs. The peer's figures were measured on the same machine and control plane
(KServe's controller of August 2026, Standard mode, no pods run), so ratios compare like with like.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import json
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import yaml
from google.protobuf import json_format

from conch import names
from conch.config import Settings
from conch.kube.client import DEPLOYMENTS, INFERENCE_SERVICES, NODES, PODS, Kube, Resource
from conch.kube.connection import Connection
from conch.triton.readback import planned_configs
from load import percentile
from operators import ROOT, LocalOperator, free_port, grant_own_role, wait_until
from sandbox import Sandbox, components
from sandbox.content import write_atomic

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sandbox import Region

PEER = {
    1: {"last_s": 0.27},
    100: {"p50_s": 4.1, "p99_s": 6.8, "last_s": 8.4, "cpu_s": 0.9},
    1000: {"p50_s": 44.0, "p99_s": 85.0, "last_s": 101.0, "cpu_s": 12.5, "rss_mib": 156.0},
    "restart_1100_s": 20.0,
    "idle_core": 0.001,
}
TARGETS = {
    "deployment_1_s": 0.2, "deployment_100_p99_s": 2.0, "deployment_1000_last_s": 50.0, "start_1000_s": 20.0,
    "idle_core": 0.05, "rss_mib": 300.0, "lost_in_scale_down": 0,
    "fetch_rss_mib": 150.0,
}  # fmt: skip
SIZES = (1, 100, 1000)
NODE = "fake-node"
CONCURRENCY = 32
IDLE_S = 60
QUIET_S = 16.0
LIMIT_S = 300.0
SAMPLE = ROOT / "manifests" / "samples" / "filetype.yaml"


def say(text: str) -> None:
    """A line of progress, at once."""
    print(f"{dt.datetime.now(dt.UTC):%H:%M:%S}  {text}", flush=True)


def service_object(namespace: str, name: str) -> dict[str, Any]:
    """The sample under another name."""
    sample: dict[str, Any] = yaml.safe_load(SAMPLE.read_text())
    return {**sample, "metadata": {"name": name, "namespace": namespace}}


class Administrator:
    """The measuring side's own client; it is not counted."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.kube = Kube(connection, Settings(api_requests_per_s=5000, api_timeout_s=60), may_write=lambda: True)

    async def __aenter__(self) -> Self:
        await self.kube.__aenter__()
        self._session = self._connection.session()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self.kube.__aexit__(None, None, None)

    async def post(self, path: str, body: dict[str, Any]) -> int:
        """Create; the HTTP status."""
        async with self._session.post(self._connection.server + path, json=body) as answer:
            return answer.status

    async def patch_status(self, resource: Resource, namespace: str, name: str, body: dict[str, Any]) -> int:
        """Merge into an object's status."""
        url = self._connection.server + resource.path(namespace or None, name, "status")
        headers = {"Content-Type": "application/merge-patch+json"}
        async with self._session.patch(url, data=json.dumps(body), headers=headers) as answer:
            return answer.status

    async def watch(self, resource: Resource) -> AsyncIterator[dict[str, Any]]:
        """Events from now on, as they come."""
        _, version = await self.kube.list(resource)
        url = self._connection.server + resource.path()
        query = {"watch": "1", "resourceVersion": version, "labelSelector": names.MANAGED_SELECTOR}
        timeout = aiohttp.ClientTimeout(total=None, sock_read=None)
        async with self._session.get(url, params=query, timeout=timeout) as answer:
            async for line in answer.content:
                yield json.loads(line)


async def burst(admin: Administrator, namespace: str, count: int) -> dict[str, Any]:
    """Create services as fast as the server takes them; how long each waited for its Deployment."""
    seen: dict[str, float] = {}
    done, watching = asyncio.Event(), asyncio.Event()

    async def look() -> None:
        stream = admin.watch(DEPLOYMENTS)
        watching.set()
        async for event in stream:
            metadata = event["object"]["metadata"]
            if event["type"] == "ADDED" and metadata["namespace"] == namespace:
                seen.setdefault(metadata["labels"][names.SERVICE_LABEL], time.monotonic())
                if len(seen) == count:
                    done.set()
                    return

    looking = asyncio.create_task(look())
    await watching.wait()
    await asyncio.sleep(1.0)
    sent: dict[str, float] = {}
    turn = asyncio.Semaphore(CONCURRENCY)

    async def create(name: str) -> None:
        async with turn:
            sent[name] = time.monotonic()
            status = await admin.post(INFERENCE_SERVICES.path(namespace), service_object(namespace, name))
            assert status == 201, f"creating {name} was answered {status}"

    started = time.monotonic()
    await asyncio.gather(*(create(f"s{index:04d}") for index in range(count)))
    created_s = time.monotonic() - started
    await asyncio.wait_for(done.wait(), LIMIT_S)
    looking.cancel()
    waits = [seen[name] - sent[name] for name in seen]
    return {
        "created_s": created_s,
        "p50_s": percentile(waits, 0.5) or 0.0,
        "p99_s": percentile(waits, 0.99) or 0.0,
        "last_s": max(seen.values()) - started,
        "curve_s": [round(percentile(waits, step / 50) or 0.0, 3) for step in range(1, 51)],
    }


class FakeKubelet:
    """Keeps a fake node alive and, when told to, calls every pod on it Running and Ready: no container runs."""

    def __init__(self, admin: Administrator) -> None:
        self.starts_pods = False
        self._admin = admin
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
        await self._admin.post(NODES.path(), node)
        resources = {"cpu": "10000", "memory": "100Ti", "pods": "10000", "nvidia.com/gpu": "10000"}
        ready = {"type": "Ready", "status": "True", "reason": "Fake", "message": "fake", "lastHeartbeatTime": _now()}
        status = {"status": {"capacity": resources, "allocatable": resources, "conditions": [ready]}}
        await self._admin.patch_status(NODES, "", NODE, status)
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        beat = 0.0
        while True:
            if time.monotonic() - beat > 10:
                beat = time.monotonic()
                await self._heartbeat()
            await asyncio.sleep(1.0)
            if not self.starts_pods:
                continue
            pods, _ = await self._admin.kube.list(PODS, label_selector=names.MANAGED_SELECTOR)
            waiting = [pod for pod in pods if pod.get("status", {}).get("phase") == "Pending"]
            turn = asyncio.Semaphore(CONCURRENCY)
            await asyncio.gather(*(self._start(pod, turn) for pod in waiting))

    async def _heartbeat(self) -> None:
        ready = {"type": "Ready", "status": "True", "reason": "Fake", "message": "fake", "lastHeartbeatTime": _now()}
        await self._admin.patch_status(NODES, "", NODE, {"status": {"conditions": [ready]}})

    async def _start(self, pod: dict[str, Any], turn: asyncio.Semaphore) -> None:
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        async with turn:
            if not pod["spec"].get("nodeName"):
                binding = {
                    "apiVersion": "v1", "kind": "Binding", "metadata": {"name": name},
                    "target": {"apiVersion": "v1", "kind": "Node", "name": NODE},
                }  # fmt: skip
                await self._admin.post(PODS.path(namespace, name, "binding"), binding)
            container = {
                "name": names.SERVER_CONTAINER, "ready": True, "started": True, "restartCount": 0, "image": "fake",
                "imageID": "fake", "state": {"running": {"startedAt": _now()}},
            }  # fmt: skip
            conditions = [
                {"type": kind, "status": "True", "lastTransitionTime": _now()}
                for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
            ]
            # FakeTriton answers there.
            running = {"phase": "Running", "podIP": "127.0.0.1", "containerStatuses": [container]}
            status = {"status": {**running, "conditions": conditions}}
            await self._admin.patch_status(PODS, namespace, name, status)


def _now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class FakeTriton:
    """Shows Triton's gauges of every pod, for a real Prometheus to scrape, and has loaded what each pod's plan says."""

    def __init__(self, admin: Administrator, port: int) -> None:
        self._admin = admin
        self._port = port
        self._text = ""
        self._configs: dict[str, Any] = {}

    async def refresh(self) -> None:
        """Show the pods that there are now."""
        pods, _ = await self._admin.kube.list(PODS, label_selector=names.MANAGED_SELECTOR)
        lines = []
        for pod in pods:
            labels = f'namespace="{pod["metadata"]["namespace"]}",pod="{pod["metadata"]["name"]}"'
            model = f'{labels},model="filetype",version="1"'
            lines += [
                f"nv_inference_pending_request_count{{{model}}} 0",
                f"nv_inference_request_success{{{model}}} 1000",
                f'nv_inference_request_failure{{{model},reason="OTHER"}} 0',
                f"nv_inference_request_duration_us{{{model}}} 100000",
                f'nv_gpu_memory_used_bytes{{{labels},gpu_uuid="fake"}} 2e9',
                f'nv_gpu_memory_total_bytes{{{labels},gpu_uuid="fake"}} 2.4e10',
            ]
        self._text = "\n".join(lines) + "\n"

    async def __aenter__(self) -> Self:
        from aiohttp import web

        async def metrics(_: web.Request) -> web.Response:
            return web.Response(text=self._text, content_type="text/plain")

        async def model(request: web.Request) -> web.Response:
            name = request.match_info["name"]
            if name not in self._configs:
                await self._learn()
            config = json_format.MessageToDict(self._configs[name], preserving_proto_field_name=True)
            loaded = {"name": name, "versions": ["1"]}
            return web.json_response(config if request.path.endswith("/config") else loaded)

        app = web.Application()
        app.router.add_get("/metrics", metrics)
        app.router.add_get("/v2/models/{name}", model)
        app.router.add_get("/v2/models/{name}/config", model)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        for port in (self._port, names.HTTP_PORT):
            await web.TCPSite(self._runner, "127.0.0.1", port).start()
        return self

    async def _learn(self) -> None:
        """All services of a run have the same models."""
        pods, _ = await self._admin.kube.list(PODS, label_selector=names.MANAGED_SELECTOR)
        self._configs.update(planned_configs(pods[0]["metadata"]["annotations"][names.PLAN_ANNOTATION]))

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


def start_prometheus(region: Region, port: int) -> str:
    """The real Prometheus with one target; its URL in the region's network."""
    scrape = {"job_name": "triton", "honor_labels": True, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    own = {"job_name": "prometheus", "static_configs": [{"targets": [f"{region.spec.address}:9090"]}]}
    config = {"global": {"scrape_interval": "5s", "scrape_timeout": "4s"}, "scrape_configs": [scrape, own]}
    write_atomic(region.layout.folder / "prometheus.json", json.dumps(config))
    region.start("prometheus", components.prometheus(region.layout))
    return region.prometheus_url


async def queries(session: aiohttp.ClientSession, url: str) -> float:
    """Instant queries that Prometheus has answered so far."""
    async with session.get(f"{url}/metrics") as answer:
        text = await answer.text()
    lines = [line for line in text.splitlines() if line.startswith("prometheus_http_requests_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if 'handler="/api/v1/query"' in line)


async def per_tick(operator: LocalOperator, url: str, tick_s: float, seconds: float) -> float:
    """Queries per scaling tick, over some ticks."""
    async with aiohttp.ClientSession() as session:
        before, started = await queries(session, url), time.monotonic()
        await asyncio.sleep(seconds)
        after, ended = await queries(session, url), time.monotonic()
    assert operator.running(), "the operator ended while it was measured"
    return (after - before) / ((ended - started) / tick_s)


def reconciled(operator: LocalOperator) -> float:
    """Successful reconciles so far."""
    return operator.metrics().get('conch_reconciles_total{outcome="ok"}', 0.0)


def difference(before: dict[str, float], after: dict[str, float], count: int) -> dict[str, float]:
    """Writes per service, each one named."""
    found: dict[str, float] = {}
    for name, value in sorted(after.items()):
        more = value - before.get(name, 0.0)
        if more:
            labels = dict(part.split("=") for part in name.partition("{")[2].rstrip("}").replace('"', "").split(","))
            key = f"{labels['verb']} {labels['kind']}"
            found[key] = round(found.get(key, 0.0) + more / count, 2)
    return found


async def control_plane_figures(sizes: tuple[int, ...], folder: Path) -> dict[str, Any]:
    """Everything that needs no real pods."""
    figures: dict[str, Any] = {}
    sandbox = Sandbox.up(f"bench-{os.getpid()}", nodes=False, owner=os.getpid(), tell=lambda _: None)
    try:
        region = sandbox.region()
        with region.network():
            grant_own_role(region)
            connection = await Connection.load(str(region.kubeconfig))
            port = free_port(region)
            async with Administrator(connection) as admin, FakeTriton(admin, port) as triton:
                url = start_prometheus(region, port)
                settings = {"CONCH_PROMETHEUS_URL": url, "CONCH_TICK_S": "5"}
                operator = LocalOperator(region, folder, settings=settings)
                operator.start()
                await asyncio.to_thread(wait_until, operator.leads, 60, "the operator to lead")
                async with FakeKubelet(admin) as kubelet:
                    for size in sizes:
                        figures[f"services_{size}"] = await one_size(
                            admin, region, operator, kubelet=kubelet, triton=triton, size=size
                        )
                        if size == 1:
                            figures["queries_per_tick_1"] = await per_tick(operator, url, 5, 20)
                    total = sum(sizes)
                    figures.update(await settled(operator, total, url))
                    figures.update(await restarted(operator, total))
                operator.stop()
    finally:
        sandbox.down(keep_logs=False)
    return figures


async def one_size(
    admin: Administrator,
    region: Region,
    operator: LocalOperator,
    *,
    kubelet: FakeKubelet,
    triton: FakeTriton,
    size: int,
) -> dict[str, Any]:
    """One burst without pods, as the peer was measured; then fake pods, and writes per service until all is quiet."""
    namespace = f"bench-{size}"
    region.kubectl("create", "namespace", namespace)
    say(f"creating {size} services")
    before, cpu = operator.writes(), operator.cpu_seconds()
    result: dict[str, Any] = dict(await burst(admin, namespace, size))
    result["cpu_s"] = operator.cpu_seconds() - cpu
    say(f"  last Deployment after {result['last_s']:.2f} s, p99 {result['p99_s']:.2f} s, CPU {result['cpu_s']:.2f} s")

    async def unready() -> int:
        items, _ = await admin.kube.list(INFERENCE_SERVICES, namespace)
        return sum(1 for item in items if not _is_ready(item))

    kubelet.starts_pods = True
    deadline = time.monotonic() + LIMIT_S
    while await unready() and time.monotonic() < deadline:
        await asyncio.sleep(2.0)
    kubelet.starts_pods = False
    await triton.refresh()
    await quiet(operator)
    result["unready"] = await unready()
    result["writes_per_service"] = difference(before, operator.writes(), size)
    result["rss_mib"] = operator.rss_mib()
    return result


async def quiet(operator: LocalOperator) -> None:
    """Until the operator has written nothing for three ticks."""
    deadline, seen, since = time.monotonic() + LIMIT_S, operator.writes(), time.monotonic()
    while time.monotonic() - since < QUIET_S and time.monotonic() < deadline:
        await asyncio.sleep(1.0)
        if (now := operator.writes()) != seen:
            seen, since = now, time.monotonic()


def _is_ready(item: dict[str, Any]) -> bool:
    conditions = (item.get("status") or {}).get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


async def settled(operator: LocalOperator, total: int, url: str) -> dict[str, Any]:
    """Idle cost with scaling ticks on."""
    say(f"idle with {total} services for {IDLE_S} s")
    cpu, writes, started = operator.cpu_seconds(), operator.writes(), time.monotonic()
    rate = await per_tick(operator, url, 5, IDLE_S)
    seconds = time.monotonic() - started
    return {
        "services": total,
        "idle_core": (operator.cpu_seconds() - cpu) / seconds,
        "idle_writes": difference(writes, operator.writes(), 1),
        "queries_per_tick_all": rate,
        "rss_mib": operator.rss_mib(),
    }


async def restarted(operator: LocalOperator, total: int) -> dict[str, Any]:
    """From process start to every service reconciled once."""
    say("restarting the operator")
    operator.stop()
    started = time.monotonic()
    operator.start(wait=False)
    await asyncio.to_thread(wait_until, lambda: reconciled(operator) >= total, LIMIT_S, "all to be reconciled")
    seconds = time.monotonic() - started
    writes = difference({}, operator.writes(), 1)
    cpu_s = operator.cpu_seconds()
    return {"start_s": seconds, "start_writes": writes, "start_cpu_s": cpu_s, "start_rss_mib": operator.rss_mib()}


def show(figures: dict[str, Any]) -> None:
    """A table beside the peer's figures and the targets."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Conch, and KServe on the same control plane")
    for column in ("figure", "Conch", "KServe", "ratio", "target"):
        table.add_column(column)

    def row(
        name: str, ours: float | None, peer: float | None = None, target: float | None = None, unit: str = "s"
    ) -> None:
        ratio = f"{ours / peer:.2f}" if ours is not None and peer else ""
        table.add_row(
            name, "" if ours is None else f"{ours:.3g} {unit}", "" if peer is None else f"{peer:g} {unit}", ratio,
            "" if target is None else f"{target:g} {unit}",
        )  # fmt: skip

    for size in SIZES:
        ours: dict[str, Any] = figures.get(f"services_{size}", {})
        peer: dict[str, float] = PEER[size]  # type: ignore[assignment]
        if not ours:
            continue
        last = {1: TARGETS["deployment_1_s"], 1000: TARGETS["deployment_1000_last_s"]}.get(size)
        p99 = TARGETS["deployment_100_p99_s"] if size == 100 else None
        row(f"{size} services: last Deployment", ours["last_s"], peer.get("last_s"), last)
        row(f"{size} services: p50", ours["p50_s"], peer.get("p50_s"))
        row(f"{size} services: p99", ours["p99_s"], peer.get("p99_s"), p99)
        row(f"{size} services: CPU", ours["cpu_s"], peer.get("cpu_s"))
    row("start to all reconciled", figures.get("start_s"), 20.0, TARGETS["start_1000_s"])
    row("idle", figures.get("idle_core"), 0.001, TARGETS["idle_core"], "core")
    row("memory", figures.get("rss_mib"), 156.0, TARGETS["rss_mib"], "MiB")
    row("memory after a start", figures.get("start_rss_mib"), None, TARGETS["rss_mib"], "MiB")
    row("queries per tick, 1 service", figures.get("queries_per_tick_1"), unit="")
    row("queries per tick, all", figures.get("queries_per_tick_all"), unit="")
    row("load step → replicas patched", figures.get("step_to_patch_s"), None, 6.0)
    row("requests lost in scale-down", figures.get("lost_in_scale_down"), None, 0, "")
    for key in ("fetch_https", "fetch_s3_fake_store", "fetch_s3_moto"):
        fetched = figures.get(key) or {}
        name = f"{key.replace('_', ' ')} ({fetched.get('bytes', 0) / (1 << 30):g} GiB)"
        row(f"{name}: memory", fetched.get("rss_mib"), None, TARGETS["fetch_rss_mib"], "MiB")
        row(f"{name}: rate", fetched.get("mib_per_s"), unit="MiB/s")
    Console().print(table)


def plot(figures: dict[str, Any]) -> str:
    """The waits from apply to Deployment as an SVG, the peer's known points beside them."""
    import io

    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.5))
    for size, colour in zip((100, 1000), ("#1f77b4", "#d62728"), strict=True):
        ours, peer = figures.get(f"services_{size}"), PEER[size]
        if ours:
            axes.plot(
                ours["curve_s"], [step * 2 for step in range(1, 51)], color=colour, label=f"Conch, {size} services"
            )
        points = [(peer["p50_s"], 50), (peer["p99_s"], 99), (peer["last_s"], 100)]  # type: ignore[index]
        axes.plot(*zip(*points, strict=True), "o--", color=colour, alpha=0.6, label=f"KServe, {size} services")
    axes.set(xlabel="seconds from apply to Deployment", ylabel="% of services", xscale="log")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    text = io.StringIO()
    figure.savefig(text, format="svg")
    plt.close(figure)
    return text.getvalue().partition("<!DOCTYPE")[2].partition(">")[2]


def page(figures: dict[str, Any]) -> str:
    """The HTML page: the plot and every figure."""
    import jinja2

    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
    return environment.get_template("bench.html.j2").render(
        figures=json.dumps(figures, indent=1), svg=plot(figures), at=figures["at"]
    )


def main() -> None:
    """Run, print, write."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--sizes", default="1,100,1000", help="numbers of services (default: %(default)s)")
    arguments.add_argument("--no-pods", action="store_true", help="leave out what needs real pods")
    arguments.add_argument(
        "--fetch-gib", type=float, default=10.0, help="size of a fetched file (default: %(default)s)"
    )
    arguments.add_argument("--output", type=Path, default=ROOT / "build" / "bench.json")
    options = arguments.parse_args()
    sizes = tuple(int(size) for size in options.sizes.split(","))
    figures: dict[str, Any] = {"at": _now()}
    with tempfile.TemporaryDirectory() as folder:
        figures |= asyncio.run(control_plane_figures(sizes, Path(folder)))
    if not options.no_pods:
        from bench_pods import pod_figures

        figures |= pod_figures()
    if options.fetch_gib:
        from bench_fetch import fetch_figures

        say(f"fetching {options.fetch_gib:g} GiB over https and s3")
        figures |= fetch_figures(int(options.fetch_gib * (1 << 30)))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({"figures": figures, "peer": PEER, "targets": TARGETS}, indent=1) + "\n")
    options.output.with_suffix(".html").write_text(page(figures))
    show(figures)
    say(f"written to {os.path.relpath(options.output)}")


if __name__ == "__main__":
    main()
