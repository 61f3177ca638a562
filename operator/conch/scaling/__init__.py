"""How many replicas: signals, decision, and the one writer of replicas."""
