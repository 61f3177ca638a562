"""A fake GPU device plugin on the kubelet's real API: no GPU is behind it, scheduling and limits are real."""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from sandbox.components import GPU_RESOURCE
from sandbox.gpu_state import GpuState, device_id, read
from sandbox.kubelet_messages import DEVICE_PLUGIN, messages

FOLDER = Path("/var/lib/kubelet/device-plugins")
ENDPOINT = "conch-fake-gpu.sock"
POLL_S = 0.2


class FakeGpus:
    """The plugin's service."""

    def __init__(self, state_file: Path) -> None:
        self.state_file = state_file
        self.kinds = messages("v1beta1", DEVICE_PLUGIN)

    def devices(self, state: GpuState) -> Any:
        """All devices with their health."""
        kind = self.kinds["Device"]
        listed = [
            kind(ID=device_id(index), health="Unhealthy" if index in state.unhealthy else "Healthy")
            for index in range(state.count)
        ]
        return self.kinds["ListAndWatchResponse"](devices=listed)

    def options(self, _request: Any, _context: Any) -> Any:
        """No extras asked of the kubelet."""
        return self.kinds["DevicePluginOptions"]()

    def list_and_watch(self, _request: Any, context: Any) -> Iterator[Any]:
        """The devices, and again at every change."""
        sent = None
        while context.is_active():
            state = read(self.state_file)
            shown = (state.count, state.unhealthy)
            if shown != sent:
                sent = shown
                yield self.devices(state)
            time.sleep(POLL_S)

    def allocate(self, request: Any, _context: Any) -> Any:
        """Tell the container which GPUs are its own, as NVIDIA's plugin does."""
        answers = []
        for wanted in request.container_requests:
            variable = self.kinds["Variable"](key="NVIDIA_VISIBLE_DEVICES", value=",".join(wanted.devices_ids))
            answers.append(self.kinds["ContainerAllocateResponse"](envs=[variable]))
        return self.kinds["AllocateResponse"](container_responses=answers)

    def pre_start(self, _request: Any, _context: Any) -> Any:
        """Nothing to prepare."""
        return self.kinds["Empty"]()

    def serve(self) -> grpc.Server:
        """Listen beside the kubelet's socket."""

        def unary(method: Callable[[Any, Any], Any], request: str) -> Any:
            return grpc.unary_unary_rpc_method_handler(
                method, self.kinds[request].FromString, lambda message: message.SerializeToString()
            )

        handlers = {
            "GetDevicePluginOptions": unary(self.options, "Empty"),
            "Allocate": unary(self.allocate, "AllocateRequest"),
            "PreStartContainer": unary(self.pre_start, "Empty"),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                self.list_and_watch, self.kinds["Empty"].FromString, lambda message: message.SerializeToString()
            ),
        }
        server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", handlers),))
        (FOLDER / ENDPOINT).unlink(missing_ok=True)
        server.add_insecure_port(f"unix://{FOLDER / ENDPOINT}")
        server.start()
        return server

    def register(self) -> None:
        """Announce the resource to the kubelet."""
        request = self.kinds["RegisterRequest"](version="v1beta1", endpoint=ENDPOINT, resource_name=GPU_RESOURCE)
        with grpc.insecure_channel(f"unix://{FOLDER / 'kubelet.sock'}") as channel:
            call = channel.unary_unary(
                "/v1beta1.Registration/Register",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=self.kinds["Empty"].FromString,
            )
            call(request, timeout=5)


def main() -> None:
    """Serve for as long as the kubelet lives; a restarted kubelet empties the folder and wants a new registration."""
    plugin = FakeGpus(Path(sys.argv[1]))
    while True:
        if not (FOLDER / "kubelet.sock").exists():
            time.sleep(POLL_S)
            continue
        server = plugin.serve()
        try:
            plugin.register()
            sys.stderr.write(f"registered {GPU_RESOURCE}\n")
            while (FOLDER / ENDPOINT).exists():
                time.sleep(POLL_S)
        except grpc.RpcError as error:
            sys.stderr.write(f"registration failed, trying again: {error}\n")
            time.sleep(POLL_S)
        finally:
            server.stop(grace=0)


if __name__ == "__main__":
    main()
