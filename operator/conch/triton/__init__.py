"""All knowledge about one Triton server."""
