"""How a source is reached over https: whom to trust, which proxy leads there. Reads PEM files."""

import ssl
from pathlib import Path

import urllib3

from conch.storage.errors import PlanInvalidError, SourceRefusedError
from conch.storage.plan import PlannedModel

_CONNECTIONS_MAX = 8


def pool_for(model: PlannedModel, ca_file: Path | None) -> urllib3.PoolManager:
    """The connections of one source. `ca_file` is trusted by every source, the model's own authority by this one only.

    Raises PlanInvalidError for a `ca_file` and SourceRefusedError for an authority that can't be read.
    """
    trust = ssl.create_default_context()
    if ca_file is not None:
        try:
            trust.load_verify_locations(ca_file)
        except OSError as error:
            raise PlanInvalidError(
                f"--ca-file {ca_file} can't be used ({error.strerror or error})", "give a PEM file of certificates"
            ) from error
    authority = authority_of(model)
    if authority is not None:
        trust.load_verify_locations(cadata=authority)
    if model.proxy is None:
        return urllib3.PoolManager(ssl_context=trust, maxsize=_CONNECTIONS_MAX)
    return urllib3.ProxyManager(model.proxy, ssl_context=trust, maxsize=_CONNECTIONS_MAX)


def authority_of(model: PlannedModel) -> str | None:
    """The PEM text of the model's own authorities. Raises SourceRefusedError."""
    if model.ca is None:
        return None
    try:
        text = Path(model.ca).read_text(encoding="ascii")
        ssl.create_default_context(cadata=text)
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else "no PEM certificates"
        raise SourceRefusedError(
            f"the authorities in {model.ca} can't be used ({cause})",
            f"put PEM certificates into the ConfigMap of {model.at('source.caRef')}",
        ) from error
    return text
