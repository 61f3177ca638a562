"""Downloads from a real HTTPS server that misbehaves, in process and through the real `conch fetch`."""

import hashlib
import io
import json
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, cast

import pytest
import structlog
import urllib3

from conch.storage.download import Downloader, Patience, Progress, Wanted
from conch.storage.errors import (
    DigestMismatchError,
    DiskFullError,
    FetchError,
    PlanInvalidError,
    SourceRefusedError,
    SourceStalledError,
    WrongLayoutError,
)
from conch.storage.space import readable_size
from fetching import (
    SOURCE_ROOT,
    Answer,
    Handler,
    Haste,
    Server,
    command,
    conch_fetch,
    environment,
    make_authority,
    resident_peak_bytes,
    serving,
    visible,
)
from store_servers import SecretFolder, proxy

BODY = random.Random(7).randbytes(300_000)
DIGEST = f"sha256:{hashlib.sha256(BODY).hexdigest()}"
BIG_BYTES = 400 << 20
MEBIBYTE = bytes(1 << 20)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_authority(tmp_path_factory.mktemp("authority"))


QUICK = Patience(stall_timeout_s=0.3, connect_timeout_s=2, attempts=3)


def download(
    server_url: str,
    folder: Path,
    authority: Path,
    *,
    digest: str = DIGEST,
    patience: Patience = QUICK,
    clock: Haste | None = None,
) -> bytes:
    trust = ssl.create_default_context(cafile=str(authority / "ca.pem"))
    with urllib3.PoolManager(ssl_context=trust) as pool:
        log = structlog.wrap_logger(structlog.testing.CapturingLogger())
        downloader = Downloader(pool, patience, clock=clock or Haste(), jitter=lambda: 0.5, log=log)
        downloader.download(Wanted(server_url, digest), folder / "file.partial")
    return (folder / "file.partial").read_bytes()


def whole(handler: Handler) -> None:
    """A correct server: ranges, validators, lengths."""
    offset = handler.offset()
    if handler.headers.get("If-Range") not in (None, '"v1"'):
        offset = 0
    headers: dict[str, str | int] = {"Content_Length": len(BODY) - offset, "ETag": '"v1"'}
    if offset:
        headers["Content_Range"] = f"bytes {offset}-{len(BODY) - 1}/{len(BODY)}"
    handler.start(206 if offset else 200, **headers)
    handler.wfile.write(BODY[offset:])


def without_ranges(handler: Handler) -> None:
    handler.start(200, Content_Length=len(BODY))
    handler.wfile.write(BODY)


def dropped(handler: Handler) -> None:
    """Promises all, sends 100,000 bytes and closes."""
    offset = handler.offset()
    handler.start(206 if offset else 200, Content_Length=len(BODY) - offset, ETag='"v1"',
                  Content_Range=f"bytes {offset}-{len(BODY) - 1}/{len(BODY)}")  # fmt: skip
    handler.wfile.write(BODY[offset : offset + 100_000])


def hangs(handler: Handler) -> None:
    """Sends 100,000 bytes, then nothing, and keeps the connection open."""
    dropped(handler)
    handler.wfile.flush()
    cast("Server", handler.server).closing.wait(20)


def silent(handler: Handler) -> None:
    cast("Server", handler.server).closing.wait(20)


def trickling(handler: Handler) -> None:
    handler.start(200, Content_Length=len(BODY))
    for byte in BODY:
        handler.wfile.write(bytes([byte]))
        if cast("Server", handler.server).closing.wait(0.02):
            return


def longer_than_it_is(handler: Handler) -> None:
    handler.start(200, Content_Length=len(BODY) + 50)
    handler.wfile.write(BODY)


def shorter_than_it_is(handler: Handler) -> None:
    handler.start(200, Content_Length=len(BODY) - 50)
    handler.wfile.write(BODY)


def until_closed(handler: Handler) -> None:
    handler.start(200)
    handler.wfile.write(BODY)


def cut_without_length(handler: Handler) -> None:
    handler.start(200)
    handler.wfile.write(BODY[:1000])


