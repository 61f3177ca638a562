"""Artifacts from Debian's docker-registry, by the real `conch fetch`."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import random
import tarfile
import threading
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from conch.storage.download import Patience
from conch.storage.errors import DigestMismatchError, FetchError, SourceRefusedError, WrongLayoutError
from conch.storage.oci import Reference, RegistryAuthorization
from conch.storage.plan import PlannedModel
from conch.storage.remote import Remote
from fetching import Handler, Haste, conch_fetch, dropped_after, make_authority, serving, visible
from oci_registry import (
    HTPASSWD,
    PASSWORD,
    TITLE,
    USER,
    Registry,
    TokenService,
    registry,
    token_service,
    token_settings,
)
from store_servers import SecretFolder, proxy

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

BODY = random.Random(7).randbytes(300_000)
QUICK = Patience(stall_timeout_s=0.5, connect_timeout_s=2, attempts=3)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("registry")


@pytest.fixture(scope="module")
def open_registry(authority: Path, storage: Path) -> Iterator[Registry]:
    with registry(authority, storage) as server:
        yield server


@pytest.fixture(scope="module")
def locked_registry(authority: Path, storage: Path, open_registry: Registry) -> Iterator[Registry]:
    """The same artifacts, for whoever has the password."""
    del open_registry
    file = storage / "htpasswd"
    file.write_text(HTPASSWD)
    with registry(authority, storage, AUTH_HTPASSWD_REALM="models", AUTH_HTPASSWD_PATH=str(file)) as server:
        yield server


@pytest.fixture(scope="module")
def tokens(authority: Path) -> Iterator[TokenService]:
    with token_service(authority) as service:
        yield service


@pytest.fixture(scope="module")
def token_registry(authority: Path, storage: Path, open_registry: Registry, tokens: TokenService) -> Iterator[Registry]:
    """The same artifacts, for whoever has a token."""
    del open_registry
    with registry(authority, storage, **token_settings(tokens, authority)) as server:
        yield server


def titled(name: str, **annotations: str) -> dict[str, Any]:
    return {"annotations": {TITLE: name, **annotations}}


def tar_of(files: dict[str, bytes], links: Mapping[str, str] = MappingProxyType({})) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
        for name, target in links.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)
    return buffer.getvalue()


TAR_TYPE = {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip"}


def model(server: Registry, repository: str, digest: str, **changes: Any) -> dict[str, Any]:
    fields = {
        "name": "m",
        "uri": f"oci://{server.host}/{repository}@{digest}",
        "fileName": "model.onnx",
        "config": "",
        "field": "spec.models[0]",
        "ca": str(server.ca_file),
    }
    return fields | changes


def fetch(folder: Path, fields: dict[str, Any]) -> dict[str, bytes]:
    (folder / "downloads").mkdir(exist_ok=True)
    log = structlog.wrap_logger(structlog.testing.CapturingLogger())
    remote = Remote(QUICK, ca_file=None, clock=Haste(), jitter=lambda: 0.5, log=log)
    content = folder / "content"
    remote.fetch(PlannedModel.model_validate(fields), content, folder / "downloads")
    return {str(path.relative_to(content)): path.read_bytes() for path in content.rglob("*") if path.is_file()}


@pytest.mark.parametrize("by_tag", [False, True])
def test_titled_layers_become_files_of_a_model(by_tag: bool, open_registry: Registry, tmp_path: Path) -> None:  # noqa: FBT001
    layers = [(BODY, titled("1/model.onnx")), (b"two", titled("2/model.onnx")), (b"cat\n", titled("labels.txt"))]
    digest = open_registry.push("vision/files", layers)
    fields = model(open_registry, "vision/files", digest, versions=[1, 2])
    if by_tag:
        fields |= {"uri": f"oci://{open_registry.host}/vision/files:v1", "digest": digest}
    result = conch_fetch(tmp_path, [fields], None)
    assert result.code == 0, result.stderr
    assert visible(tmp_path) == {"m/config.pbtxt", "m/1/model.onnx", "m/2/model.onnx", "m/labels.txt"}
    assert (tmp_path / "models/m/1/model.onnx").read_bytes() == BODY
    (arrival,) = json.loads(result.termination)["fetched"]
    assert (arrival["origin"], arrival["bytes"]) == ("Download", len(BODY) + 7)


def test_the_second_pod_takes_an_artifact_out_of_the_cache(open_registry: Registry, tmp_path: Path) -> None:
    digest = open_registry.push("vision/cached", [(BODY, titled("model.onnx"))])
    cache = {"path": str(tmp_path / "cache"), "sizeBytes": 1 << 30}
    (tmp_path / "cache").mkdir()
    origins = []
    for pod in ("first", "second"):
        (tmp_path / pod).mkdir()
        result = conch_fetch(tmp_path / pod, [model(open_registry, "vision/cached", digest)], None, cache=cache)
        assert result.code == 0, result.stderr
        origins.append(json.loads(result.termination)["fetched"][0]["origin"])
        assert (tmp_path / pod / "models/m/1/model.onnx").read_bytes() == BODY
    assert origins == ["Download", "Cache"]


def test_tar_layers_are_unpacked_over_each_other(open_registry: Registry, tmp_path: Path) -> None:
    layers = [
        (tar_of({"1/model.onnx": b"old", "labels.txt": b"cat"}), TAR_TYPE),
        (tar_of({"1/model.onnx": BODY, "2/model.onnx": b"two"}), TAR_TYPE),
        (b"note", titled("notes/readme.txt")),
    ]
    digest = open_registry.push("vision/tars", layers)
    assert fetch(tmp_path, model(open_registry, "vision/tars", digest)) == {
        "1/model.onnx": BODY, "2/model.onnx": b"two", "labels.txt": b"cat", "notes/readme.txt": b"note",
    }  # fmt: skip
    assert [child.name for child in tmp_path.iterdir() if child.name.startswith("content.")] == []


@pytest.mark.parametrize("last", [(b"x", titled("up/evil")), (tar_of({"up/evil": b"x"}), TAR_TYPE)])
def test_links_of_two_layers_that_together_lead_out_are_not_written_through(
    last: tuple[bytes, dict[str, Any]], open_registry: Registry, tmp_path: Path
) -> None:
    layers = [
        (tar_of({"x/y/f": b""}, {"deep/d": "../x/y", "up": "deep/d/../.."}), TAR_TYPE),
        (tar_of({"s/f": b""}, {"deep/d": "../s"}), TAR_TYPE),
        last,
    ]
    digest = open_registry.push("vision/links", layers)
    with pytest.raises(WrongLayoutError, match="a layer would be written through the link up"):
        fetch(tmp_path, model(open_registry, "vision/links", digest))
    assert not (tmp_path / "evil").exists()


def test_a_folder_that_oras_pushed_is_unpacked(open_registry: Registry, tmp_path: Path) -> None:
    layer = (tar_of({"m/1/model.onnx": BODY}), TAR_TYPE | titled("m", **{"io.deis.oras.content.unpack": "true"}))
    digest = open_registry.push("vision/oras", [layer])
    result = conch_fetch(tmp_path, [model(open_registry, "vision/oras", digest)], None)
    assert result.code == 0, result.stderr
    assert visible(tmp_path) == {"m/config.pbtxt", "m/1/model.onnx"}


def test_a_single_archive_is_unpacked(open_registry: Registry, tmp_path: Path) -> None:
    digest = open_registry.push("vision/archive", [(tar_of({"model.onnx": BODY}), titled("model.tar.gz"))])
    assert fetch(tmp_path, model(open_registry, "vision/archive", digest)) == {"model.onnx": BODY}


def test_an_index_of_one_manifest_leads_to_it(open_registry: Registry, tmp_path: Path) -> None:
    digest = open_registry.push("vision/indexed", [(BODY, titled("model.onnx"))])
    index_type = "application/vnd.oci.image.index.v1+json"
    entry = {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest, "size": 1}
    index = {"schemaVersion": 2, "mediaType": index_type, "manifests": [entry]}
    pushed = open_registry.push_manifest("vision/indexed", index, "index")
    assert fetch(tmp_path, model(open_registry, "vision/indexed", pushed)) == {"model.onnx": BODY}
    pushed = open_registry.push_manifest("vision/indexed", index | {"manifests": [entry, entry]}, "two")
    with pytest.raises(SourceRefusedError, match=r"is an index of 2 manifests; name the digest of one of them"):
        fetch(tmp_path, model(open_registry, "vision/indexed", pushed))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([(b"x", {})], "has neither a title nor a tar's type (application/octet-stream); push it with the annotation"),
        ([(b"x", titled("../model.onnx"))], "is titled '../model.onnx', which is no relative path"),
        ([(b"x", titled("/etc/passwd"))], "is titled '/etc/passwd', which is no relative path"),
        ([(b"x", titled("a")), (b"y", titled("a"))], "has two layers called 'a'"),
        ([(b"x", titled("a")), (b"y", titled("a/b"))], "two layers hold a"),
        ([(tar_of({"a": b""}), TAR_TYPE), (tar_of({".wh.a": b""}), TAR_TYPE)],
         "a layer removes .wh.a of an earlier one, as container images do; use image://"),
        ([(tar_of({"a": b""}), TAR_TYPE), (tar_of({"a/b": b""}), TAR_TYPE)], "two layers hold a"),
        ([(b"no tar", TAR_TYPE)], ""),
        ([], "is no artifact with 1 to 1000 layers"),
    ],
)  # fmt: skip
def test_an_artifact_that_is_no_model_is_refused_with_the_reason(
    layers: list[tuple[bytes, dict[str, Any]]], message: str, open_registry: Registry, tmp_path: Path
) -> None:
    digest = open_registry.push("vision/wrong", layers)
    with pytest.raises(WrongLayoutError) as failure:
        fetch(tmp_path, model(open_registry, "vision/wrong", digest))
    assert message in str(failure.value)


def test_a_manifest_that_is_not_there_is_named_with_the_field(open_registry: Registry, tmp_path: Path) -> None:
    digest = "sha256:" + "0" * 64
    result = conch_fetch(tmp_path, [model(open_registry, "vision/absent", digest)], None)
    assert result.code == 3
    assert f"/v2/vision/absent/manifests/{digest} answered 404; correct spec.models[0].source.uri" in result.termination


def login_secret(folder: Path, kind: str, host: str, password: str = PASSWORD) -> str:
    pair = base64.b64encode(f"{USER}:{password}".encode()).decode()
    keys = {
        "pair": {"username": USER, "password": password},
        "docker": {".dockerconfigjson": json.dumps({"auths": {"other:1": {}, f"https://{host}/v1/": {"auth": pair}}})},
        "fields": {".dockerconfigjson": json.dumps({"auths": {host: {"username": USER, "password": password}}})},
    }[kind]
    return SecretFolder(folder / f"secret-{kind}", keys).mounted()


@pytest.mark.parametrize("kind", ["pair", "docker", "fields"])
def test_a_registry_that_wants_a_password_gets_it(
    kind: str, open_registry: Registry, locked_registry: Registry, tmp_path: Path
) -> None:
    digest = open_registry.push("vision/locked", [(BODY, titled("model.onnx"))])
    secret = login_secret(tmp_path, kind, locked_registry.host)
    assert fetch(tmp_path, model(locked_registry, "vision/locked", digest, secret=secret)) == {"model.onnx": BODY}


@pytest.mark.parametrize(
    ("secret", "message"),
    [
        (
            None,
            "answered 401; the server wants credentials; name a Secret with them in spec.models[0].source.secretRef",
        ),
        ("wrong", "answered 401; correct the credentials in the Secret of spec.models[0].source.secretRef"),
        ("elsewhere", "answered 401; the server wants credentials"),
    ],
)
def test_a_registry_that_refuses_the_login_is_named_without_it(
    secret: str | None, message: str, open_registry: Registry, locked_registry: Registry, tmp_path: Path
) -> None:
    digest = open_registry.push("vision/locked", [(BODY, titled("model.onnx"))])
    fields = model(locked_registry, "vision/locked", digest)
    if secret is not None:
        host = "registry.example" if secret == "elsewhere" else locked_registry.host
        fields["secret"] = login_secret(tmp_path, "docker", host, "made-up-password")
    result = conch_fetch(tmp_path, [fields], None)
    assert result.code == 3, result.stderr
    assert message in result.termination
    assert "made-up-password" not in result.stderr
    assert base64.b64encode(f"{USER}:made-up-password".encode()).decode() not in result.stderr


def test_a_token_is_had_for_the_login_and_reads_only_this_repository(
    open_registry: Registry, token_registry: Registry, tokens: TokenService, tmp_path: Path
) -> None:
    layers = [(BODY[:size], titled(f"1/{size}")) for size in range(1, 9)] + [(BODY, titled("1/model.onnx"))]
    digest = open_registry.push("vision/tokens", layers)
    tokens.asked.clear()
    secret = login_secret(tmp_path, "docker", token_registry.host)
    found = fetch(tmp_path, model(token_registry, "vision/tokens", digest, secret=secret))
    assert found["1/model.onnx"] == BODY
    assert len(found) == 9
    assert [scope for scope, _ in tokens.asked] == ["repository:vision/tokens:pull"]
    assert all(login for _, login in tokens.asked)


def test_a_public_repository_needs_no_login_for_its_token(
    open_registry: Registry, token_registry: Registry, tmp_path: Path
) -> None:
    digest = open_registry.push("public/model", [(BODY, titled("model.onnx"))])
    assert fetch(tmp_path, model(token_registry, "public/model", digest)) == {"model.onnx": BODY}


def test_a_token_that_does_not_reach_says_which_credentials_are_missing(
    open_registry: Registry, token_registry: Registry, tmp_path: Path
) -> None:
    digest = open_registry.push("private/model", [(BODY, titled("model.onnx"))])
    with pytest.raises(SourceRefusedError, match="wants credentials; name a Secret with them in"):
        fetch(tmp_path, model(token_registry, "private/model", digest))


def test_the_proxy_of_the_source_leads_to_the_registry(open_registry: Registry, tmp_path: Path) -> None:
    digest = open_registry.push("vision/proxied", [(BODY, titled("model.onnx"))])
    with proxy() as way:
        fields = model(open_registry, "vision/proxied", digest, proxy=way.url)
        assert fetch(tmp_path, fields) == {"model.onnx": BODY}
    assert set(way.connects) == {open_registry.host}


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        (403, "the proxy refused the way to https://"),
        (407, "the proxy refused the way to https://"),
        (None, "the last time because the proxy failed ("),
    ],
)
def test_a_proxy_that_fails_is_named_with_its_field(
    refusal: int | None, message: str, open_registry: Registry, tmp_path: Path
) -> None:
    digest = open_registry.push("vision/proxied", [(BODY, titled("model.onnx"))])
    with proxy(refusal) as way:
        fields = model(open_registry, "vision/proxied", digest, proxy=way.url if refusal else "http://127.0.0.1:1")
        with pytest.raises(FetchError) as failure:
            fetch(tmp_path, fields)
    assert message in str(failure.value)
    assert "spec.models[0].source.proxy" in str(failure.value)


def fake_registry(manifest: bytes, blob: bytes) -> tuple[Any, Any]:
    """A registry that says what the test wants, for what a real one doesn't do; its blobs can misbehave."""

    def answer(handler: Handler) -> None:
        body = manifest if "/manifests/" in handler.path else blob
        offset = handler.offset()
        headers: dict[str, str | int] = {"Content_Length": len(body) - offset}
        if offset:
            headers["Content_Range"] = f"bytes {offset}-{len(body) - 1}/{len(body)}"
        handler.start(206 if offset else 200, **headers)
        handler.wfile.write(body[offset:])

    return answer, dropped_after(answer, 100_000)


