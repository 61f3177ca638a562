"""The three ways a reconcile can stop early; the reason goes into the conditions. Pure."""

from __future__ import annotations


class ReconcileError(Exception):
    """A reconcile that stopped; `reason` is CamelCase, `message` names the field, the value and the fix."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


class Stalled(ReconcileError):
    """The spec itself is wrong (R9): no retry until it changes."""


class Waiting(ReconcileError):
    """Something outside the spec is missing and may appear: look again after `retry_after_s`."""

    def __init__(self, reason: str, message: str, retry_after_s: float = 30.0) -> None:
        super().__init__(reason, message)
        self.retry_after_s = retry_after_s


class Retryable(ReconcileError):
    """Everything else: counted, retried with back-off."""
