"""Where the API server is and how to prove who we are, for client, watch and lease: kubernetes.aio's configuration."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config import KUBE_CONFIG_DEFAULT_LOCATION, load_incluster_config, load_kube_config

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

_EXEC_REFRESH_S = 60.0


class Connection:
    """One cluster's address, TLS context and credentials, good for several event loops and threads."""

    def __init__(self, configuration: Configuration, loader: Any = None) -> None:
        self._configuration = configuration
        self._loader = loader
        self._refreshed_at = time.monotonic()
        transport = RESTClientObject(configuration)
        self.server: str = configuration.host.rstrip("/")
        self.ssl_context: ssl.SSLContext = transport.ssl_context
        self.server_name: str | None = configuration.tls_server_name
        self.proxy: str | None = configuration.proxy

    @classmethod
    async def load(cls, kubeconfig: str | None = None) -> Connection:
        """From a kubeconfig (given, or in its usual place), else from the pod's ServiceAccount."""
        configuration = Configuration()
        paths = (kubeconfig or KUBE_CONFIG_DEFAULT_LOCATION).split(":")
        if kubeconfig or any(Path(path).expanduser().is_file() for path in paths):  # noqa: ASYNC240 - once, at start
            loader = await load_kube_config(  # type: ignore[no-untyped-call]
                config_file=kubeconfig, client_configuration=configuration, persist_config=False
            )
            return cls(configuration, loader)
        load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        return cls(configuration)

    @classmethod
    def to(cls, server: str) -> Connection:
        """To a server without credentials: a local proxy, or a test's own."""
        return cls(Configuration(host=server))

    def authorization(self) -> str | None:
        """The header's value; the ServiceAccount's token is read again each minute, as it is rotated on disk."""
        configuration = self._configuration
        refresh: Callable[[Configuration], Any] | None = configuration.refresh_api_key_hook
        if refresh is not None:
            refresh(configuration)
        value: str | None = configuration.api_key.get("BearerToken") or configuration.api_key.get("authorization")
        return value.strip() if value else None

    async def renew(self) -> None:
        """Run a kubeconfig's credential plugin again, at most once a minute; nothing to do for other credentials."""
        if self._loader is None or "exec" not in self._loader._user:  # noqa: SLF001 - as the package's refresh_token does
            return
        if time.monotonic() - self._refreshed_at < _EXEC_REFRESH_S:
            return
        self._refreshed_at = time.monotonic()
        await self._loader.load_from_exec_plugin()
        self._configuration.api_key["BearerToken"] = self._loader.token

    def session(self, *, connections: int = 0, **options: Any) -> aiohttp.ClientSession:
        """A session of the running event loop, whose requests always carry the newest token.

        `connections` limits how many are open at once; 0 does not, as watches need, which keep theirs.
        Proxy variables of the environment are ignored: a cluster-wide HTTPS_PROXY must not see API traffic.
        """

        async def authenticate(
            request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
        ) -> aiohttp.ClientResponse:
            value = self.authorization()
            if value:
                request.headers["Authorization"] = value
            return await handler(request)

        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections, ssl=self.ssl_context),
            middlewares=(authenticate,),
            trust_env=False,
            proxy=self.proxy,
            **options,
        )