def chunked(handler: Handler) -> None:
    handler.protocol_version = "HTTP/1.1"
    handler.start(200, Transfer_Encoding="chunked")
    for start in range(0, len(BODY), 70_000):
        piece = BODY[start : start + 70_000]
        handler.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
    handler.wfile.write(b"0\r\n\r\n")


def wrong_range(handler: Handler) -> None:
    handler.start(206, Content_Length=10, Content_Range=f"bytes 5-14/{len(BODY)}")
    handler.wfile.write(BODY[5:15])


def unsatisfiable(handler: Handler) -> None:
    handler.start(416, Content_Range="bytes */7")


def other_content(handler: Handler) -> None:
    """An older file of the same length, cut short, without a validator."""
    handler.start(200, Content_Length=len(BODY))
    handler.wfile.write(bytes(1000))


def resumed_without_validator(handler: Handler) -> None:
    offset = handler.offset()
    handler.start(206 if offset else 200, Content_Length=len(BODY) - offset,
                  Content_Range=f"bytes {offset}-{len(BODY) - 1}/{len(BODY)}")  # fmt: skip
    handler.wfile.write(BODY[offset:])


def status(code: int, **headers: str | int) -> Answer:
    return lambda handler: handler.start(code, Content_Length=0, **headers)


@pytest.mark.parametrize(
    ("script", "offsets"),
    [
        ([whole], [0]),
        ([chunked], [0]),
        ([until_closed], [0]),
        ([dropped, whole], [0, 100_000]),
        ([dropped, dropped, whole], [0, 100_000, 200_000]),
        ([dropped, without_ranges], [0, 100_000]),
        ([dropped, wrong_range, whole], [0, 100_000, 0]),
        ([dropped, unsatisfiable, whole], [0, 100_000, 0]),
        ([longer_than_it_is], [0]),
        ([cut_without_length, whole], [0, 1000]),
        ([other_content, resumed_without_validator], [0, 1000, 0]),
        ([status(503), status(500), whole], [0, 0, 0]),
        ([status(302, Location="/elsewhere"), whole], [0, 0]),
    ],
)
def test_the_whole_file_arrives_in_the_end(
    script: list[Answer], offsets: list[int], authority: Path, tmp_path: Path
) -> None:
    with serving(authority, *script) as server:
        assert download(server.url(), tmp_path, authority) == BODY
    asked = [request.get("range", "bytes=0-") for request in server.requests]
    assert asked == [f"bytes={offset}-" for offset in offsets]


def test_row_76_a_download_that_hangs_is_broken_off_and_resumed(authority: Path, tmp_path: Path) -> None:
    with serving(authority, hangs, silent, whole) as server:
        assert download(server.url(), tmp_path, authority) == BODY
    assert [request.get("range") for request in server.requests] == [None, "bytes=100000-", "bytes=100000-"]
    assert server.requests[1]["if-range"] == '"v1"'


def test_row_76_a_download_that_always_hangs_ends_with_a_clear_sentence(authority: Path, tmp_path: Path) -> None:
    clock = Haste()
    with serving(authority, silent) as server, pytest.raises(SourceStalledError) as failure:
        download(server.url("/m?sig=secret"), tmp_path, authority, clock=clock)
    assert "/m failed 3 times in a row, the last time because no byte came for 0.3 s; check that" in str(failure.value)
    assert "sig" not in str(failure.value)
    assert clock.waits_s == [0.75, 1.5]


def test_row_76_a_server_that_trickles_for_ever_meets_the_total_bound(authority: Path, tmp_path: Path) -> None:
    patience = Patience(stall_timeout_s=5, total_timeout_s=0.4)
    with serving(authority, trickling) as server, pytest.raises(SourceStalledError, match=r"not complete after 0\.4 s"):
        download(server.url(), tmp_path, authority, patience=patience)


def test_a_server_that_restarts_and_drops_without_end_is_given_up(authority: Path, tmp_path: Path) -> None:
    with serving(authority, cut_without_length) as server, pytest.raises(DigestMismatchError):
        download(server.url(), tmp_path, authority)
    assert len(server.requests) == 3


