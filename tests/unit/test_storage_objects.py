"""Objects and prefixes from moto's S3 server, also through something that misbehaves, by the real `conch fetch`."""

from __future__ import annotations

import hashlib
import io
import json
import random
import signal
import subprocess
import tarfile
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from conch.storage.digest import lines_digest
from conch.storage.download import Patience
from conch.storage.errors import (
    MESSAGE_MAX_BYTES,
    DigestMismatchError,
    DiskFullError,
    FetchError,
    SourceRefusedError,
    SourceStalledError,
    WrongLayoutError,
)
from conch.storage.fetch import Arrival, Outcome, summary
from conch.storage.plan import PlannedModel
from conch.storage.remote import Remote
from conch.storage.store_failures import PassingError, explained
from fetching import Haste, command, conch_fetch, environment, make_authority, visible
from store_servers import (
    Fault,
    S3Server,
    SecretFolder,
    another_range,
    between,
    dropped,
    hangs,
    more_than_asked,
    other_bytes,
    passed,
    proxy,
    s3_server,
    shorter_than_promised,
    silent,
    status,
    without_length,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PART = 4 << 20
BODY = random.Random(7).randbytes(2 * PART + 1_500_000)
TREE = {"1/model.onnx": BODY[:PART], "2/model.onnx": b"two", "labels é.txt": b"cat\ndog\n", "notes/empty.txt": b""}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


DIGEST = f"sha256:{sha256(BODY)}"
TREE_DIGEST = lines_digest({name: sha256(data) for name, data in TREE.items()})


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def store() -> Iterator[S3Server]:
    with s3_server() as server:
        server.make_bucket("models")
        server.put("models", "big.onnx", BODY)
        for name, data in TREE.items():
            server.put("models", f"tree/{name}", data)
        server.put("models", "tree-of-another/model.onnx", b"not below tree/")
        server.put("models", "tree/")
        server.put("models", "tree/2/")
        yield server


QUICK = Patience(stall_timeout_s=0.4, connect_timeout_s=2, attempts=3)


def model(url: str, uri: str = "s3://models/big.onnx", **changes: Any) -> dict[str, Any]:
    fields = {"name": "m", "uri": uri, "fileName": "model.onnx", "config": "", "field": "spec.models[0]"}
    return fields | {"endpoint": url} | changes


def remote(patience: Patience = QUICK) -> Remote:
    log = structlog.wrap_logger(structlog.testing.CapturingLogger())
    return Remote(patience, ca_file=None, clock=Haste(), jitter=lambda: 0.5, log=log)


def fetch(folder: Path, fields: dict[str, Any], patience: Patience = QUICK) -> Path:
    content = folder / "content"
    (folder / "downloads").mkdir(exist_ok=True)
    remote(patience).fetch(PlannedModel.model_validate(fields), content, folder / "downloads")
    return content


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_object_comes_in_parts_of_one_version(store: S3Server, tmp_path: Path) -> None:
    with between(store) as server:
        assert fetch(tmp_path, model(server.url, digest=DIGEST)).read_bytes() == BODY
    assert sorted(server.ranges) == sorted(
        [f"bytes=0-{PART - 1}", f"bytes={PART}-{2 * PART - 1}", f"bytes={2 * PART}-{len(BODY) - 1}"]
    )
    assert len({asked.headers["if-match"] for asked in server.asked if asked.range}) == 1
    assert list((tmp_path / "downloads").iterdir()) == []


@pytest.mark.parametrize("uri", ["s3://models/tree", "s3://models/tree/", "gs://models/tree"])
def test_everything_below_a_prefix_comes_without_its_namesakes_and_folder_markers(
    uri: str, store: S3Server, tmp_path: Path
) -> None:
    with between(store) as server:
        assert files_below(fetch(tmp_path, model(server.url, uri, digest=TREE_DIGEST))) == TREE
    assert not any("another/model" in asked.path for asked in server.asked)


def test_an_empty_object_is_a_file_too(store: S3Server, tmp_path: Path) -> None:
    store.put("models", "empty.onnx", b"")
    assert fetch(tmp_path, model(store.url, "s3://models/empty.onnx")).read_bytes() == b""


@pytest.mark.parametrize(
    "faults",
    [
        [dropped],
        [dropped, dropped, passed, dropped],
        [hangs],
        [silent],
        [without_length],
        [status(503, "SlowDown"), status(500), status(429)],
        [shorter_than_promised],
        [more_than_asked],
        [another_range],
        [status(200)],
    ],
    ids=lambda faults: "-".join(fault.__qualname__.partition(".")[0] for fault in faults),
)
def test_the_whole_object_arrives_in_the_end(faults: list[Fault], store: S3Server, tmp_path: Path) -> None:
    with between(store, *faults) as server:
        assert fetch(tmp_path, model(server.url, digest=DIGEST)).read_bytes() == BODY


def test_row_76_what_came_before_a_drop_is_not_asked_for_again(store: S3Server, tmp_path: Path) -> None:
    store.put("models", "part.onnx", BODY[:PART])
    with between(store, dropped, dropped) as server:
        fetch(tmp_path, model(server.url, "s3://models/part.onnx"))
    starts = [int(asked.removeprefix("bytes=").partition("-")[0]) for asked in server.ranges]
    assert starts[0] == 0
    assert len(starts) == 3
    assert 0 < starts[1] <= 1_000_000
    assert starts[1] < starts[2] <= 2_000_000


def test_row_76_a_store_that_always_hangs_is_named_with_the_stall(store: S3Server, tmp_path: Path) -> None:
    with between(store, every=silent) as server, pytest.raises(SourceStalledError) as failure:
        fetch(tmp_path, model(server.url))
    assert str(failure.value) == (
        "s3://models/big.onnx failed 3 times in a row, the last time because no byte came for 0.4 s; "
        "check that the pod may reach the store (NetworkPolicy, DNS, proxy) and that it answers"
    )


@pytest.mark.parametrize(("lie", "word"), [(more_than_asked, "more"), (shorter_than_promised, "less")])
def test_a_store_that_always_lies_about_lengths_is_named(
    lie: Fault, word: str, store: S3Server, tmp_path: Path
) -> None:
    store.put("models", "short.onnx", BODY[:5000])
    with between(store, *[lie] * 20) as server, pytest.raises(SourceStalledError) as failure:
        fetch(tmp_path, model(server.url, "s3://models/short.onnx"))
    assert str(failure.value.about("m", "spec.models[0].source")).endswith(
        f"3 times in a row, the last time because the store sent {word} than was asked for (spec.models[0].source); "
        "the store, or a proxy on the way to it, is wrong about lengths; use another"
    )


def test_an_object_that_changes_meanwhile_is_fetched_anew(store: S3Server, tmp_path: Path) -> None:
    old, new = BODY[: 2 * PART], BODY[PART : 3 * PART - 5]
    store.put("models", "changing.onnx", old)

    def changed_then_passed(handler: Any, reply: Any) -> None:
        store.put("models", "changing.onnx", new)
        passed(handler, reply)

    with between(store, changed_then_passed, status(412, "PreconditionFailed")) as server:
        content = fetch(tmp_path, model(server.url, "s3://models/changing.onnx"))
    assert content.read_bytes() == new


@pytest.mark.parametrize(
    ("uri", "kind", "found"),
    [("s3://models/big.onnx", "object", DIGEST), ("s3://models/tree", "folder", TREE_DIGEST)],
)
def test_row_79_another_digest_than_the_wanted_one_ends_it(
    uri: str, kind: str, found: str, store: S3Server, tmp_path: Path
) -> None:
    wanted = "sha256:" + "0" * 64
    result = conch_fetch(tmp_path, [model(store.url, uri, digest=wanted, versions=[])], None)
    assert result.code == 4
    assert result.termination.startswith(f'model "m": the {kind} {uri} has digest {found} (')
    assert result.termination.endswith("correct spec.models[0].source.digest, or the source if it was changed")
    assert visible(tmp_path) == set()


def test_bytes_that_were_changed_on_the_way_are_found_by_the_digest(store: S3Server, tmp_path: Path) -> None:
    with between(store, other_bytes) as server, pytest.raises(DigestMismatchError):
        fetch(tmp_path, model(server.url, digest=DIGEST))
    assert not (tmp_path / "content").exists()


REGION_BODY = "<Region>eu-west-1</Region>"
SECRET = {"accessKeyId": "AKIDEXAMPLE", "secretAccessKey": "very/secret+key"}


@pytest.mark.parametrize(
    ("uri", "every", "changes", "message"),
    [
        ("s3://models/absent.onnx", None, {},
         "s3://models/absent.onnx is no object, and there is none below it; correct spec.models[0].source.uri"),
        ("s3://no-such-bucket/m", None, {},
         'no-such-bucket"; correct spec.models[0].source.uri, or name its store in spec.models[0].source.endpoint'),
        ("s3://no-such-bucket/m/", None, {}, 'has no bucket "no-such-bucket"; correct spec.models[0].source.uri'),
        ("s3://models/m", status(403, "AccessDenied"), {},
         "(AccessDenied); allow reading it without a key, or name a Secret with keys in spec.models[0].source.secret"),
        ("s3://models/m", status(403, "AccessDenied"), {"secret": SECRET},
         "allow the keys in the Secret of spec.models[0].source.secretRef to read it (s3:GetObject, s3:ListBucket"),
        ("s3://models/m", status(403, "InvalidAccessKeyId"), {"secret": SECRET},
         "refuses the keys for s3://models/m (InvalidAccessKeyId); correct the Secret of spec.models[0].source.secret"),
        ("s3://models/m", status(403, "RequestTimeTooSkewed"), {"secret": SECRET}, "the node's clock is wrong"),
        ("s3://models/m", status(400, "AuthorizationHeaderMalformed", REGION_BODY), {},
         'the bucket "models" is in region eu-west-1, not in us-east-1; set spec.models[0].source.region to eu-west-1'),
        ("s3://models/m", status(400, "AuthorizationHeaderMalformed", REGION_BODY), {"region": "eu-north-1"},
         'the bucket "models" is in region eu-west-1, not in eu-north-1'),
        ("s3://models/m", status(301, "PermanentRedirect"), {}, '"models" is in another region, not in us-east'),
        ("s3://models/m", status(400, "InvalidRequest"), {}, "s3://models/m answered 400 (InvalidRequest)"),
        ("gs://models/m", status(401), {}, "gs://models/m answered 401; allow reading it without a key"),
    ],
)  # fmt: skip
def test_what_another_try_cannot_heal_is_said_at_once_with_field_and_fix(
    *, uri: str, every: Fault | None, changes: dict[str, Any], message: str, store: S3Server, tmp_path: Path
) -> None:
    if "secret" in changes:
        changes = changes | {"secret": SecretFolder(tmp_path / "secret", changes["secret"]).mounted()}
    with between(store, every=every) as server, pytest.raises(SourceRefusedError) as failure:
        fetch(tmp_path, model(server.url, uri, **changes))
    assert message in str(failure.value)
    assert "secret+key" not in str(failure.value)
    assert len(server.asked) <= 2


@pytest.mark.parametrize(
    ("endpoint", "kind", "message"),
    [
        ("http://127.0.0.1:1", SourceStalledError,
         "failed 3 times in a row, the last time because the connection failed (Connection refused); check that"),
        ("http://absent.invalid", SourceStalledError, "the connection failed (failed to lookup address"),
    ],
)  # fmt: skip
def test_a_store_that_is_not_there_is_tried_again_and_then_named(
    endpoint: str, kind: type[FetchError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind) as failure:
        fetch(tmp_path, model(endpoint))
    assert message in str(failure.value)


def test_a_port_that_speaks_no_tls_is_said_so(store: S3Server, tmp_path: Path) -> None:
    endpoint = store.url.replace("http://", "https://")
    with pytest.raises(SourceRefusedError, match=r"doesn't speak TLS; correct the port or the scheme in spec\.models"):
        fetch(tmp_path, model(endpoint))


def test_the_keys_of_the_secret_sign_and_nothing_else_does(store: S3Server, tmp_path: Path) -> None:
    temporary = {"AWS_ACCESS_KEY_ID": "ASIATEMPORARY", "AWS_SECRET_ACCESS_KEY": "x", "AWS_SESSION_TOKEN": "tok"}
    for name, keys in {"named": SECRET, "temporary": temporary, "none": None}.items():
        secret = None if keys is None else SecretFolder(tmp_path / name / "secret", keys).mounted()
        (tmp_path / name).mkdir(exist_ok=True)
        with between(store) as server:
            fetch(tmp_path / name, model(server.url, secret=secret))
        signed = {asked.headers.get("authorization", "")[:44] for asked in server.asked}
        tokens = {asked.headers.get("x-amz-security-token") for asked in server.asked}
        if name == "none":
            assert (signed, tokens) == ({""}, {None})
        else:
            key, token = ("AKIDEXAMPLE", None) if name == "named" else ("ASIATEMPORARY", "tok")
            assert all(f"Credential={key}"[:17] in text for text in signed)
            assert tokens == {token}


def test_a_google_key_signs_requests_to_its_store(store: S3Server, tmp_path: Path) -> None:
    private = ["openssl", "genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"]
    pem = subprocess.run(private, capture_output=True, text=True, check=True, timeout=30).stdout
    key = json.dumps({"type": "service_account", "client_email": "a@b", "private_key": pem, "private_key_id": "1"})
    secret = SecretFolder(tmp_path / "secret", {"key.json": key}).mounted()
    with between(store) as server:
        fetch(tmp_path, model(server.url, "gs://models/big.onnx", secret=secret, digest=DIGEST))
    assert all(asked.headers["authorization"].startswith("Bearer ey") for asked in server.asked)


@pytest.mark.parametrize(
    ("uri", "keys", "message"),
    [
        ("s3://models/m", {}, "the Secret lacks accessKeyId and secretAccessKey (it holds nothing); add them"),
        ("s3://models/m", {"token": "very-secret"}, "(it holds token); add them to the Secret of spec.models[0]"),
        ("s3://models/m", {**SECRET, "secretAccessKey": "two\nlines"}, "its key secretAccessKey is not a single line"),
        ("gs://models/m", {}, "the Secret lacks key.json"),
        ("gs://models/m", {"key.json": "very-secret"}, "its key key.json is no JSON object"),
        ("gs://models/m", {"key.json": "{}"}, "its key.json is no service account's key"),
        ("gs://models/m", {"key.json": '{"client_email": "a", "private_key": "very-secret"}'},
         "correct spec.models[0].source and the Secret of its secretRef"),
    ],
)  # fmt: skip
def test_a_secret_that_does_not_fit_is_named_and_not_quoted(
    uri: str, keys: dict[str, str], message: str, store: S3Server, tmp_path: Path
) -> None:
    secret = SecretFolder(tmp_path / "secret", keys).mounted()
    result = conch_fetch(tmp_path, [model(store.url, uri, secret=secret)], None)
    assert result.code == 3, result.stderr
    assert message in result.termination
    assert "very-secret" not in result.stderr
    assert "Traceback" not in result.stderr


def test_a_pod_without_a_cloud_identity_does_not_borrow_the_nodes(store: S3Server, tmp_path: Path) -> None:
    with between(store) as server, pytest.raises(SourceRefusedError) as failure:
        fetch(tmp_path, model(server.url, identity="ServiceAccount"))
    assert "the pod's ServiceAccount has no AWS role" in str(failure.value)
    assert "spec.runtime.serviceAccountName" in str(failure.value)
    assert not server.asked


def test_an_authority_of_its_own_is_trusted_for_the_source_that_names_it(
    store: S3Server, authority: Path, tmp_path: Path
) -> None:
    with between(store, certificate=authority / "server.pem") as server:
        with pytest.raises(SourceRefusedError) as failure:
            fetch(tmp_path, model(server.url))
        assert f"{server.url} shows a certificate that is not trusted" in str(failure.value)
        assert "name your own authority in spec.models[0].source.caRef" in str(failure.value)
        content = fetch(tmp_path, model(server.url, ca=str(authority / "ca.pem"), digest=DIGEST))
    assert content.read_bytes() == BODY


def test_an_authority_that_is_none_is_said_so(store: S3Server, tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("no certificate")
    with pytest.raises(SourceRefusedError, match=r"ConfigMap of spec\.models\[0\]\.source\.caRef"):
        fetch(tmp_path, model(store.url, ca=str(tmp_path / "ca.crt")))


def test_the_proxy_of_the_source_leads_there(store: S3Server, authority: Path, tmp_path: Path) -> None:
    with between(store, certificate=authority / "server.pem") as server, proxy() as way:
        fields = model(server.url, ca=str(authority / "ca.pem"), digest=DIGEST, proxy=way.url)
        assert fetch(tmp_path, fields).read_bytes() == BODY
    assert set(way.connects) == {f"localhost:{server.server_port}"}


@pytest.mark.parametrize("refusal", [403, 407, None])
def test_a_proxy_that_refuses_or_is_not_there_is_named(
    refusal: int | None, store: S3Server, authority: Path, tmp_path: Path
) -> None:
    with between(store, certificate=authority / "server.pem") as server, proxy(refusal) as way:
        url = way.url if refusal else "http://127.0.0.1:1"
        with pytest.raises(FetchError) as failure:
            fetch(tmp_path, model(server.url, ca=str(authority / "ca.pem"), proxy=url))
    assert f"the way through the proxy {url} failed" in str(failure.value)
    assert "correct spec.models[0].source.proxy" in str(failure.value)
    assert not server.asked


def archive_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def test_an_archive_is_verified_as_it_is_and_then_unpacked(store: S3Server, tmp_path: Path) -> None:
    archive = archive_of({"m/1/model.onnx": b"one", "m/2/model.onnx": b"two"})
    store.put("models", "m.tar.gz", archive)
    fields = model(store.url, "s3://models/m.tar.gz", digest=f"sha256:{sha256(archive)}", versions=[1, 2])
    result = conch_fetch(tmp_path, [fields], None)
    assert result.code == 0, result.termination
    assert visible(tmp_path) == {"m/config.pbtxt", "m/1/model.onnx", "m/2/model.onnx"}
    assert (tmp_path / "models/m/2/model.onnx").read_bytes() == b"two"


def test_a_tree_becomes_a_model_and_the_summary_says_how_it_came(store: S3Server, tmp_path: Path) -> None:
    cache = {"path": str(tmp_path / "cache"), "sizeBytes": 1 << 30}
    (tmp_path / "cache").mkdir()
    for pod, origin in (("first", "Download"), ("second", "Cache")):
        (tmp_path / pod).mkdir()
        fields = model(store.url, "s3://models/tree", digest=TREE_DIGEST)
        result = conch_fetch(tmp_path / pod, [fields], None, cache=cache)
        assert result.code == 0, result.stderr
        (arrival,) = json.loads(result.termination)["fetched"]
        assert (arrival["model"], arrival["origin"]) == ("m", origin)
        assert arrival["bytes"] == sum(map(len, TREE.values()))
        assert (tmp_path / pod / "models/m/1/model.onnx").read_bytes() == TREE["1/model.onnx"]


def test_a_cache_of_no_use_costs_a_download_and_the_summary_says_why(store: S3Server, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "v1").write_text("where the cache's folder should be")
    fields = model(store.url, "s3://models/tree", digest=TREE_DIGEST)
    result = conch_fetch(tmp_path, [fields], None, cache={"path": str(tmp_path / "cache"), "sizeBytes": 1 << 30})
    assert result.code == 0, result.stderr
    said = json.loads(result.termination)
    assert said["fetched"][0]["origin"] == "Download"
    assert said["cache"].startswith("the model cache can't be written; what is in it is used, nothing is added (")
    assert "make the folder of runtime.modelCache writable for user" in said["cache"]


@pytest.mark.parametrize(
    ("origins", "trouble", "told"),
    [
        (["Cache"], "it can't be written", None),
        (["Present", "None"], "it can't be written", None),
        (["Cache", "Download"], "it can't be written", "it can't be written"),
        (["Download"], "", None),
        (["Download"], "x" * 5000, "x" * 500),
        (["Download"], "the folder é\n", "the folder ??"),
    ],
)
def test_trouble_with_the_cache_is_told_where_it_cost_a_download(
    origins: list[str], trouble: str, told: str | None
) -> None:
    outcome = Outcome([Arrival("m" * 63, origin, 10**13, 12345.678) for origin in origins], trouble)
    assert json.loads(summary(outcome)).get("cache") == told


def test_the_longest_summary_fits_in_a_termination_message() -> None:
    for worst in ('"', "ü", "\0"):
        outcome = Outcome([Arrival("m" * 63, "Download", 10**13, 12345.678)] * 16, worst * 5000)
        assert len(summary(outcome).encode()) <= MESSAGE_MAX_BYTES


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_row_76_a_killed_container_resumes_where_it_was(
    number: signal.Signals, code: int, store: S3Server, tmp_path: Path
) -> None:
    store.put("models", "two/1/model.onnx", BODY[:PART])
    store.put("models", "two/2/model.onnx", BODY)
    fields = model("", "s3://models/two", versions=[1, 2])
    stop = threading.Event()

    def only_the_beginning(handler: Any, reply: Any) -> None:
        if not handler.headers.get("Range", "bytes=0-").startswith("bytes=0-"):
            stop.wait(20)
        passed(handler, reply)

    with between(store, every=only_the_beginning) as server:
        arguments = command(tmp_path, [fields | {"endpoint": server.url}], None)
        with subprocess.Popen(arguments, env=environment(), stderr=subprocess.DEVNULL) as first:
            until_s = time.monotonic() + 20
            while present_bytes(tmp_path) < 2 * PART:
                assert time.monotonic() < until_s
                assert first.poll() is None
                time.sleep(0.01)
            first.send_signal(number)
            assert first.wait(10) == code
        stop.set()
        assert visible(tmp_path) == set()
        before = len(server.ranges)
        result = conch_fetch(tmp_path, [fields | {"endpoint": server.url}], None)
        assert result.code == 0, result.stderr
        assert sorted(server.ranges[before:]) == [f"bytes={PART}-{2 * PART - 1}", f"bytes={2 * PART}-{len(BODY) - 1}"]
    assert (tmp_path / "models/m/2/model.onnx").read_bytes() == BODY


def present_bytes(folder: Path) -> int:
    files = (folder / "models" / ".conch-staging" / "download").rglob("*.onnx")
    return sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("key", ["tree2/a\\b", "tree2/" + "x" * 256])
def test_an_object_that_cannot_be_a_file_is_named(key: str, store: S3Server, tmp_path: Path) -> None:
    store.put("models", key, b"x")
    try:
        with pytest.raises(WrongLayoutError, match="can't be a file of that name; rename the object"):
            fetch(tmp_path, model(store.url, "s3://models/tree2"))
    finally:
        store.delete("models", key)


def test_an_object_that_would_be_a_file_and_a_folder_is_named(store: S3Server, tmp_path: Path) -> None:
    store.put("models", "tree3/1", b"x")
    store.put("models", "tree3/1/model.onnx", b"y")
    with pytest.raises(WrongLayoutError, match="'tree3/1' is also the beginning of other objects' names"):
        fetch(tmp_path, model(store.url, "s3://models/tree3"))


def test_a_tree_larger_than_the_volume_is_refused_before_its_first_byte(store: S3Server, tmp_path: Path) -> None:
    def listed_larger(handler: Any, reply: Any) -> None:
        body = reply.body.replace(f"<Size>{PART}</Size>".encode(), f"<Size>{1 << 60}</Size>".encode())
        handler.send(reply, body, Content_Length=len(body))

    with between(store, every=listed_larger) as server, pytest.raises(DiskFullError, match="more are needed and"):
        fetch(tmp_path, model(server.url, "s3://models/tree/"))
    assert server.ranges == []


def test_row_77_memory_stays_bounded(store: S3Server, tmp_path: Path) -> None:
    """A small form of what `make bench` measures with 10 GB."""
    from fetching import resident_peak_bytes

    store.put("models", "large.onnx", BODY * 8)
    arguments = command(tmp_path, [model(store.url, "s3://models/large.onnx")], None)
    peak_bytes = 0
    with subprocess.Popen(arguments, env=environment(), stderr=subprocess.DEVNULL) as running:
        while running.poll() is None:
            peak_bytes = max(peak_bytes, resident_peak_bytes(running.pid))
            time.sleep(0.02)
    assert running.returncode == 0
    assert 0 < peak_bytes <= 150 << 20


TOKEN = (
    "Generic GCS error: Error performing token request: Error performing GET http://169.254.169.254/computeMetadata/v1/"
)


@pytest.mark.parametrize(
    ("text", "kind", "why"),
    [
        (f"{TOKEN} in 6ms - Server returned non-2xx status code: 403 Forbidden: x", SourceRefusedError, "answered 403"),
        (f"{TOKEN} in 6ms - Server returned non-2xx status code: 503 Busy", PassingError, "it answered 503"),
        (f'{TOKEN} error {{ kind: Connect, message: "Connection refused" }}', PassingError, "(Connection refused)"),
        ("Generic S3 error: Error performing POST https://sts.eu-west-1.amazonaws.com in 6ms status code: 400",
         SourceRefusedError, "it answered 400"),
    ],
)  # fmt: skip
def test_a_cloud_that_gives_the_pod_no_credentials_is_named(text: str, kind: type[Exception], why: str) -> None:
    """No cloud is here: the texts are the library's own, from a run against a metadata address that refuses."""
    planned = PlannedModel.model_validate(model("https://store.example", identity="ServiceAccount"))
    meaning = explained(RuntimeError(text), planned, stall_timeout_s=1)
    assert isinstance(meaning, kind)
    assert "the cloud gave no credentials for the pod's ServiceAccount" in str(meaning)
    assert why in str(meaning)
