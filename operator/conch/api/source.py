"""Where a model comes from. Pure; a part of the InferenceService."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from conch.api.fields import Matches, Resource, Rule
from conch.api.shown import shown
from conch.api.text import HOST, PATH, SUBDOMAIN, field_matches, full_match

_DOTS: Final = r"(.*[/#])?[.][.]?(/.*)?"

_URL_PATH: Final = r"(/[A-Za-z0-9._~!$&'()*+,;=:@%-]+)+"
_HEX_DIGEST: Final = "sha256:[0-9a-f]{64}"
_REPOSITORY_PART: Final = "[a-z0-9]+((__|[._]|-+)[a-z0-9]+)*"

_SCHEME: Final = r"(s3|gs|https|oci|pvc|image)://.*"
_SCHEMES: Final = "use s3, gs, https, oci, pvc or image"
_DOWNLOADED: Final = r"(s3|gs|https|oci)://.*"
_STORE: Final = r"(s3|gs)://.*"
_PVC: Final = rf"pvc://{SUBDOMAIN}{PATH}"
_IMAGE: Final = rf"image://[a-zA-Z0-9][a-zA-Z0-9._:/@-]*#({PATH}|/)"
_HTTPS: Final = rf"https://{HOST}{_URL_PATH}"
_S3: Final = rf"s3://[a-z0-9][a-z0-9.-]{{1,61}}[a-z0-9]{_URL_PATH}/?"
_GS: Final = rf"gs://[a-z0-9][a-z0-9._-]{{1,220}}[a-z0-9]{_URL_PATH}/?"
_OCI: Final = (
    rf"oci://{HOST}(/{_REPOSITORY_PART})+(:[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}}(@{_HEX_DIGEST})?|@{_HEX_DIGEST})"
)
_PINNED: Final = rf"oci://.*@{_HEX_DIGEST}"

ObjectName = Annotated[
    str,
    Field(min_length=1, max_length=253),
    Matches(SUBDOMAIN, "must be a Kubernetes name: lower-case letters, digits, '-' and '.'"),
]


class SecretReference(Resource):
    """A Secret in the service's namespace."""

    name: ObjectName = Field(description="The Secret's name.")


class ConfigMapKey(Resource):
    """One key of a ConfigMap in the service's namespace."""

    name: ObjectName = Field(description="The ConfigMap's name.")
    key: Annotated[
        str,
        Field(min_length=1, max_length=253),
        Matches(
            r"[A-Za-z0-9_-][A-Za-z0-9._-]*",
            "must be a key of a ConfigMap: letters, digits, '-', '_' and '.', not beginning with '.'",
        ),
    ] = Field("ca.crt", description="The key that holds PEM certificates. Default: ca.crt.")


class Engine(Resource):
    """What a TensorRT engine was built with; it runs nowhere else."""

    tensor_rt: (
        Annotated[
            str,
            Field(max_length=32),
            Matches(r"[0-9]{1,3}([.][0-9]{1,5}){1,3}", "must be a TensorRT version such as 10.5 or 10.5.0.18"),
        ]
        | None
    ) = Field(None, alias="tensorRT", description="The TensorRT version that built it, such as 10.5. Default: unknown.")
    compute_capability: (
        Annotated[
            str,
            Field(max_length=8),
            Matches("[0-9]{1,3}[.][0-9]", "must be a compute capability such as 8.6"),
        ]
        | None
    ) = Field(None, description="The compute capability of the GPU that built it, such as 8.6. Default: unknown.")
    platform: Literal["linux/amd64", "linux/arm64"] | None = Field(
        None, description="The platform that built it: linux/amd64 or linux/arm64. Default: unknown."
    )
    version_compatible: bool = Field(
        False,
        description="True: it was built with TensorRT's version-compatible flag, so newer versions run it, given "
        "version-compatible: 'true' among the settings of the backend tensorrt in runtime.backends. Default: false.",
    )
    hardware_compatibility: Literal["None", "AmperePlus", "SameComputeCapability"] = Field(
        "None",
        description="TensorRT's hardware compatibility level that it was built with: AmperePlus runs on compute "
        "capability 8.0 and later, the others on the capability that built it. Default: None.",
    )


