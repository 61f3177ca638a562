"""Why a fetch failed: one class per exit code, each with a sentence that says cause and fix. Pure."""

from typing import ClassVar

MESSAGE_MAX_BYTES = 4096
"""What the kubelet keeps of a termination message."""


class FetchError(Exception):
    """A failure that the user can act on. `cause` and `fix` are clauses; `str()` joins them into one sentence.

    `field` is the part of the resource that it is about; the sentence names it unless cause or fix name one already.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, cause: str, fix: str, *, model: str | None = None, field: str = "") -> None:
        super().__init__(cause, fix, model, field)
        self.cause = cause
        self.fix = fix
        self.model = model
        self.field = field

    def __str__(self) -> str:
        subject = f'model "{self.model}": ' if self.model else ""
        named = not self.field or "spec." in self.cause or "spec." in self.fix
        return f"{subject}{self.cause}{'' if named else f' ({self.field})'}; {self.fix}"

    def about(self, model: str, field: str = "") -> "FetchError":
        """The same failure, naming the model and the field, such as `spec.models[0].source`."""
        return type(self)(self.cause, self.fix, model=model, field=field)


class PlanInvalidError(FetchError):
    """Exit 2: the plan can't be read, or isn't one."""

    exit_code = 2


class SourceRefusedError(FetchError):
    """Exit 3: the source isn't there, or may not be read. Trying again doesn't help."""

    exit_code = 3


class DigestMismatchError(FetchError):
    """Exit 4: the bytes aren't those of the digest."""

    exit_code = 4


class WrongLayoutError(FetchError):
    """Exit 5: the files aren't arranged as Triton needs them, or lead out of the volume."""

    exit_code = 5


class SourceStalledError(FetchError):
    """Exit 6: unreachable, stalled, or failing on every attempt. Trying again later may help."""

    exit_code = 6


class DiskFullError(FetchError):
    """Exit 7: the model volume has no room."""

    exit_code = 7


def termination_message(sentence: str) -> bytes:
    """The sentence on one line within MESSAGE_MAX_BYTES.

    Servers and volumes choose some of the words (names, reasons), and the operator quotes them in a condition:
    control characters are replaced.
    """
    line = "".join(character if character.isprintable() else "?" for character in sentence)
    raw = line.encode("utf-8", "replace")
    if len(raw) <= MESSAGE_MAX_BYTES:
        return raw
    ellipsis = "…".encode()
    return raw[: MESSAGE_MAX_BYTES - len(ellipsis)].decode("utf-8", "ignore").encode() + ellipsis
