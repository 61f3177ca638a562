"""Credentials of a source, from the files of a mounted Secret or from the pod's own identity. Reads files.

No value of a Secret ever enters a message, a log line or an address.
"""

import base64
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from conch.storage.errors import SourceRefusedError

_VALUE_MAX_BYTES: Final = 64 << 10
_DOCKER_KEYS: Final = (".dockerconfigjson", "config.json")
_DOCKER_HUB: Final = ("docker.io", "index.docker.io", "registry-1.docker.io")


@dataclass(frozen=True, repr=False)
class S3Keys:
    """What signs requests to an S3 store; the token is there for temporary keys."""

    access_key_id: str
    secret_access_key: str
    session_token: str | None = None


@dataclass(frozen=True, repr=False)
class Login:
    """A name and a password, or a token alone."""

    username: str | None = None
    password: str | None = None
    token: str | None = None

    @property
    def from_secret(self) -> bool:
        """Always."""
        return True

    def header(self) -> str:
        """The value of the header Authorization."""
        if self.token is not None:
            return f"Bearer {self.token}"
        pair = f"{self.username}:{self.password}".encode()
        return f"Basic {base64.b64encode(pair).decode('ascii')}"

    def challenged(self, _challenge: str) -> bool:
        """A refused login stays refused."""
        return False


class MountedSecret:
    """A Secret's keys, one file each. `field` is the source's place in the resource, for messages."""

    def __init__(self, folder: Path, field: str) -> None:
        self._folder = folder
        self._field = field

    def value(self, *keys: str) -> str | None:
        """The first of the keys that is there, without white space around it. Raises SourceRefusedError."""
        for key in keys:
            try:
                raw = self._raw(key)
            except FileNotFoundError:
                continue
            try:
                text = raw.decode("utf-8").strip()
            except UnicodeDecodeError as error:
                raise self._unusable(f"its key {key} isn't text") from error
            if not text or not text.isprintable():
                raise self._unusable(f"its key {key} is {'not a single line' if text else 'empty'}")
            return text
        return None

    def s3_keys(self) -> S3Keys:
        """The keys of an S3 store. Raises SourceRefusedError."""
        access = self.value("accessKeyId", "AWS_ACCESS_KEY_ID")
        secret = self.value("secretAccessKey", "AWS_SECRET_ACCESS_KEY")
        if access is None or secret is None:
            raise self._lacking("accessKeyId and secretAccessKey")
        return S3Keys(access, secret, self.value("sessionToken", "AWS_SESSION_TOKEN"))

    def gs_key(self) -> str:
        """The JSON text of a Google service account's key. Raises SourceRefusedError."""
        text = self._text("key.json")
        if text is None:
            raise self._lacking("key.json")
        found = self._json(text, "key.json")
        if not {"client_email", "private_key"} <= found.keys():
            raise self._unusable("its key.json is no service account's key (client_email, private_key)")
        return text

    def https_login(self) -> Login:
        """A token, or a name and a password. Raises SourceRefusedError."""
        token = self.value("token")
        if token is not None:
            return Login(token=token)
        login = self._pair()
        if login is None:
            raise self._lacking("token, or username and password")
        return login

    def registry_login(self, registry: str) -> Login | None:
        """What the Secret says about a registry `HOST:PORT`; None: nothing. Raises SourceRefusedError."""
        for key in _DOCKER_KEYS:
            text = self._text(key)
            if text is None:
                continue
            entries = self._json(text, key).get("auths")
            if not isinstance(entries, dict):
                raise self._unusable(f"its key {key} has no auths")
            return self._docker_login(entries, registry, key)
        login = self._pair()
        if login is None:
            raise self._lacking(".dockerconfigjson, or username and password")
        return login

    def _docker_login(self, entries: dict[str, Any], registry: str, key: str) -> Login | None:
        wanted = _DOCKER_HUB if registry in _DOCKER_HUB else (registry,)
        for name, entry in entries.items():
            host = name.removeprefix("https://").removeprefix("http://").partition("/")[0]
            if host not in wanted or not isinstance(entry, dict):
                continue
            try:
                pair = base64.b64decode(str(entry.get("auth") or ""), validate=True).decode("utf-8")
            except ValueError as error:
                raise self._unusable(f"its key {key} has an auth for {registry} that isn't base64 of text") from error
            username, _, password = pair.partition(":")
            username, password = str(entry.get("username") or username), str(entry.get("password") or password)
            if username and password:
                return Login(username, password)
        return None

    def _pair(self) -> Login | None:
        username, password = self.value("username"), self.value("password")
        return None if username is None or password is None else Login(username, password)

    def _text(self, key: str) -> str | None:
        try:
            return self._raw(key).decode("utf-8")
        except FileNotFoundError:
            return None
        except UnicodeDecodeError as error:
            raise self._unusable(f"its key {key} isn't text") from error

    def _json(self, text: str, key: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            # Without the error as cause: it quotes the text.
            raise self._unusable(f"its key {key} is no JSON object") from None
        return found

    def _raw(self, key: str) -> bytes:
        try:
            with (self._folder / key).open("rb") as file:
                return file.read(_VALUE_MAX_BYTES)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._unusable(f"its key {key} can't be read ({error.strerror})") from error

    def _lacking(self, needed: str) -> SourceRefusedError:
        try:
            names = sorted(child.name for child in self._folder.iterdir() if not child.name.startswith(".."))
        except OSError:
            names = []
        return SourceRefusedError(
            f"the Secret lacks {needed} (it holds {', '.join(names) or 'nothing'})",
            f"add them to the Secret of {self._field}.secretRef",
        )

    def _unusable(self, cause: str) -> SourceRefusedError:
        return SourceRefusedError(
            f"the Secret can't be used: {cause}", f"correct the Secret of {self._field}.secretRef"
        )


def require_aws_identity(field: str) -> None:
    """Refuse a pod whose ServiceAccount has no AWS role: the library would go on to ask for the node's own.

    Raises SourceRefusedError. EKS sets these variables, for IRSA and for Pod Identity.
    """
    environment = os.environ
    if {"AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE"} <= environment.keys():
        return
    if "AWS_CONTAINER_CREDENTIALS_FULL_URI" in environment:
        return
    raise SourceRefusedError(
        "the pod's ServiceAccount has no AWS role (neither IRSA nor EKS Pod Identity has given one)",
        f"name a ServiceAccount that has one in spec.runtime.serviceAccountName, or use {field}.secretRef",
    )
