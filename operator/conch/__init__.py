"""Conch: a Kubernetes operator for inference on NVIDIA Triton."""