class ModelSource(Resource):
    """Where a model comes from."""

    rules = (
        Rule(
            "uri",
            field_matches("uri", _SCHEME),
            f"scheme is not supported; {_SCHEMES}",
            lambda source: full_match(_SCHEME, source.uri),
            lambda source: f"scheme {shown(source.uri.partition(':')[0])} is not supported; {_SCHEMES}",
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
            f"!self.uri.startsWith('s3://') || {field_matches('uri', _S3)}",
            "must be s3://BUCKET/KEY of an object or s3://BUCKET/PREFIX of several; the server is named by endpoint",
            lambda source: not source.uri.startswith("s3://") or full_match(_S3, source.uri),
        ),
        Rule(
            "uri",
            f"!self.uri.startsWith('gs://') || {field_matches('uri', _GS)}",
            "must be gs://BUCKET/NAME of an object or gs://BUCKET/PREFIX of several",
            lambda source: not source.uri.startswith("gs://") or full_match(_GS, source.uri),
        ),
        Rule(
            "uri",
            f"!self.uri.startsWith('oci://') || {field_matches('uri', _OCI)}",
            "must be oci://REGISTRY/REPOSITORY@sha256:HEX, or oci://REGISTRY/REPOSITORY:TAG with digest",
            lambda source: not source.uri.startswith("oci://") or full_match(_OCI, source.uri),
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
        Rule(
            "digest",
            f"!self.uri.startsWith('oci://') || has(self.digest) || {field_matches('uri', _PINNED)}",
            "is required for oci with a tag, which can be moved; add the manifest's digest, here or to the uri",
            lambda source: (
                not source.uri.startswith("oci://") or source.digest is not None or full_match(_PINNED, source.uri)
            ),
        ),
        Rule(
            "digest",
            f"!has(self.digest) || !{field_matches('uri', _PINNED)} || self.uri.endsWith('@' + self.digest)",
            "must be the one in the uri; remove one of them",
            lambda source: (
                source.digest is None or not full_match(_PINNED, source.uri) or source.uri.endswith(f"@{source.digest}")
            ),
        ),
        Rule(
            "secretRef",
            f"!has(self.secretRef) || {field_matches('uri', _DOWNLOADED)}",
            "is for s3, gs, https and oci; remove it (an image volume uses the ServiceAccount's pull secrets)",
            lambda source: source.secret_ref is None or full_match(_DOWNLOADED, source.uri),
        ),
        Rule(
            "identity",
            "!has(self.identity) || self.identity != 'ServiceAccount' || "
            f"({field_matches('uri', _STORE)} && !has(self.secretRef))",
            "ServiceAccount is for s3 and gs without secretRef; remove one of them",
            lambda source: (
                source.identity != "ServiceAccount" or (full_match(_STORE, source.uri) and source.secret_ref is None)
            ),
        ),
        Rule(
            "endpoint",
            f"!has(self.endpoint) || {field_matches('uri', _STORE)}",
            "is for s3 and gs; remove it, or write the host into the uri",
            lambda source: source.endpoint is None or full_match(_STORE, source.uri),
        ),
        Rule(
            "endpoint",
            "!has(self.endpoint) || !self.endpoint.startsWith('http://') || "
            "(has(self.digest) && (self.uri.startsWith('s3://') || !has(self.secretRef)) && "
            "(!has(self.identity) || self.identity != 'ServiceAccount'))",
            "without TLS needs a digest, and gets no gs key and no ServiceAccount's token; use https:// or add digest",
            lambda source: (
                source.endpoint is None
                or not source.endpoint.startswith("http://")
                or (
                    source.digest is not None
                    and (source.uri.startswith("s3://") or source.secret_ref is None)
                    and source.identity != "ServiceAccount"
                )
            ),
        ),
        Rule(
            "region",
            "!has(self.region) || self.uri.startsWith('s3://')",
            "is for s3; remove it",
            lambda source: source.region is None or source.uri.startswith("s3://"),
        ),
        Rule(
            "caRef",
            f"!has(self.caRef) || {field_matches('uri', _DOWNLOADED)}",
            "is for s3, gs, https and oci; remove it",
            lambda source: source.ca_ref is None or full_match(_DOWNLOADED, source.uri),
        ),
        Rule(
            "proxy",
            f"!has(self.proxy) || {field_matches('uri', _DOWNLOADED)}",
            "is for s3, gs, https and oci; remove it",
            lambda source: source.proxy is None or full_match(_DOWNLOADED, source.uri),
        ),
    )

    uri: str = Field(
        max_length=1024,
        description="Where the model is: s3://BUCKET/KEY or gs://BUCKET/KEY (an object, or everything below a prefix), "
        "https://HOST/PATH (a single file, with a digest), oci://REGISTRY/REPOSITORY@sha256:HEX (an OCI artifact; or "
        ":TAG with a digest), pvc://CLAIM/PATH, or image://REFERENCE#/PATH (an OCI image volume). A path names a model "
        "file, an archive of a model (.tar, .tar.gz, .tar.bz2, .tar.xz, .zip), a directory that holds the file, or a "
        "directory of numbered versions.",
    )
    digest: (
        Annotated[
            str,
            Field(max_length=80),
            Matches(_HEX_DIGEST, "must be sha256: and 64 lower-case hexadecimal digits, as sha256sum prints them"),
        ]
        | None
    ) = Field(
        None,
        description="sha256:HEX of the file (an archive as it is), of the tree as `conch digest` prints it, or of an "
        "OCI artifact's manifest. Verified before the model becomes visible to Triton. Required for https and for oci "
        "by tag; without it the model cache isn't used. Default: not verified.",
    )
    secret_ref: SecretReference | None = Field(
        None,
        description="A Secret with the credentials; only the init container sees it. s3: accessKeyId, secretAccessKey "
        "and maybe sessionToken (or AWS_ACCESS_KEY_ID and so on). gs: key.json of a service account. https: token, or "
        "username and password. oci: type kubernetes.io/dockerconfigjson, or username and password. Default: none.",
    )
    identity: Literal["Anonymous", "ServiceAccount"] = Field(
        "Anonymous",
        description="Whom the store sees without a secretRef. ServiceAccount: the cloud's identity of the pod's "
        "ServiceAccount (IRSA, workload identity), see runtime.serviceAccountName. Default: Anonymous.",
    )
    endpoint: (
        Annotated[
            str,
            Field(max_length=512),
            Matches(rf"https?://{HOST}", "must be https://HOST or https://HOST:PORT (http:// only with a digest)"),
        ]
        | None
    ) = Field(None, description="The server of an S3-compatible store, https://HOST:PORT. Default: the cloud's own.")
    region: (
        Annotated[
            str,
            Field(max_length=64),
            Matches("[a-z0-9]([a-z0-9-]*[a-z0-9])?", "must be a region such as eu-west-1"),
        ]
        | None
    ) = Field(None, description="The bucket's region. Default: us-east-1.")
    ca_ref: ConfigMapKey | None = Field(
        None, description="PEM certificates of authorities to trust for this source besides the usual ones."
    )
    proxy: (
        Annotated[str, Field(max_length=512), Matches(rf"http://{HOST}", "must be http://HOST:PORT of an HTTP proxy")]
        | None
    ) = Field(
        None,
        description="The HTTP proxy that leads to the source, http://HOST:PORT; TLS goes through it "
        "unopened. Default: none.",
    )
    engine: Engine | None = Field(
        None,
        description="What a TensorRT engine was built with, checked against the image and the nodes before a pod is "
        "made. Default: what a manifest beside the model says.",
    )
