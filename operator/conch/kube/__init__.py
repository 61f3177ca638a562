"""Everything that talks to the Kubernetes API."""
