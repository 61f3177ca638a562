"""The operator's settings, from CONCH_* variables; nothing else reads the environment."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from conch import names


class Settings(BaseSettings):
    """All times in seconds. A wrong value stops the start with the variable's name."""

    model_config = SettingsConfigDict(env_prefix="CONCH_", frozen=True, extra="forbid")

    namespace: str = Field("conch-system", description="Where the operator runs and holds its Lease.")
    identity: str = Field("conch-local", description="This replica's name in the Lease; the pod's name.")
    watch_namespaces: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Comma-separated namespaces to work in; empty: the whole cluster."
    )
    http_address: str = Field("0.0.0.0", description="Where /healthz, /readyz and /metrics listen.")  # noqa: S104 - a pod's own address
    http_port: int = Field(8080, ge=0, le=65535)

    fetch_image: str = Field("conch.dev/conch:0.1.0", description="Image of `conch fetch`: the operator's own.")
    triton_image: str = Field("nvcr.io/nvidia/tritonserver:26.10-py3", description="Default of spec.runtime.image.")
    image_pull_policy: str = Field("IfNotPresent")
    allow_python_models: bool = Field(
        True, description="False: services whose models bring code, such as Python, are refused."
    )

    model_cache_host_paths: Annotated[tuple[str, ...], NoDecode] = Field(
        (names.CACHE_HOST_PATH,),
        description="Comma-separated folders of the nodes in or below which spec.runtime.modelCache.hostPath may lie; "
        "empty: nowhere.",
    )

    prometheus_url: str | None = Field(None, description="Empty: no scaling on metrics, and the status says so.")
    prometheus_timeout_s: float = Field(3.0, gt=0)
    prometheus_workers: int = Field(4, ge=1, le=16)
    prometheus_namespace_label: str = Field("namespace", pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*$")
    prometheus_pod_label: str = Field("pod", pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*$")
    prometheus_cluster_label: str = Field("", pattern=r"^([a-zA-Z_][a-zA-Z0-9_]*)?$")
    prometheus_cluster: str = Field("", description="Value of the cluster label; empty: no cluster matcher.")
    metrics_window_s: int = Field(30, ge=4, description="Window of rate(); at least four scrapes.")
    metrics_stale_s: float = Field(30.0, gt=0, description="A sample older than this is stale.")
    prometheus_namespace: str = Field("monitoring", description="Whose pods may scrape Triton (NetworkPolicy).")

    node_autoscaling: bool = Field(False, description="Pending pods up to the order are wanted: they bring nodes.")
    tick_s: float = Field(5.0, gt=0)
    resync_s: float = Field(600.0, gt=0)
    relist_s: float = Field(300.0, gt=0)
    workers: int = Field(16, ge=1, le=256)
    api_requests_per_s: float = Field(400.0, gt=0)
    api_timeout_s: float = Field(10.0, gt=0)

    lease_duration_s: float = Field(15.0, gt=0)
    lease_renew_deadline_s: float = Field(10.0, gt=0)
    lease_retry_s: float = Field(2.0, gt=0)

    @field_validator("watch_namespaces", "model_cache_host_paths", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value
