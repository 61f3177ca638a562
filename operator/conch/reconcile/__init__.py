"""From a key to its objects and its status."""
