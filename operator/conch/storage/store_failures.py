"""What an object store's error means: the sentence for what another try can't heal, or a cause that may pass. Pure.

The library (obstore) has few kinds of errors; status, the store's own code and the kind of a broken connection stand in
the error's text, whose form the tests hold fast against real servers. Nothing of a request is repeated from it.
"""

import re
from typing import Final
from urllib.parse import urlsplit

from conch.storage.errors import FetchError, SourceRefusedError
from conch.storage.plan import PlannedModel

DEFAULT_REGION: Final = "us-east-1"

_STATUS: Final = re.compile(r"status(?: code)?: (\d{3})", re.ASCII)
_CODE: Final = re.compile(r"<Code>(\w{1,64})</Code>", re.ASCII)
_REGION: Final = re.compile(r"(?:<Region>|expecting ')([a-z0-9-]{1,64})", re.ASCII)
_SYSTEM_MESSAGE: Final = re.compile(r'(?:message|error): "([^"\\]{1,200})"')
_UNTRUSTED: Final = re.compile(r"UnknownIssuer|invalid peer certificate|InvalidCertificate|NotValidForName", re.ASCII)
_CUT: Final = re.compile(r"IncompleteMessage|IncompleteBody|end of file|UnexpectedEof|ConnectionReset", re.ASCII)
_TUNNEL: Final = re.compile(r"tunnel|ProxyAuth|proxy", re.ASCII | re.IGNORECASE)
# Where the library asks for a cloud identity: AWS' token service, the agent of EKS, Google's metadata server.
_CREDENTIALS: Final = re.compile(r"token request|AssumeRole|//sts[.]|//169[.]254[.]|computeMetadata|/latest/api/token")
_WRONG_REGION: Final = ("PermanentRedirect", "AuthorizationHeaderMalformed", "TemporaryRedirect")
_WRONG_KEYS: Final = (
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired",
)  # fmt: skip
_PASSING_CODES: Final = ("SlowDown", "RequestTimeout", "ServiceUnavailable", "InternalError", "Throttling")
_PASSING_STATUSES: Final = (408, 425, 429)
_UNREACHABLE: Final = "check that the pod may reach the store (NetworkPolicy, DNS, proxy) and that it answers"


class PassingError(Exception):
    """An attempt ended early, for a cause that may pass. `fix` is what to do when it doesn't."""

    def __init__(self, cause: str, fix: str = _UNREACHABLE) -> None:
        super().__init__(cause)
        self.cause = cause
        self.fix = fix


class ChangedError(Exception):
    """The object isn't the one that was listed."""


def explained(error: Exception, model: PlannedModel, *, stall_timeout_s: float) -> Exception:
    """The FetchError, PassingError or ChangedError that stands for an error of the store."""
    text = str(error)
    status_match, code_match = _STATUS.search(text), _CODE.search(text)
    status, code = int(status_match[1]) if status_match else 0, code_match[1] if code_match else ""
    if type(error).__name__ == "PreconditionError" or status == 412:  # noqa: PLR2004 - Precondition Failed
        return ChangedError()
    if model.identity == "ServiceAccount" and model.secret is None and _CREDENTIALS.search(text):
        return _no_identity(status, text, stall_timeout_s)
    if status >= 500 or status in _PASSING_STATUSES or code in _PASSING_CODES:  # noqa: PLR2004 - server errors
        return PassingError(f"the store answered {status}{f' ({code})' if code else ''}")
    refused = _settings_refused(text, status, code, model) or _refused(error, status, code, model)
    if refused is not None:
        return refused
    return _connection_failed(text, model, stall_timeout_s)


def connection_cause(text: str, stall_timeout_s: float) -> str:
    """What went wrong with a connection."""
    if "kind: Timeout" in text or "TimedOut" in text:
        return f"no byte came for {stall_timeout_s:g} s"
    if _CUT.search(text):
        return "the server closed the connection in mid-body"
    message = _SYSTEM_MESSAGE.search(text)
    if message is not None:
        return f"the connection failed ({message[1]})"
    return "the connection failed"


