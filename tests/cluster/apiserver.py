"""The tests' own client of the API server, as the administrator: plain calls, one connection per thread (I/O)."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from conch import names
from conch.kube.client import DEPLOYMENTS, INFERENCE_SERVICES, RESOURCE_BY_KIND, SERVICES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from conch.kube.client import Resource
    from sandbox import Region

Object = dict[str, Any]
TIMEOUT_S = 30.0


class Refused(Exception):
    """An answer other than success."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class ApiServer:
    """Reads and writes objects; `manager` is the field manager, so a test can play a person, GitOps or an HPA."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self._token = region.token
        self._context = ssl.create_default_context(cafile=str(region.layout.pki / "ca.crt"))
        self._local = threading.local()

    def call(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        """One request, tried twice when the kept connection had been closed."""
        for last in (False, True):
            connection: http.client.HTTPSConnection | None = getattr(self._local, "connection", None)
            try:
                if connection is None:
                    connection = http.client.HTTPSConnection(
                        self.region.spec.address, 6443, timeout=TIMEOUT_S, context=self._context
                    )
                    with self.region.network():
                        connection.connect()
                    self._local.connection = connection
                headers = {**self.credentials(), "Content-Type": content_type}
                connection.request(method, path, None if body is None else json.dumps(body), headers)
                answer = connection.getresponse()
                raw = answer.read()
            except (OSError, http.client.HTTPException):
                self.close()
                if last:
                    raise
            else:
                found = json.loads(raw) if raw.startswith(b"{") else raw.decode()
                if answer.status >= 300:
                    raise Refused(answer.status, found["message"] if isinstance(found, dict) else found)
                return found
        raise AssertionError("unreachable")

    def credentials(self) -> dict[str, str]:
        """The administrator's header."""
        return {"Authorization": f"Bearer {self._token}"}

    def close(self) -> None:
        """Close this thread's connection."""
        connection: http.client.HTTPSConnection | None = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
        self._local.connection = None

    def find(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """One object; None if there is none."""
        try:
            return self.call("GET", resource.path(namespace, name))  # type: ignore[no-any-return]
        except Refused as error:
            if error.status == 404:
                return None
            raise

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """One object that must be there."""
        return self.call("GET", resource.path(namespace, name))  # type: ignore[no-any-return]

    def all(self, resource: Resource, namespace: str | None = None) -> list[Object]:
        """All objects of a kind."""
        items: list[Object] = self.call("GET", resource.path(namespace))["items"]
        return [{**item, "apiVersion": resource.api_version, "kind": resource.kind} for item in items]

    def create(self, body: Object) -> Object:
        """Create."""
        resource = RESOURCE_BY_KIND[body["kind"]]
        return self.call("POST", resource.path(body["metadata"].get("namespace")), body)  # type: ignore[no-any-return]

    def apply(self, body: Object, *, manager: str = "gitops", path: str | None = None) -> Object:
        """Server-side apply with force."""
        metadata = body["metadata"]
        target = path or RESOURCE_BY_KIND[body["kind"]].path(metadata.get("namespace"), metadata["name"])
        query = urlencode({"fieldManager": manager, "force": "true"})
        return self.call("PATCH", f"{target}?{query}", body, "application/apply-patch+yaml")  # type: ignore[no-any-return]

    def edit(
        self, resource: Resource, namespace: str, name: str, patch: Any, *, sub: str = "", manager: str = "person"
    ) -> Object:
        """A patch: a list is a JSON patch, anything else a merge patch."""
        kind = "json-patch" if isinstance(patch, list) else "merge-patch"
        path = f"{resource.path(namespace, name, sub or None)}?{urlencode({'fieldManager': manager})}"
        return self.call("PATCH", path, patch, f"application/{kind}+json")  # type: ignore[no-any-return]

    def scale(self, namespace: str, service: str, replicas: int, *, manager: str = "person") -> None:
        """What `kubectl scale` and an HPA do."""
        body = {"spec": {"replicas": replicas}}
        self.edit(DEPLOYMENTS, namespace, names.deployment(service), body, sub="scale", manager=manager)

    def delete(self, resource: Resource, namespace: str, name: str, *, propagation: str = "Background") -> None:
        """Delete; what is gone already is no error."""
        try:
            self.call("DELETE", resource.path(namespace, name), {"propagationPolicy": propagation})
        except Refused as error:
            if error.status != 404:
                raise

    def create_namespace(self, name: str) -> None:
        """A namespace."""
        self.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})

    def delete_namespace(self, name: str) -> None:
        """Begin to delete a namespace."""
        try:
            self.call("DELETE", f"/api/v1/namespaces/{name}")
        except Refused as error:
            if error.status not in {404, 409}:
                raise

    # --- what tests look at most

    def service(self, namespace: str, name: str) -> Object:
        """The InferenceService."""
        return self.get(INFERENCE_SERVICES, namespace, name)

    def deployment(self, namespace: str, name: str) -> Object | None:
        """Its Deployment."""
        return self.find(DEPLOYMENTS, namespace, names.deployment(name))

    def clients_service(self, namespace: str, name: str) -> Object | None:
        """The Service that clients call."""
        return self.find(SERVICES, namespace, names.clients_service(name))

    def events(self, namespace: str, reason: str | None = None) -> list[str]:
        """Messages of the events in a namespace."""
        found = self.call("GET", f"/api/v1/namespaces/{namespace}/events")["items"]
        return [item["message"] for item in found if reason in {None, item["reason"]}]


def condition(service: Mapping[str, Any], type_: str) -> dict[str, Any]:
    """One condition of an InferenceService; empty while there is none."""
    conditions = (service.get("status") or {}).get("conditions") or []
    return next((item for item in conditions if item["type"] == type_), {})


def managers(obj: Mapping[str, Any], field: str) -> set[str]:
    """Who owns a field such as `spec.replicas`."""
    owners = set()
    for entry in obj["metadata"].get("managedFields") or []:
        here: Any = entry.get("fieldsV1") or {}
        for part in field.split("."):
            here = here.get(f"f:{part}") if isinstance(here, dict) else None
        if here is not None:
            owners.add(entry["manager"])
    return owners
