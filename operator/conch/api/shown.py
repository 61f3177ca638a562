"""Values in messages. Pure."""

from __future__ import annotations

import json
import re
from typing import Any, Final

_MAX_SHOWN: Final = 80


def shown(value: Any) -> str:
    """A value for a message: one line of JSON without control characters, at most 80 characters, no password."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    text = re.sub(r"(://)[^/@\s]*@", r"\1…@", text)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"