def _settings_refused(text: str, status: int, code: str, model: PlannedModel) -> FetchError | None:
    """What the settings of the source explain."""
    bucket = urlsplit(str(model.uri)).netloc
    if code == "NoSuchBucket":
        where = model.endpoint or ("Google Cloud Storage" if model.scheme == "gs" else "AWS S3")
        return SourceRefusedError(
            f'{where} has no bucket "{bucket}"',
            f"correct {model.at('source.uri')}, or name its store in {model.at('source.endpoint')}",
        )
    if code in _WRONG_REGION or status in (301, 307) or "without LOCATION" in text:
        hint = _REGION.search(text)
        there = f"in region {hint[1]}" if hint else "in another region"
        return SourceRefusedError(
            f'the bucket "{bucket}" is {there}, not in {model.region or DEFAULT_REGION}',
            f"set {model.at('source.region')} to {hint[1] if hint else 'the region of the bucket'}",
        )
    if code in _WRONG_KEYS:
        return SourceRefusedError(
            f"the store refuses the keys for {model.uri} ({code})",
            f"correct the Secret of {model.at('source.secretRef')}",
        )
    if code == "RequestTimeTooSkewed":
        return SourceRefusedError("the store finds that the node's clock is wrong", "set the clock of the node")
    if "InvalidContentType" in text and str(model.endpoint).startswith("https://"):
        return SourceRefusedError(
            f"{model.endpoint} doesn't speak TLS", f"correct the port or the scheme in {model.at('source.endpoint')}"
        )
    if _UNTRUSTED.search(text):
        return SourceRefusedError(
            f"{model.endpoint or model.uri} shows a certificate that is not trusted",
            f"use a certificate of a public authority, or name your own authority in {model.at('source.caRef')}",
        )
    return None


def _refused(error: Exception, status: int, code: str, model: PlannedModel) -> FetchError | None:
    """What the status alone explains."""
    shown = f"{model.uri} answered {status or 404}{f' ({code})' if code else ''}"
    if status in (401, 403):
        return SourceRefusedError(shown, _permission_fix(model))
    if status == 407:  # noqa: PLR2004 - Proxy Authentication Required
        return SourceRefusedError(
            f"the proxy {model.proxy} wants credentials, which can't be given",
            f"name another one in {model.at('source.proxy')}",
        )
    if isinstance(error, FileNotFoundError) or status:
        return SourceRefusedError(shown, f"correct {model.at('source.uri')}")
    return None


def _permission_fix(model: PlannedModel) -> str:
    rights = "s3:GetObject, s3:ListBucket for a prefix" if model.scheme == "s3" else "storage.objects.get and list"
    if model.secret is not None:
        return f"allow the keys in the Secret of {model.at('source.secretRef')} to read it ({rights})"
    if model.identity == "ServiceAccount":
        return f"allow the cloud identity of the pod's ServiceAccount to read it ({rights})"
    return f"allow reading it without a key, or name a Secret with keys in {model.at('source.secretRef')}"


def _no_identity(status: int, text: str, stall_timeout_s: float) -> Exception:
    why = f"it answered {status}" if status else connection_cause(text, stall_timeout_s)
    cause = f"the cloud gave no credentials for the pod's ServiceAccount: {why}"
    fix = "bind the ServiceAccount of spec.runtime.serviceAccountName to a cloud identity that may read the model"
    if 400 <= status < 500 and status not in _PASSING_STATUSES:  # noqa: PLR2004 - client errors
        return SourceRefusedError(cause, fix)
    return PassingError(cause, fix)


def _connection_failed(text: str, model: PlannedModel, stall_timeout_s: float) -> PassingError:
    cause = connection_cause(text, stall_timeout_s)
    if model.proxy is not None and ("Connect" in text or _TUNNEL.search(text)):
        wants = "it wants credentials" if "ProxyAuth" in text or "proxy authorization" in text else cause
        return PassingError(
            f"the way through the proxy {model.proxy} failed: {wants}",
            f"correct {model.at('source.proxy')}, or check that the proxy answers",
        )
    return PassingError(cause)
