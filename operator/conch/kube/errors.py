"""What a call of the Kubernetes API can fail with: one class per reaction, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any


class ApiError(Exception):
    """An answer other than success; `status` is 0 when there was no answer at all."""

    def __init__(
        self, status: int = 0, reason: str = "", message: str = "", *, retry_after_s: float | None = None
    ) -> None:
        super().__init__(status, reason, message)
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        """The status, the reason and what the server said."""
        return f"{self.status or 'no answer'} {self.reason}: {self.message}"


class NotFound(ApiError):
    """404: the object, its namespace or its kind does not exist."""


class Conflict(ApiError):
    """409: a precondition or a resourceVersion no longer holds, another manager owns a field, or the name is taken."""


class Invalid(ApiError):
    """400 or 422: the server refuses this body; sending it again changes nothing."""


class Forbidden(ApiError):
    """401 or 403: the role lacks the verb, or admission refused."""


class Throttled(ApiError):
    """429: the server asks for a pause of `retry_after_s`."""


class Unreachable(ApiError):
    """No connection, no answer in time, or 5xx. A write may have happened."""


class NotSent(Unreachable):
    """No connection came about: the server saw nothing, so even a write can be sent again."""


class NotLeader(ApiError):
    """The fence refused a write: nothing was sent."""

    def __init__(self, what: str) -> None:
        super().__init__(0, "NotLeader", f"{what} is refused: this replica does not hold the lease")


_CLASSES: Mapping[int, type[ApiError]] = {
    HTTPStatus.BAD_REQUEST: Invalid,
    HTTPStatus.UNAUTHORIZED: Forbidden,
    HTTPStatus.FORBIDDEN: Forbidden,
    HTTPStatus.NOT_FOUND: NotFound,
    HTTPStatus.CONFLICT: Conflict,
    HTTPStatus.UNPROCESSABLE_ENTITY: Invalid,
    HTTPStatus.TOO_MANY_REQUESTS: Throttled,
}

# An applied field that the schema lacks is answered with 500 (seen on 1.36), though nothing is wrong with the server.
_SCHEMA = "failed to create typed patch object"


def from_answer(status: int, body: Any, *, retry_after: str | None = None) -> ApiError:
    """The error of an HTTP answer; `body` is the decoded `Status` object, or whatever text a proxy sent instead."""
    answer = body if isinstance(body, Mapping) else {}
    details = answer.get("details")
    asked = details.get("retryAfterSeconds") if isinstance(details, Mapping) else None
    wait_s = _seconds(retry_after) if retry_after is not None else _seconds(asked)
    message = str(answer.get("message") or (body if isinstance(body, str) else ""))[:1000]
    default: type[ApiError] = Unreachable if status >= HTTPStatus.INTERNAL_SERVER_ERROR else ApiError
    if message.startswith(_SCHEMA):
        default = Invalid
    return _CLASSES.get(status, default)(status, str(answer.get("reason") or ""), message, retry_after_s=wait_s)


def _seconds(value: Any) -> float | None:
    # HTTP also allows a date here; the API server never sends one, and a proxy's clock is no reason to wait for hours.
    try:
        return max(0.0, float(value))
    except (TypeError, ValueError):
        return None
