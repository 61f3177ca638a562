"""The Kubernetes API in seven verbs on plain dictionaries: limited, timed, retried where that is safe, fenced (I/O).

Credentials and TLS come from kubernetes.aio (`connection.py`); its `ApiClient` is left out of the request path, since
it walks and copies every body and waits five minutes by default.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Self, cast
from urllib.parse import quote, urlencode

import aiohttp
import prometheus_client
from yarl import URL

from conch import names
from conch.kube.errors import ApiError, NotFound, NotLeader, NotSent, Throttled, Unreachable, from_answer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from types import TracebackType

    from conch.config import Settings
    from conch.kube.connection import Connection

Object = dict[str, Any]
Objects = list[Object]

CHUNK: Final = 200
"""Objects of one answer to a LIST: as Python objects they take ten times the bytes of their JSON."""
TRIES: Final = 4
FIRST_BACKOFF_S: Final = 0.2
LONGEST_WAIT_S: Final = 30.0
SHOWN_BYTES: Final = 200

# Each new connection costs both sides a TLS handshake: a burst is over sooner on few of them.
CONNECTIONS: Final = 24
_JSON: Final = "application/json"
# JSON is YAML: the server takes it under this name, and under no other as an apply.
_APPLY: Final = "application/apply-patch+yaml"
_MERGE: Final = "application/merge-patch+json"


@dataclass(frozen=True)
class Resource:
    """One kind, as the API addresses it."""

    api_version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def root(self) -> str:
        """Path of its API group and version."""
        return f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Path of the collection, or of one object, or of its subresource; every part is quoted."""
        parts = [self.root]
        if self.namespaced and namespace:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        if name is not None:
            # An empty name would address the collection: a delete would then mean all of it.
            if not name or (self.namespaced and not namespace):
                raise ValueError(f"{self.kind} needs a name{' and a namespace' * self.namespaced}: {namespace}/{name}")
            parts.append(quote(name, safe=""))
        if subresource:
            parts.append(subresource)
        return "/".join(parts)


