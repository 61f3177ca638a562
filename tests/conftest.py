"""Settings of all tests."""

from hypothesis import settings

# How long an example takes says nothing of whether it is right, and a busy machine would fail it.
settings.register_profile("conch", deadline=None)
settings.load_profile("conch")
