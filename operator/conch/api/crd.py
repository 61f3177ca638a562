"""The models of `api` → CustomResourceDefinitions: structural schema, CEL, printer columns. Pure but for main.

`python -m conch.api.crd` prints the file in `crds/`; `--check FILE` fails when the file is stale.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from conch import names
from conch.api.fields import DURATION_PATTERN, VALIDATIONS, format_duration
from conch.api.inferenceservice import NAME_CEL, NAME_MESSAGE, InferenceServiceSpec
from conch.api.status import InferenceServiceStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel

CRD_NAME: Final = f"{names.SERVICE_PLURAL}.{names.GROUP}"

# What a schema of the API server may hold; everything else that pydantic writes is dropped.
_KEPT: Final = (
    "type", "format", "description", "default", "enum", "minimum", "exclusiveMinimum", "maximum", "minLength",
    "maxLength", "pattern", "minItems", "maxItems", "minProperties", "maxProperties", "required",
    "x-kubernetes-int-or-string", "x-kubernetes-list-type", "x-kubernetes-list-map-keys", VALIDATIONS,
)  # fmt: skip

_READY: Final = ".status.conditions[?(@.type=='Ready')]"
_COLUMNS: Final = (
    ("Ready", "string", f"{_READY}.status", "Whether requests are answered."),
    ("Replicas", "string", ".status.replicas.summary", "Replicas ready/wanted."),
    ("Waiting", "number", ".status.scaling.waiting", "Requests waiting in all replicas."),
    ("Reason", "string", f"{_READY}.reason", "Why it is or isn't ready."),
    ("Age", "date", ".metadata.creationTimestamp", "Time since creation."),
)


def custom_resource_definition() -> dict[str, Any]:
    """The CRD of InferenceService, as plain data."""
    root = {
        "type": "object",
        "description": "An InferenceService runs models on NVIDIA Triton and keeps them at the replicas they need.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"Always {names.API_VERSION}."},
            "kind": {"type": "string", "description": f"Always {names.SERVICE_KIND}."},
            "metadata": {"type": "object"},
            "spec": structural_schema(InferenceServiceSpec),
            "status": structural_schema(InferenceServiceStatus, nullable=True),
        },
        VALIDATIONS: [{"rule": NAME_CEL, "message": NAME_MESSAGE}],
    }
    version = {
        "name": names.VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": root},
        "subresources": {"status": {}},
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "description": text} for name, kind, path, text in _COLUMNS
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRD_NAME},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.SERVICE_KIND,
                "listKind": f"{names.SERVICE_KIND}List",
                "plural": names.SERVICE_PLURAL,
                "singular": names.SERVICE_KIND.lower(),
                "shortNames": ["cisvc"],
                "categories": ["conch"],
            },
            "versions": [version],
        },
    }


def structural_schema(model: type[BaseModel], *, nullable: bool = False) -> dict[str, Any]:
    """A model's JSON schema as the API server takes it: no references, no unions, nothing unknown preserved.

    `nullable` lets an optional field hold null, which server-side apply refuses otherwise: in a status it is *unknown*.
    """
    schema = model.model_json_schema(by_alias=True)
    return _structural(schema, schema.get("$defs", {}), nullable=nullable)


def _structural(schema: dict[str, Any], definitions: dict[str, Any], *, nullable: bool) -> dict[str, Any]:
    optional = any(part.get("type") == "null" for part in schema.get("anyOf", ()))
    schema = _inlined(schema, definitions)
    result: dict[str, Any] = {key: schema[key] for key in _KEPT if key in schema}
    if nullable and optional:
        result["nullable"] = True
    if "exclusiveMinimum" in schema:
        result |= {"minimum": schema["exclusiveMinimum"], "exclusiveMinimum": True}
    if "properties" in schema:
        result["properties"] = {
            name: _structural(part, definitions, nullable=nullable) for name, part in schema["properties"].items()
        }
    if "items" in schema:
        result["items"] = _structural(schema["items"], definitions, nullable=nullable)
    if isinstance(schema.get("additionalProperties"), dict):
        result["additionalProperties"] = _structural(schema["additionalProperties"], definitions, nullable=nullable)
    if result.get("default") is None:
        result.pop("default", None)  # an optional part: absent is a value of its own
    else:
        result["default"] = _default(result)
        # An empty list, map or text in every stored object would say nothing.
        if result["default"] in ("", [], {}):
            del result["default"]
    return result


def _default(schema: dict[str, Any]) -> Any:
    if "properties" in schema:
        # In full, because the API server runs an object's rules on its default before it fills in the parts'.
        return {name: part["default"] for name, part in schema["properties"].items() if "default" in part}
    default = schema["default"]
    if isinstance(default, float) and schema.get("pattern") == DURATION_PATTERN:
        return format_duration(default)
    return default


def _inlined(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """References and `X or null` resolved; what stands beside them wins."""
    while True:
        if "$ref" in schema:
            target = definitions[schema["$ref"].rsplit("/", 1)[1]]
        elif "anyOf" in schema:
            target = next(part for part in schema["anyOf"] if part.get("type") != "null")
        else:
            return schema
        schema = {**target, **{key: value for key, value in schema.items() if key not in {"$ref", "anyOf"}}}


def to_yaml() -> str:
    """The file in `crds/`."""
    head = "# Generated by `python -m conch.api.crd`; edit operator/conch/api/ instead.\n"
    return head + str(yaml.safe_dump(custom_resource_definition(), sort_keys=False, width=120))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the CRD, or compare it with a file; 1 when the file is stale."""
    parser = argparse.ArgumentParser(description="Print the InferenceService's CRD.")
    parser.add_argument("--check", metavar="FILE", type=Path, help="compare with this file instead of printing")
    options = parser.parse_args(arguments)
    if options.check is None:
        sys.stdout.write(to_yaml())
        return 0
    if options.check.is_file() and options.check.read_text() == to_yaml():
        return 0
    sys.stderr.write(f"{options.check} is stale; run: python -m conch.api.crd > {options.check}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
