"""`python -m sandbox`: see cli.py."""

from sandbox.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
