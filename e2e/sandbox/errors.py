"""The one error that the sandbox raises for what a person can fix."""


class SandboxError(RuntimeError):
    """Says what failed and what to do about it."""
