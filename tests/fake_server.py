"""A stand-in for the servers of pods: it answers as it is told, and counts who was asked."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format

from conch.triton.probe import Unreadable
from conch.triton.readback import Loaded, parse_loaded

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence


def make_loaded(config: Any, *, versions: Sequence[str] = ("1",), **changes: Any) -> Loaded:
    """What a server answers that loaded exactly this configuration, some of its fields changed."""
    said = json_format.MessageToDict(config, preserving_proto_field_name=True)
    metadata = {"name": config.name, "versions": list(versions)}
    return parse_loaded(json.dumps({**said, **changes}).encode(), json.dumps(metadata).encode())


@dataclass
class FakeServer:
    """Answers with `loaded`, or with the reason why it can't be asked; `held` keeps every caller waiting."""

    loaded: dict[str, Loaded] = field(default_factory=dict)
    silent: str = ""
    asked: list[str] = field(default_factory=list)
    held: asyncio.Event | None = None

    async def read(self, address: str, models: Sequence[str]) -> dict[str, Loaded]:
        self.asked.append(address)
        if self.held is not None:
            await self.held.wait()
        if self.silent:
            raise Unreadable(self.silent)
        return {model: self.loaded[model] for model in models}
