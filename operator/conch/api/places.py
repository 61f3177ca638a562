"""Fields by their path in a message: `spec.models[1].source.uri` → ("spec", "models", 1, "source", "uri"). Pure."""

from __future__ import annotations

import json
import re
from typing import Final

Step = str | int

_NAME: Final = re.compile(r"\.?([A-Za-z][A-Za-z0-9_]*)")
_INDEX: Final = re.compile(r"\[([0-9]{1,9})\]")
_QUOTED: Final = re.compile(r'\[("(?:[^"\\]|\\.)*")\]')


def field_path(problem: str) -> tuple[Step, ...]:
    """The field that a problem's text begins with: `spec.models[0].name: …` → ("spec", "models", 0, "name").

    Empty when it begins with none.
    """
    steps: list[Step] = []
    rest = problem
    while rest:
        match = _NAME.match(rest) if not steps or rest.startswith(".") else None
        if match:
            steps.append(match[1])
            rest = rest[match.end() :]
        elif index := _INDEX.match(rest):
            steps.append(int(index[1]))
            rest = rest[index.end() :]
        elif quoted := _QUOTED.match(rest):
            try:
                steps.append(json.loads(quoted[1]))
            except ValueError:
                break  # shortened for the message: the parent is as near as it gets
            rest = rest[quoted.end() :]
        else:
            break
    return tuple(steps) if rest.startswith((":", " (")) else ()
