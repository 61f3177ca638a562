"""Debian's docker-registry on loopback, with TLS and, where a test asks, a password or a token service before it."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import shutil
import ssl
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs, urlsplit

import urllib3
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from store_servers import free_port, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROGRAM = "docker-registry"
TITLE = "org.opencontainers.image.title"
USER, PASSWORD = "reader", "pass:word/1"
HTPASSWD = f"{USER}:$2b$04$.G8bDRNx0kFdmji7T6J17eg7bJiBSoGUj14lRGg4mnptuPOFk0MSG\n"
"""As `htpasswd -nbB` writes it."""
SERVICE, ISSUER = "conch tests", "conch test tokens"


@dataclass(frozen=True)
class Registry:
    """A running registry; `authority` is the folder with ca.pem."""

    port: int
    authority: Path
    address: str = "localhost"

    @property
    def host(self) -> str:
        return f"{self.address}:{self.port}"

    @property
    def ca_file(self) -> Path:
        return self.authority / "ca.pem"

    def push(self, repository: str, layers: list[tuple[bytes, dict[str, Any]]], *, tag: str = "v1", **more: Any) -> str:
        """Push blobs with their descriptors' fields and a manifest over them. Returns the manifest's digest."""
        descriptors = [{**self.push_blob(repository, data), **fields} for data, fields in layers]
        config = self.push_blob(repository, b"{}") | {"mediaType": "application/vnd.oci.empty.v1+json"}
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "artifactType": "application/vnd.example.model",
            "config": config,
            "layers": descriptors,
        }
        return self.push_manifest(repository, manifest | more, tag)

    def push_blob(self, repository: str, data: bytes) -> dict[str, Any]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        with self._pool() as pool:
            begun = pool.request("POST", f"https://{self.host}/v2/{repository}/blobs/uploads/")
            location = begun.headers["Location"]
            done = pool.request("PUT", f"{location}{'&' if '?' in location else '?'}digest={digest}", body=data)
        assert done.status == 201, done.data
        return {"mediaType": "application/octet-stream", "digest": digest, "size": len(data)}

    def push_manifest(self, repository: str, manifest: dict[str, Any], tag: str) -> str:
        body = json.dumps(manifest).encode()
        url = f"https://{self.host}/v2/{repository}/manifests/{tag}"
        with self._pool() as pool:
            done = pool.request("PUT", url, body=body, headers={"Content-Type": manifest["mediaType"]})
        assert done.status == 201, done.data
        return f"sha256:{hashlib.sha256(body).hexdigest()}"

    def _pool(self) -> urllib3.PoolManager:
        return urllib3.PoolManager(ssl_context=ssl.create_default_context(cafile=str(self.ca_file)), retries=False)


@contextmanager
def registry(
    authority: Path, storage: Path, *, address: str = "localhost", listen: str = "127.0.0.1", **settings: str
) -> Iterator[Registry]:
    """Settings are the registry's own variables, without REGISTRY_. AssertionError says what to install."""
    program = shutil.which(PROGRAM)
    assert program, f"{PROGRAM} isn't in PATH: run `python3 e2e/environment.py install` as root, or install it"
    port = free_port()
    config = storage / "config.yml"
    storage.mkdir(exist_ok=True)
    config.write_text("version: 0.1\nlog: {level: error}\nstorage: {filesystem: {}}\n")
    variables = {
        "HTTP_ADDR": f"{listen}:{port}",
        "HTTP_TLS_CERTIFICATE": str(authority / "server.crt"),
        "HTTP_TLS_KEY": str(authority / "server.key"),
        "STORAGE_FILESYSTEM_ROOTDIRECTORY": str(storage / "data"),
        **settings,
    }
    environment = {f"REGISTRY_{name}": text for name, text in variables.items()}
    with running([program, "serve", str(config)], port, **environment):
        yield Registry(port, authority, address)


class TokenHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = cast("TokenService", self.server)
        query = parse_qs(urlsplit(self.path).query)
        login = self.headers.get("Authorization")
        server.asked.append((query["scope"][0], login))
        wanted = f"Basic {base64.b64encode(f'{USER}:{PASSWORD}'.encode()).decode()}"
        repository = query["scope"][0].split(":")[1]
        # As public registries do: whoever has no login gets a token too, with which only some repositories answer.
        granted = login == wanted or repository.startswith("public/")
        body = json.dumps({"token": server.token(repository, ["pull"] if granted else [])}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        pass


class TokenService(http.server.ThreadingHTTPServer):
    """Signs tokens that the registry believes (https://distribution.github.io/distribution/spec/auth/jwt/)."""

    def __init__(self, authority: Path) -> None:
        super().__init__(("127.0.0.1", 0), TokenHandler)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(authority / "server.pem")
        self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.asked: list[tuple[str, str | None]] = []
        key = serialization.load_pem_private_key((authority / "server.key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key = key
        certificate = x509.load_pem_x509_certificate((authority / "server.crt").read_bytes())
        self._certificate = base64.b64encode(certificate.public_bytes(serialization.Encoding.DER)).decode()

    @property
    def url(self) -> str:
        return f"https://localhost:{self.server_port}/token"

    def token(self, repository: str, actions: list[str]) -> str:
        now = int(time.time())
        header = {"typ": "JWT", "alg": "ES256", "x5c": [self._certificate]}
        claims = {
            "iss": ISSUER, "sub": "", "aud": SERVICE, "exp": now + 300, "nbf": now - 10, "iat": now, "jti": str(now),
            "access": [{"type": "repository", "name": repository, "actions": actions}],
        }  # fmt: skip
        signed = f"{_base64(json.dumps(header).encode())}.{_base64(json.dumps(claims).encode())}"
        r, s = decode_dss_signature(self._key.sign(signed.encode(), ec.ECDSA(hashes.SHA256())))
        return f"{signed}.{_base64(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"


@contextmanager
def token_service(authority: Path) -> Iterator[TokenService]:
    server = TokenService(authority)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def token_settings(service: TokenService, authority: Path) -> dict[str, str]:
    """The registry's settings that make it ask for tokens of this service."""
    return {
        "AUTH_TOKEN_REALM": service.url,
        "AUTH_TOKEN_SERVICE": SERVICE,
        "AUTH_TOKEN_ISSUER": ISSUER,
        "AUTH_TOKEN_ROOTCERTBUNDLE": str(authority / "ca.pem"),
    }


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