def test_a_changed_file_is_not_joined_to_the_old_one(authority: Path, tmp_path: Path) -> None:
    def old(handler: Handler) -> None:
        handler.start(200, Content_Length=len(BODY), ETag='"v0"')
        handler.wfile.write(bytes(1000))

    with serving(authority, old, whole) as server:
        assert download(server.url(), tmp_path, authority) == BODY
    assert server.requests[1]["if-range"] == '"v0"'
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        ([status(403)], SourceRefusedError, "answered 403; allow reading it"),
        ([status(404)], SourceRefusedError, "answered 404; correct source.uri"),
        ([status(410)], SourceRefusedError, "answered 410; it was removed for good"),
        ([status(400)], SourceRefusedError, "answered 400"),
        ([status(503)], SourceStalledError, "3 times in a row, the last time because the server answered 503"),
        ([status(302, Location="http://localhost/x?sig=secret")], SourceRefusedError,
         "redirects to http://localhost/x; only https"),
        ([status(302, Location="https://[::1/x")], SourceRefusedError, "redirects to no address"),
        ([status(302)], SourceRefusedError, "redirects to no address"),
        ([shorter_than_it_is], DigestMismatchError, f"(299950 bytes), not {DIGEST}; correct source.digest"),
    ],
)  # fmt: skip
def test_what_another_try_cannot_heal_is_said_at_once(
    script: list[Answer], kind: type[FetchError], message: str, authority: Path, tmp_path: Path
) -> None:
    with serving(authority, *script) as server, pytest.raises(kind) as failure:
        download(server.url("/m?sig=secret"), tmp_path, authority)
    assert message in str(failure.value)
    assert "sig" not in str(failure.value)
    assert len(server.requests) == (3 if kind is SourceStalledError else 1)


def test_redirects_in_a_circle_end(authority: Path, tmp_path: Path) -> None:
    with (
        serving(authority, status(301, Location="/again")) as server,
        pytest.raises(SourceRefusedError, match="redirects more than 5 times"),
    ):
        download(server.url(), tmp_path, authority)
    assert len(server.requests) == 6


def test_a_busy_server_is_left_alone_as_long_as_it_asks_within_reason(authority: Path, tmp_path: Path) -> None:
    clock = Haste()
    with serving(authority, status(429, Retry_After=7), status(503, Retry_After=99999), whole) as server:
        assert download(server.url(), tmp_path, authority, clock=clock) == BODY
    assert clock.waits_s == [7 + 0.75, 120 + 1.5]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (700, "700 bytes"), (999.6, "1 kB"), (999_600, "1 MB"), (1536, "1.54 kB"), (5e21, "5e+03 EB")],
)
def test_sizes_are_written_for_people(count: float, text: str) -> None:
    assert readable_size(count) == text


def test_a_file_larger_than_the_volume_is_refused_before_its_first_byte(authority: Path, tmp_path: Path) -> None:
    with (
        serving(authority, lambda handler: handler.start(200, Content_Length=1 << 60)) as server,
        pytest.raises(DiskFullError, match=r"1\.15 EB more are needed and [\d.]+ [A-Za-z]+ are free"),
    ):
        download(server.url(), tmp_path, authority)


def test_a_server_that_nobody_vouches_for_is_not_asked_twice(authority: Path, tmp_path: Path) -> None:
    with serving(authority, whole) as server:
        result = conch_fetch(tmp_path, [model(server, field="spec.models[0]")], ca_file=None)
    assert result.code == 3
    assert "shows a certificate that is not trusted" in result.termination
    assert result.termination.endswith("or name your own authority in spec.models[0].source.caRef")
    assert not server.requests


