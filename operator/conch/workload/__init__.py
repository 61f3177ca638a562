"""InferenceService → Kubernetes objects, as plain data. Pure."""
