"""The command `conch`. Each command imports what it needs when it runs: the init container must start quickly."""

import typer

from conch.cli.digest import digest
from conch.cli.fetch import fetch
from conch.cli.importing import import_repository
from conch.cli.render import render
from conch.cli.run import run
from conch.cli.validate import validate

_WORKSTATION = "On your machine and in CI (no cluster needed)"
_CLUSTER = "In the cluster"

app = typer.Typer(name="conch", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command(rich_help_panel=_WORKSTATION)(validate)
app.command(rich_help_panel=_WORKSTATION)(render)
app.command("import", rich_help_panel=_WORKSTATION)(import_repository)
app.command(rich_help_panel=_WORKSTATION)(digest)
app.command(rich_help_panel=_CLUSTER)(run)
app.command(rich_help_panel=_CLUSTER)(fetch)


@app.callback()
def _conch() -> None:
    """Inference on NVIDIA Triton, kept answering."""


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