DEPLOYMENTS: Final = Resource("apps/v1", "deployments", "Deployment")
REPLICA_SETS: Final = Resource("apps/v1", "replicasets", "ReplicaSet")
SERVICES: Final = Resource("v1", "services", "Service")
PODS: Final = Resource("v1", "pods", "Pod")
NODES: Final = Resource("v1", "nodes", "Node", namespaced=False)
SERVICE_ACCOUNTS: Final = Resource("v1", "serviceaccounts", "ServiceAccount")
EVENTS: Final = Resource("v1", "events", "Event")
POD_DISRUPTION_BUDGETS: Final = Resource("policy/v1", "poddisruptionbudgets", "PodDisruptionBudget")
NETWORK_POLICIES: Final = Resource("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy")
LEASES: Final = Resource("coordination.k8s.io/v1", "leases", "Lease")
HORIZONTAL_POD_AUTOSCALERS: Final = Resource("autoscaling/v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
SCALED_OBJECTS: Final = Resource("keda.sh/v1alpha1", "scaledobjects", "ScaledObject")
POD_MONITORS: Final = Resource("monitoring.coreos.com/v1", "podmonitors", "PodMonitor")
RESOURCE_CLAIM_TEMPLATES: Final = Resource("resource.k8s.io/v1", "resourceclaimtemplates", "ResourceClaimTemplate")
INFERENCE_SERVICES: Final = Resource(names.API_VERSION, names.SERVICE_PLURAL, names.SERVICE_KIND)

RESOURCE_BY_KIND: Final[Mapping[str, Resource]] = {
    resource.kind: resource
    for resource in (
        DEPLOYMENTS,
        REPLICA_SETS,
        SERVICES,
        PODS,
        NODES,
        SERVICE_ACCOUNTS,
        EVENTS,
        POD_DISRUPTION_BUDGETS,
        NETWORK_POLICIES,
        LEASES,
        HORIZONTAL_POD_AUTOSCALERS,
        SCALED_OBJECTS,
        POD_MONITORS,
        RESOURCE_CLAIM_TEMPLATES,
        INFERENCE_SERVICES,
    )
}


@dataclass(frozen=True)
class _Request:
    verb: str
    method: str
    path: str
    kind: str = ""
    query: Mapping[str, str] | None = None
    body: Object | None = None
    content_type: str = _JSON
    subresource: str = ""
    manager: str = ""
    plain: bool = False
    """Whether the answer is text, which comes back under the key `text`."""

    @property
    def mutates(self) -> bool:
        return self.method != "GET"


class Kube:
    """A client of one cluster. Use as `async with`; `writes` counts what was sent, by verb, kind, subresource, manager.

    Reads are tried four times with jittered back-off while the server is unreachable or throttles. A write is sent
    again only when it surely was not carried out: after a 429, or when no connection came about.
    """

    def __init__(
        self,
        connection: Connection,
        settings: Settings,
        *,
        may_write: Callable[[], bool],
        registry: prometheus_client.CollectorRegistry | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.writes: Counter[tuple[str, str, str, str]] = Counter()
        self._connection = connection
        self._may_write = may_write
        self._sleep = sleep
        self._timeout = aiohttp.ClientTimeout(
            total=settings.api_timeout_s, sock_connect=min(3.0, settings.api_timeout_s / 2)
        )
        self._bucket = _Bucket(settings.api_requests_per_s, sleep)
        self._session: aiohttp.ClientSession | None = None
        self._requests = prometheus_client.Counter(
            "conch_api_requests",
            "Requests sent to the API server by verb, kind and HTTP code (0: no answer).",
            ("verb", "kind", "code"),
            registry=registry,
        )

    async def __aenter__(self) -> Self:
        """Open the session; connections are made when needed."""
        headers = {"User-Agent": "conch", "Accept": _JSON}
        self._session = self._connection.session(connections=CONNECTIONS, headers=headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """One object, read from the server; None if it does not exist."""
        try:
            return await self._call(_Request("get", "GET", resource.path(namespace, name), resource.kind))
        except NotFound:
            return None

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
        kept: Callable[[Object], Object | None] | None = None,
    ) -> tuple[Objects, str]:
        """All objects, with their apiVersion and kind, and the resourceVersion of the list.

        Read in chunks; from the start again when the server has forgotten the snapshot (410). `kept` makes of
        each object what is kept while the next chunk is read, None for nothing: all pods of a cluster in full take
        gigabytes.
        """
        query = {"limit": str(CHUNK)}
        if label_selector:
            query["labelSelector"] = label_selector
        if field_selector:
            query["fieldSelector"] = field_selector
        for restarts in itertools.count():
            try:
                return await self._pages(resource, namespace, query, kept)
            except ApiError as error:
                if error.status != HTTPStatus.GONE or restarts >= TRIES:
                    raise
        raise AssertionError("unreachable")

    async def apply(
        self,
        body: Object,
        *,
        manager: str,
        force: bool = True,
        subresource: str | None = None,
        resource: Resource | None = None,
    ) -> Object:
        """Server-side apply, with unknown fields refused; creates what does not exist.

        A `Scale` addresses a Deployment unless `resource` says otherwise. A `metadata.resourceVersion` in the body
        is a precondition (R2): `Conflict` when the object has moved on.
        """
        kind = body["kind"]
        target = resource or (DEPLOYMENTS if kind == "Scale" else RESOURCE_BY_KIND[kind])
        metadata = body["metadata"]
        return await self._call(
            _Request(
                "apply",
                "PATCH",
                target.path(metadata.get("namespace"), metadata["name"], subresource),
                target.kind,
                {"fieldManager": manager, "force": "true" if force else "false", "fieldValidation": "Strict"},
                body,
                _APPLY,
                subresource or "",
                manager,
            )
        )

    async def merge(self, body: Object, *, manager: str) -> Object:
        """JSON merge patch of an object that exists: lists are replaced whole, which an apply never does."""
        resource, metadata = RESOURCE_BY_KIND[body["kind"]], body["metadata"]
        return await self._call(
            _Request(
                "merge",
                "PATCH",
                resource.path(metadata.get("namespace"), metadata["name"]),
                resource.kind,
                {"fieldManager": manager, "fieldValidation": "Strict"},
                body,
                _MERGE,
                manager=manager,
            )
        )

    async def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str, resource_version: str | None
    ) -> bool:
        """Delete exactly the object that was looked at (R6); its dependents follow in the background.

        False if there is none of that name; `Conflict` if it is another one, or has changed since.
        """
        preconditions = {"uid": uid}
        if resource_version is not None:
            preconditions["resourceVersion"] = resource_version
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": preconditions,
        }
        try:
            await self._call(
                _Request("delete", "DELETE", resource.path(namespace, name), resource.kind, None, body, _JSON)
            )
        except NotFound:
            return False
        return True

    async def logs(self, namespace: str, pod: str, container: str, *, tail_lines: int, limit_bytes: int) -> str:
        """The last lines of a container's log, at most so many bytes of them."""
        query = {"container": container, "tailLines": str(tail_lines), "limitBytes": str(limit_bytes)}
        path = PODS.path(namespace, pod, "log")
        answer = await self._call(_Request("get", "GET", path, PODS.kind, query, subresource="log", plain=True))
        return str(answer["text"])

    async def server_version(self) -> str:
        """The server's own version, as `v1.36.3`."""
        answer = await self._call(_Request("get", "GET", "/version"))
        return str(answer["gitVersion"])

    async def has_resource(self, resource: Resource) -> bool:
        """Whether the cluster serves this kind in this version now."""
        try:
            answer = await self._call(_Request("get", "GET", resource.root))
        except NotFound:
            return False
        return any(item["name"] == resource.plural for item in answer["resources"])

    async def _pages(
        self,
        resource: Resource,
        namespace: str | None,
        query: Mapping[str, str],
        kept: Callable[[Object], Object | None] | None,
    ) -> tuple[Objects, str]:
        items: Objects = []
        page_query = dict(query)
        while True:
            page = await self._call(
                _Request("list", "GET", resource.path(namespace or None), resource.kind, page_query)
            )
            for item in page["items"] or ():
                # The server leaves both out of a list's items.
                item["apiVersion"], item["kind"] = resource.api_version, resource.kind
                what = item if kept is None else kept(item)
                if what is not None:
                    items.append(what)
            more = page["metadata"].get("continue")
            if not more:
                return items, page["metadata"]["resourceVersion"]
            page_query = {**query, "continue": more}

    async def _call(self, request: _Request) -> Object:
        for attempt in itertools.count(1):
            await self._bucket.take()
            # After the wait for the bucket and before each try: the lease may have been lost meanwhile.
            if request.mutates and not self._may_write():
                raise NotLeader(f"{request.verb} of {request.path}")
            try:
                return await self._send(request)
            except (Throttled, Unreachable) as error:
                safe = not request.mutates or isinstance(error, Throttled | NotSent)
                wait_s = _backoff_s(attempt, error.retry_after_s)
                if not safe or attempt == TRIES or wait_s > LONGEST_WAIT_S:
                    raise
                await self._sleep(wait_s)
        raise AssertionError("unreachable")

    async def _send(self, request: _Request) -> Object:
        if self._session is None:
            raise RuntimeError("Kube is used outside of `async with`")
        address = self._connection.server + request.path
        if request.query:
            address = f"{address}?{urlencode(request.query)}"
        if request.mutates:
            self.writes[request.verb, request.kind, request.subresource, request.manager] += 1
        code = 0
        try:
            await self._connection.renew()
            async with self._session.request(
                request.method,
                URL(address, encoded=True),
                data=None if request.body is None else json.dumps(request.body, separators=(",", ":")).encode(),
                headers=_headers(request),
                timeout=self._timeout,
                server_hostname=self._connection.server_name,
                allow_redirects=False,
            ) as response:
                code = response.status
                raw = await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NotSent(0, type(error).__name__, str(error)) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(0, type(error).__name__, str(error) or "no answer in time") from error
        finally:
            self._requests.labels(request.verb, request.kind, str(code)).inc()
        if code >= HTTPStatus.MULTIPLE_CHOICES:
            raise from_answer(code, _decoded(raw), retry_after=response.headers.get("Retry-After"))
        if request.plain:
            return {"text": raw.decode(errors="replace")}
        try:
            return cast("Object", json.loads(raw))
        except ValueError as error:
            # Something between us and the API server answered in its place, or changed what it said.
            answered = f"a body that is no JSON, of type {response.content_type}: {raw[:SHOWN_BYTES]!r}"
            raise Unreachable(code, "NotJSON", answered) from error


def _headers(request: _Request) -> dict[str, str] | None:
    if request.plain:
        return {"Accept": "*/*"}  # a log is no JSON: asked for that, the server answers 406
    return {"Content-Type": request.content_type} if request.body is not None else None


class _Bucket:
    """A token bucket: `rate` a second on average, twice that at once."""

    def __init__(
        self,
        rate: float,
        sleep: Callable[[float], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate = rate
        self._burst = max(1.0, 2 * rate)
        self._sleep = sleep
        self._clock = clock
        self._tokens = self._burst
        self._at = clock()

    async def take(self) -> None:
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate) - 1
        self._at = now
        # A negative balance is a reservation: whoever comes later waits longer, so nobody is overtaken for ever.
        if self._tokens < 0:
            await self._sleep(-self._tokens / self._rate)


def _backoff_s(attempt: int, asked_s: float | None) -> float:
    own_s = FIRST_BACKOFF_S * 2.0 ** (attempt - 1) * random.uniform(0.5, 1.5)  # noqa: S311 - spreads load only
    return max(own_s, asked_s or 0.0)


def _decoded(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")
