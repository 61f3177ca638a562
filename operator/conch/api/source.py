"""Where a model comes from. Pure; a part of the InferenceService."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from conch.api.fields import Matches, Resource, Rule
from conch.api.shown import shown
from conch.api.text import HOST, PATH, SUBDOMAIN, field_matches, full_match

_DOTS: Final = r"(.*[/#])?[.][.]?(/.*)?"

_SCHEME: Final = r"(https|pvc|image)://.*"
_PVC: Final = rf"pvc://{SUBDOMAIN}{PATH}"
_IMAGE: Final = rf"image://[a-zA-Z0-9][a-zA-Z0-9._:/@-]*#({PATH}|/)"
_HTTPS: Final = rf"https://{HOST}(/[A-Za-z0-9._~!$&'()*+,;=:@%-]+)+"


class ModelSource(Resource):
    """Where a model comes from."""

    rules = (
        Rule(
            "uri",
            field_matches("uri", _SCHEME),
            "scheme is not supported; use https, pvc or image",
            lambda source: full_match(_SCHEME, source.uri),
            lambda source: f"scheme {shown(source.uri.partition(':')[0])} is not supported; use https, pvc or image",
        ),
        Rule(
            "uri",
            f"!self.uri.startsWith('pvc://') || {field_matches('uri', _PVC)}",
            "must be pvc://CLAIM/PATH: the claim's name, then a path of letters, digits and . _ + = @ ~ , -",
            lambda source: not source.uri.startswith("pvc://") or full_match(_PVC, source.uri),
        ),
        Rule(
            "uri",
            f"!self.uri.startsWith('image://') || {field_matches('uri', _IMAGE)}",
            "must be image://REFERENCE#/PATH: an image reference, then the model's absolute path in the image",
            lambda source: not source.uri.startswith("image://") or full_match(_IMAGE, source.uri),
        ),
        Rule(
            "uri",
            f"!self.uri.startsWith('https://') || {field_matches('uri', _HTTPS)}",
            "must be https://HOST/PATH or https://HOST:PORT/PATH of a single file, without user, password, query or "
            "fragment",
            lambda source: not source.uri.startswith("https://") or full_match(_HTTPS, source.uri),
        ),
        Rule(
            "uri",
            f"!{field_matches('uri', _DOTS)}",
            "must not hold '.' or '..' as a part of the path; write the path that is meant",
            lambda source: not full_match(_DOTS, source.uri),
        ),
        Rule(
            "digest",
            "!self.uri.startsWith('https://') || has(self.digest)",
            "is required for https; add digest: sha256:HEX, which sha256sum prints for the file",
            lambda source: not source.uri.startswith("https://") or source.digest is not None,
        ),
    )

    uri: str = Field(
        max_length=1024,
        description="Where the model is: pvc://CLAIM/PATH, image://REFERENCE#/PATH (an OCI image volume) or "
        "https://HOST/PATH (a single file, with a digest). A path names a model file, a directory that holds it, or a "
        "directory of numbered versions.",
    )
    digest: (
        Annotated[
            str,
            Field(max_length=80),
            Matches(
                "sha256:[0-9a-f]{64}", "must be sha256: and 64 lower-case hexadecimal digits, as sha256sum prints them"
            ),
        ]
        | None
    ) = Field(
        None,
        description="sha256:HEX of the file, or of the tree as `conch fetch` defines it. Verified before the model "
        "becomes visible to Triton. Required for https. Default: not verified.",
    )