def model(server: Server, path: str = "/model.onnx", **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": "filetype", "uri": server.url(path), "digest": DIGEST, "fileName": "model.onnx"}
    return fields | {"config": 'name: "filetype"\n'} | changes


def test_row_79_no_byte_of_a_file_with_another_digest_is_ever_served(authority: Path, tmp_path: Path) -> None:
    wanted = "sha256:" + "0" * 64
    with serving(authority, whole) as server:
        models = [model(server, name="good"), model(server, name="filetype", digest=wanted)]
        result = conch_fetch(tmp_path, models, authority / "ca.pem")
    assert result.code == 4
    assert result.termination == (
        f'model "filetype": {server.url()} has digest {DIGEST} (300000 bytes), not {wanted}; '
        "correct source.digest, or the source if it was changed"
    )
    assert result.stderr.endswith(f"conch fetch: {result.termination}\n")
    assert visible(tmp_path) == set()


def test_a_complete_repository_and_the_drain_script_are_left_and_a_rerun_downloads_nothing(
    authority: Path, tmp_path: Path
) -> None:
    (tmp_path / "tools").mkdir()
    with serving(authority, whole) as server:
        models = [model(server), model(server, name="twin")]
        for run in range(2):
            result = conch_fetch(tmp_path, models, authority / "ca.pem", tools=tmp_path / "tools")
            assert result.code == 0, result.termination
            origins = {entry["model"]: entry["origin"] for entry in json.loads(result.termination)["fetched"]}
            assert origins == {"filetype": "Download" if run == 0 else "Present", "twin": "Present"}
        assert len(server.requests) == 1
    assert visible(tmp_path) == {
        "filetype/config.pbtxt", "filetype/1/model.onnx", "twin/config.pbtxt", "twin/1/model.onnx",
    }  # fmt: skip
    assert (tmp_path / "models/filetype/1/model.onnx").read_bytes() == BODY
    assert sorted(child.name for child in (tmp_path / "models").iterdir()) == ["filetype", "twin"]
    tool = tmp_path / "tools/drain.py"
    assert tool.read_bytes() == (SOURCE_ROOT / "conch/triton/drain.py").read_bytes()
    assert tool.stat().st_mode & 0o777 == 0o555
    assert [json.loads(line)["event"] for line in result.stderr.splitlines()][-1] == "complete"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_row_76_a_killed_container_resumes_where_it_was(
    number: signal.Signals, code: int, authority: Path, tmp_path: Path
) -> None:
    with serving(authority, hangs, whole) as server:
        arguments = command(tmp_path, [model(server)], authority / "ca.pem")
        partial = tmp_path / f"models/.conch-staging/download/{DIGEST.removeprefix('sha256:')}.partial"
        with subprocess.Popen(arguments, env=environment(), stderr=subprocess.DEVNULL) as first:
            until_s = time.monotonic() + 20
            while not (partial.exists() and partial.stat().st_size == 100_000):
                assert time.monotonic() < until_s
                time.sleep(0.01)
            first.send_signal(number)
            assert first.wait(10) == code
        assert visible(tmp_path) == set()
        assert conch_fetch(tmp_path, [model(server)], authority / "ca.pem").code == 0
    assert [request.get("range") for request in server.requests] == [None, "bytes=100000-"]
    assert (tmp_path / "models/filetype/1/model.onnx").read_bytes() == BODY


def test_row_77_a_big_file_needs_no_more_memory_than_a_small_one(authority: Path, tmp_path: Path) -> None:
    def big(handler: Handler) -> None:
        handler.start(200, Content_Length=BIG_BYTES)
        for _ in range(BIG_BYTES // len(MEBIBYTE)):
            handler.wfile.write(MEBIBYTE)

    hasher = hashlib.sha256()
    for _ in range(BIG_BYTES // len(MEBIBYTE)):
        hasher.update(MEBIBYTE)
    peak_bytes = 0
    with serving(authority, big) as server:
        models = [model(server, digest=f"sha256:{hasher.hexdigest()}")]
        arguments = command(tmp_path, models, authority / "ca.pem")
        with subprocess.Popen(arguments, env=environment(), stderr=subprocess.DEVNULL) as running:
            while running.poll() is None:
                peak_bytes = max(peak_bytes, resident_peak_bytes(running.pid))
                time.sleep(0.02)
    file = tmp_path / "models/filetype/1/model.onnx"
    assert running.returncode == 0
    assert file.stat().st_size == BIG_BYTES
    shutil.rmtree(tmp_path / "models")
    assert 0 < peak_bytes <= 150 << 20


def test_a_disk_that_fills_up_under_the_download_is_named(authority: Path, tmp_path: Path) -> None:
    small = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c",
             f'mount -t tmpfs -o size=64k none "{tmp_path}/models" && exec "$@"', "sh")  # fmt: skip
    (tmp_path / "models").mkdir()
    if subprocess.run([*small, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this kernel lets no user mount a file system of its own")
    with serving(authority, until_closed) as server:
        result = conch_fetch(tmp_path, [model(server)], authority / "ca.pem", prefix=small)
    assert result.code == 7
    assert result.termination == (
        'model "filetype": the model volume is full; free space on the node, on whose disk it lies, or use a pvc or '
        "image source, which needs no copy"
    )


@pytest.mark.parametrize(
    ("models", "code", "message"),
    [
        ([], 2, "is not valid: plan.models: Tuple should have at least 1 item"),
        ([{"name": "m", "uri": "pvc://c/m", "fileName": "f", "mount": "/absent-volume", "config": ""}], 3,
         'model "m": pvc://c/m is not mounted at /absent-volume; add the source'),
        ([{"name": "m", "uri": "pvc://c/m", "fileName": "f", "mount": str(SOURCE_ROOT / "conch/triton"), "config": ""}],
         5, 'model "m": expected f or numbered version folders, found '),
    ],
)  # fmt: skip
def test_each_kind_of_failure_has_its_exit_code_and_its_sentence(
    models: list[dict[str, Any]], code: int, message: str, tmp_path: Path
) -> None:
    result = conch_fetch(tmp_path, models, None)
    assert result.code == code, result.stderr
    assert message in result.termination
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("kind", "code"), [(FetchError, 1), (PlanInvalidError, 2), (SourceRefusedError, 3),
    (DigestMismatchError, 4), (WrongLayoutError, 5), (SourceStalledError, 6), (DiskFullError, 7)])  # fmt: skip
def test_exit_codes_stay_what_the_documentation_says(kind: type[FetchError], code: int) -> None:
    assert kind("cause", "fix").exit_code == code
    assert str(kind("cause", "fix").about("m")) == 'model "m": cause; fix'
    assert str(kind("cause", "fix").about("m", "spec.models[0]")) == 'model "m": cause (spec.models[0]); fix'
    assert str(kind("cause", "set spec.x").about("m", "spec.models[0]")) == 'model "m": cause; set spec.x'


def test_a_repository_that_can_not_be_written_is_said_without_a_traceback(authority: Path, tmp_path: Path) -> None:
    with serving(authority, whole) as server:
        arguments = command(tmp_path, [model(server)], authority / "ca.pem")
        (tmp_path / "models").rmdir()
        (tmp_path / "models").write_text("in the way")
        done = subprocess.run(arguments, env=environment(), capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 1
    assert (tmp_path / "termination").read_text().startswith("the model repository can't be built: ")
    assert "Traceback" not in done.stderr


def test_bytes_left_by_an_earlier_container_that_do_not_fit_are_fetched_anew(authority: Path, tmp_path: Path) -> None:
    (tmp_path / "file.partial").write_bytes(bytes(len(BODY)))
    with serving(authority, status(416, Content_Range=f"bytes */{len(BODY)}"), whole) as server:
        assert download(server.url(), tmp_path, authority) == BODY
    assert [request.get("range") for request in server.requests] == [f"bytes={len(BODY)}-", None]


def test_a_validator_of_another_address_is_not_sent(authority: Path, tmp_path: Path) -> None:
    with serving(authority, dropped, status(404), whole) as server:
        with pytest.raises(SourceRefusedError):
            download(server.url("/old"), tmp_path, authority)
        assert download(server.url("/new"), tmp_path, authority) == BODY
    assert [request.get("if-range") for request in server.requests] == [None, '"v1"', None]
    assert server.requests[2]["range"] == "bytes=100000-"


def test_an_address_where_nobody_listens_is_tried_again_and_then_named(authority: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(SourceStalledError) as failure:
        download(f"https://127.0.0.1:{port}/m", tmp_path, authority)
    assert f"https://127.0.0.1:{port}/m failed 3 times in a row" in str(failure.value)
    assert " at 0x" not in str(failure.value)


def test_a_system_store_named_by_ssl_cert_file_is_trusted_too(authority: Path, tmp_path: Path) -> None:
    with serving(authority, whole) as server:
        arguments = command(tmp_path, [model(server)], None)
        trust = environment(SSL_CERT_FILE=str(authority / "ca.pem"))
        done = subprocess.run(arguments, env=trust, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr


def test_fetch_starts_without_the_operators_libraries() -> None:
    loaded = (
        "import sys, conch.cli.main, conch.storage.fetch;"
        "heavy = ('kopf', 'kubernetes', 'numpy', 'aiohttp', 'tritonclient', 'obstore');"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", loaded], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def authorized(handler: Handler) -> None:
    """Leads to wherever the path says, or gives the file to whoever has the login."""
    if handler.path.startswith("/to/"):
        handler.start(302, Location=f"https://{handler.path.removeprefix('/to/')}", Content_Length=0)
    elif handler.headers.get("Authorization"):
        whole(handler)
    else:
        handler.start(401, Content_Length=0, WWW_Authenticate="Basic realm=models")


LOGINS = {
    "Bearer made-up-token": {"token": "made-up-token\n"},
    "Basic cmVhZGVyOm1hZGU6dXA=": {"username": "reader", "password": "made:up"},
}


@pytest.mark.parametrize("header", LOGINS)
def test_the_login_of_the_secret_goes_to_the_files_own_server(header: str, authority: Path, tmp_path: Path) -> None:
    secret = SecretFolder(tmp_path / "secret", LOGINS[header]).mounted()
    with serving(authority, authorized) as server:
        fields = model(server, "/to/" + server.url("/model.onnx").removeprefix("https://"), secret=secret)
        result = conch_fetch(tmp_path, [fields], authority / "ca.pem")
    assert result.code == 0, result.stderr
    assert [request.get("authorization") for request in server.requests] == [header, header]
    assert "made" not in result.stderr


def test_the_login_goes_to_no_other_server_that_redirects_lead_to(authority: Path, tmp_path: Path) -> None:
    secret = SecretFolder(tmp_path / "secret", {"token": "made-up-token"}).mounted()
    with serving(authority, whole) as other, serving(authority, authorized) as server:
        fields = model(server, "/to/" + other.url("/model.onnx").removeprefix("https://"), secret=secret)
        result = conch_fetch(tmp_path, [fields], authority / "ca.pem")
    assert result.code == 0, result.stderr
    assert server.requests[0]["authorization"] == "Bearer made-up-token"
    assert [request.get("authorization") for request in other.requests] == [None]


@pytest.mark.parametrize(
    ("keys", "answers", "message"),
    [
        (
            None,
            authorized,
            "answered 401; the server wants credentials; name a Secret with them in spec.models[0].source.",
        ),
        (
            {"token": "made-up"},
            status(401),
            "answered 401; correct the credentials in the Secret of spec.models[0].source.secretRef",
        ),
        (
            {"token": "made-up"},
            status(403),
            "answered 403; allow the credentials of spec.models[0].source.secretRef to read it",
        ),
        ({"user": "x"}, whole, "the Secret lacks token, or username and password (it holds user); add them to"),
    ],
)
def test_a_login_that_is_missing_or_refused_is_named(
    keys: dict[str, str] | None, answers: Answer, message: str, authority: Path, tmp_path: Path
) -> None:
    secret = None if keys is None else SecretFolder(tmp_path / "secret", keys).mounted()
    with serving(authority, answers) as server:
        result = conch_fetch(tmp_path, [model(server, secret=secret, field="spec.models[0]")], authority / "ca.pem")
    assert result.code == 3
    assert message in result.termination
    assert "made-up" not in result.stderr


def test_an_authority_and_a_proxy_of_the_source_are_used_for_it_alone(authority: Path, tmp_path: Path) -> None:
    with serving(authority, whole) as server, proxy() as way:
        fields = model(server, ca=str(authority / "ca.pem"), proxy=way.url)
        result = conch_fetch(tmp_path, [fields, model(server, "/other", name="plain")], None)
        assert result.code == 3, "the second model names no authority"
        assert 'model "plain"' in result.termination
        assert conch_fetch(tmp_path, [fields], None).code == 0
    assert set(way.connects) == {f"localhost:{server.server_port}"}


def test_a_long_download_tells_bytes_total_and_rate_every_five_seconds() -> None:
    told = structlog.testing.CapturingLogger()
    clock = Haste()
    clock.monotonic = iter([0.0, 1.0, 5.0, 6.0, 11.0]).__next__  # type: ignore[method-assign]
    log = structlog.wrap_logger(told, processors=[lambda _logger, _name, event: event])
    progress = Progress("s3://m/k", clock, log)
    for done in (10, 500, 600, 1100):
        progress.received(done, 2000)
    assert [call.kwargs for call in told.calls] == [
        {"event": "downloading", "source": "s3://m/k", "bytes_done": 500, "bytes_per_s": 100, "total_bytes": 2000},
        {"event": "downloading", "source": "s3://m/k", "bytes_done": 1100, "bytes_per_s": 100, "total_bytes": 2000},
    ]


def packed(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


@pytest.mark.parametrize("scheme", ["https", "pvc"])
def test_an_archive_is_verified_as_it_is_then_unpacked(scheme: str, authority: Path, tmp_path: Path) -> None:
    archive = packed({"1/model.onnx": BODY, "3/model.onnx": b"three"})
    (tmp_path / "claim").mkdir()
    (tmp_path / "claim/m.zip").write_bytes(archive)

    def serves(handler: Handler) -> None:
        handler.start(200, Content_Length=len(archive))
        handler.wfile.write(archive)

    with serving(authority, serves) as server:
        fields = model(server, "/m.zip", digest=f"sha256:{hashlib.sha256(archive).hexdigest()}", versions=[1, 3])
        if scheme == "pvc":
            fields |= {"uri": "pvc://claim/m.zip", "mount": str(tmp_path / "claim"), "path": "/m.zip"}
        result = conch_fetch(tmp_path, [fields], authority / "ca.pem")
        assert result.code == 0, result.stderr
        wrong = conch_fetch(tmp_path, [fields | {"digest": DIGEST}], authority / "ca.pem")
    assert visible(tmp_path) == {"filetype/config.pbtxt", "filetype/1/model.onnx", "filetype/3/model.onnx"}
    assert wrong.code == 4
    assert "correct source.digest, or the source if it was changed" in wrong.termination


def test_an_ensemble_has_no_source_and_gets_an_empty_version(tmp_path: Path) -> None:
    result = conch_fetch(tmp_path, [{"name": "pipeline", "expects": "Nothing", "config": "x"}], None)
    assert result.code == 0, result.stderr
    assert json.loads(result.termination) == {
        "fetched": [{"model": "pipeline", "origin": "None", "bytes": 0, "seconds": 0.0}]
    }
    assert list((tmp_path / "models/pipeline/1").iterdir()) == []


def test_a_small_answer_that_never_ends_is_given_up_in_time(authority: Path) -> None:
    def dripping(handler: Handler) -> None:
        handler.start(200)
        while not cast("Server", handler.server).closing.wait(0.02):
            handler.wfile.write(b" ")

    trust = ssl.create_default_context(cafile=str(authority / "ca.pem"))
    patience = Patience(stall_timeout_s=0.3, total_timeout_s=0.5)
    log = structlog.wrap_logger(structlog.testing.CapturingLogger())
    with serving(authority, dripping) as server, urllib3.PoolManager(ssl_context=trust) as pool:
        downloader = Downloader(pool, patience, clock=Haste(), jitter=lambda: 0.5, log=log)
        with pytest.raises(SourceStalledError, match=r"is not complete after 0\.5 s"):
            downloader.read(Wanted(server.url(), ""), {}, 200)
