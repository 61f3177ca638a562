"""String types of Kubernetes and of Triton that several parts of a resource use. Pure."""

from __future__ import annotations

import json
import re
from typing import Annotated, Final

from pydantic import Field

from conch.api.fields import KeysMatch, Matches

LABEL_NAME: Final = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
SUBDOMAIN: Final = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?([.][a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
LABEL_KEY: Final = f"({SUBDOMAIN}/)?{LABEL_NAME}"
PATH: Final = r"(/[A-Za-z0-9._+=@~,-]+)+/?"
PORT: Final = r"[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]"
HOST: Final = rf"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:({PORT}))?"

ModelName = Annotated[
    str,
    Field(min_length=1, max_length=63),
    Matches(
        r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9_-])?",
        "must be letters, digits, '_', '.' and '-', begin with a letter or digit and not end with '.'",
    ),
]
# Of what Triton only writes into its log. Not of an instance group: the Python backend hands that name to a shell.
LogName = Annotated[
    str,
    Field(min_length=1, max_length=63),
    Matches(
        r"[A-Za-z0-9_]([A-Za-z0-9_ .,:/()#+-]*[A-Za-z0-9_.)])?",
        "must be letters, digits, inner spaces and _ . , : / ( ) # + -, and begin with a letter, digit or '_'",
    ),
]
# What tensor names of every framework fit in; no quotes, backslashes, braces or dollar signs.
TENSOR_NAME: Final = r"[A-Za-z0-9_][A-Za-z0-9_.:/\[\]-]*"
TENSOR_NAME_WORDS: Final = "must be letters, digits and _ . : / [ ] -, and begin with a letter, digit or '_'"
TensorName = Annotated[str, Field(min_length=1, max_length=255), Matches(TENSOR_NAME, TENSOR_NAME_WORDS)]
# No part begins with a dot: neither '..' nor a hidden file.
RELATIVE_PATH: Final = r"[A-Za-z0-9_][A-Za-z0-9._+=@~,-]*(/[A-Za-z0-9_][A-Za-z0-9._+=@~,-]*)*"
FileName = Annotated[
    str,
    Field(min_length=1, max_length=255),
    Matches(
        r"[A-Za-z0-9_][A-Za-z0-9._+=@~,-]*",
        "must be a name of letters, digits and . _ + = @ ~ , - without a path, and not begin with a dot",
    ),
]
RelativePath = Annotated[
    str,
    Field(min_length=1, max_length=255),
    Matches(
        RELATIVE_PATH,
        "must be a relative path of letters, digits and . _ + = @ ~ , - whose parts don't begin with a dot",
    ),
]
Parameters = Annotated[
    dict[
        str,
        Annotated[
            str,
            Field(max_length=1024),
            Matches(
                r"[^\x00-\x1f\x7f-\x9f]*",
                "must be a single line without control characters; remove tabs and line breaks",
            ),
        ],
    ],
    KeysMatch(
        r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,127}",
        "must have keys of letters, digits and _ . : / -, at most 128 characters; rename the key",
    ),
]
LabelKey = Annotated[
    str,
    Field(max_length=317),
    Matches(f"({LABEL_KEY})?", "must be a label key such as nvidia.com/gpu.product or pool"),
]
LabelValue = Annotated[
    str,
    Field(max_length=63),
    Matches(f"({LABEL_NAME})?", "must be a label value: letters, digits, '-', '_' and '.', at most 63"),
]
ClassName = Annotated[
    str,
    Field(max_length=253),
    Matches(f"({SUBDOMAIN})?", "must be a Kubernetes name: lower-case letters, digits, '-' and '.'"),
]


def field_matches(field: str, pattern: str) -> str:
    """The CEL expression that a field matches a pattern as a whole."""
    return f"self.{field}.matches({json.dumps(f'^(?:{pattern})$')})"


def full_match(pattern: str, value: str) -> bool:
    """Whether a value matches a pattern as a whole."""
    return re.fullmatch(pattern, value) is not None
