"""The custom resources: pydantic models are the source of the CRDs. Pure."""
