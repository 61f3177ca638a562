"""A fake DCGM exporter: the memory series of NVIDIA's exporter, with the labels of the pods that hold the fake GPUs."""

import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc

from sandbox.components import GPU_RESOURCE
from sandbox.gpu_state import GpuState, device_id, read
from sandbox.kubelet_messages import POD_RESOURCES, messages

SOCKET = "/var/lib/kubelet/pod-resources/kubelet.sock"
REFRESH_S = 0.5
Holder = tuple[str, str, str]  # namespace, pod, container


def holders(channel: grpc.Channel) -> dict[str, Holder]:
    """Device to the container that holds it, from the kubelet's pod-resources API."""
    kinds = messages("v1", POD_RESOURCES)
    call = channel.unary_unary(
        "/v1.PodResourcesLister/List",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=kinds["ListPodResourcesResponse"].FromString,
    )
    found: dict[str, Holder] = {}
    for pod in call(kinds["ListPodResourcesRequest"](), timeout=5).pod_resources:
        for container in pod.containers:
            for devices in container.devices:
                if devices.resource_name == GPU_RESOURCE:
                    found.update(dict.fromkeys(devices.device_ids, (pod.namespace, pod.name, container.name)))
    return found


def render(state: GpuState, held: Mapping[str, Holder], node: str) -> str:
    """The exposition text."""
    used_lines = ["# TYPE DCGM_FI_DEV_FB_USED gauge"]
    free_lines = ["# TYPE DCGM_FI_DEV_FB_FREE gauge"]
    for index in range(state.count):
        labels = {
            "gpu": str(index), "UUID": device_id(index), "device": f"nvidia{index}", "modelName": state.product,
            "Hostname": node,
        }  # fmt: skip
        used = 0
        if device_id(index) in held:
            namespace, pod, container = held[device_id(index)]
            labels |= {"namespace": namespace, "pod": pod, "container": container}
            used = min(state.memory_of(namespace, pod), state.memory_mib)
        text = ",".join(f'{key}="{value}"' for key, value in labels.items())
        used_lines.append(f"DCGM_FI_DEV_FB_USED{{{text}}} {used}")
        free_lines.append(f"DCGM_FI_DEV_FB_FREE{{{text}}} {state.memory_mib - used}")
    return "\n".join([*used_lines, *free_lines]) + "\n"


class Holders:
    """The latest answer of the kubelet, refreshed in the background so that a scrape never waits for it."""

    def __init__(self) -> None:
        self.held: Mapping[str, Holder] = {}

    def refresh_forever(self) -> None:
        """Ask again and again; an unreachable kubelet leaves the last answer."""
        with grpc.insecure_channel(f"unix://{SOCKET}") as channel:
            while True:
                try:
                    self.held = holders(channel)
                except grpc.RpcError as error:
                    sys.stderr.write(f"pod-resources: {error}\n")
                    time.sleep(REFRESH_S)
                time.sleep(REFRESH_S)


def main() -> None:
    """Serve /metrics."""
    state_file, node = Path(sys.argv[1]), sys.argv[3]
    host, port = sys.argv[2].rsplit(":", 1)
    known = Holders()
    threading.Thread(target=known.refresh_forever, daemon=True).start()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = render(read(state_file), known.held, node).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class names it so)
            """Scrapes are no news."""

    ThreadingHTTPServer((host, int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