def manifest_of(blob: bytes, **changes: Any) -> bytes:
    layer = {"mediaType": "x/y", "digest": f"sha256:{hashlib.sha256(blob).hexdigest()}", "size": len(blob)}
    return json.dumps({"layers": [layer | titled("model.onnx") | changes]}).encode()


def named(port: int, manifest: bytes, authority: Path, **changes: Any) -> dict[str, Any]:
    digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    return model(Registry(port, authority), "m", digest, **changes)


def test_row_76_a_blob_that_breaks_off_is_resumed(authority: Path, tmp_path: Path) -> None:
    manifest = manifest_of(BODY)
    whole, dropped = fake_registry(manifest, BODY)
    with serving(authority, whole, dropped, whole) as server:
        assert fetch(tmp_path, named(server.server_port, manifest, authority)) == {"model.onnx": BODY}
    assert [asked.get("range") for asked in server.requests] == [None, None, "bytes=100000-"]


def test_one_blob_that_fails_ends_the_others(authority: Path, tmp_path: Path) -> None:
    """Else a failed start would first download tens of gigabytes."""
    absent, slow = b"absent", random.Random(8).randbytes(3_000_000)
    layers = [
        {"mediaType": "x/y", "digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data), **titled(name)}
        for name, data in {"a": absent, "b": slow}.items()
    ]
    manifest = json.dumps({"layers": layers}).encode()
    failed = threading.Event()
    sent: list[int] = []

    def answer(handler: Handler) -> None:
        if "/manifests/" in handler.path:
            handler.start(200, Content_Length=len(manifest))
            handler.wfile.write(manifest)
        elif layers[0]["digest"] in handler.path:
            handler.start(404, Content_Length=0)
            failed.set()
        else:
            handler.start(200, Content_Length=len(slow))
            handler.wfile.write(slow[:10])
            failed.wait(10)
            for start in range(10, len(slow), 1000):
                handler.wfile.write(slow[start : start + 1000])
                sent.append(start)
                time.sleep(0.01)

    with serving(authority, answer) as server, pytest.raises(SourceRefusedError, match="answered 404"):
        fetch(tmp_path, named(server.server_port, manifest, authority))
    assert len(sent) < 1000


@pytest.mark.parametrize(
    ("manifest", "blob", "wanted", "kind", "message"),
    [
        (manifest_of(BODY), BODY, b"another", DigestMismatchError, "has digest sha256:"),
        (
            manifest_of(BODY),
            BODY[:-1] + b"x",
            None,
            DigestMismatchError,
            "correct spec.models[0].source.digest, or the",
        ),
        (manifest_of(BODY, size=1000), BODY, None, DigestMismatchError, "has more than the 1000 bytes that it should"),
        (b"[]", BODY, None, SourceRefusedError, "is no manifest; correct spec.models[0].source.uri"),
        (b"x" * (5 << 20), BODY, None, SourceRefusedError, "has more than 4194304 bytes"),
        (manifest_of(BODY, digest="md5:00"), BODY, None, WrongLayoutError, "a layer without a sha256 digest"),
    ],
    ids=["other manifest", "other blob", "longer blob", "no manifest", "endless manifest", "other digest"],
)
def test_a_registry_that_lies_is_found_out(  # noqa: PLR0917
    manifest: bytes,
    blob: bytes,
    wanted: bytes | None,
    kind: type[FetchError],
    message: str,
    authority: Path,
    tmp_path: Path,
) -> None:
    whole, _ = fake_registry(manifest, blob)
    with serving(authority, whole) as server, pytest.raises(kind) as failure:
        fetch(tmp_path, named(server.server_port, wanted or manifest, authority))
    assert message in str(failure.value)
    assert not (tmp_path / "content").exists()


@pytest.mark.parametrize(
    ("uri", "digest", "reference"),
    [
        ("oci://r.example:5000/a/b@sha256:1", None, Reference("r.example:5000", "a/b", "sha256:1")),
        ("oci://r.example/a:v1", "sha256:2", Reference("r.example", "a", "sha256:2")),
        ("oci://r.example/a:v1@sha256:3", "sha256:3", Reference("r.example", "a", "sha256:3")),
    ],
)
def test_a_uri_is_split(uri: str, digest: str | None, reference: Reference) -> None:
    assert Reference.parse(uri, digest) == reference


@pytest.mark.parametrize(
    "challenge", ["", "Negotiate", 'Bearer realm="http://tokens.example/t"', 'Bearer service="x"', "Basic realm=x"]
)
def test_a_challenge_that_can_not_be_answered_safely_is_not_answered(challenge: str) -> None:
    def never(_address: str, _login: object) -> str:
        raise AssertionError

    authorization = RegistryAuthorization(None, "m", never)
    assert not authorization.challenged(challenge)
    assert authorization.header() is None
