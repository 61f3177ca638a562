"""The command `conch`. Each command imports what it needs when it runs: the init container must start quickly."""

import typer

from conch.cli.fetch import fetch
from conch.cli.run import run

app = typer.Typer(name="conch", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(fetch)
app.command()(run)


@app.callback()
def _conch() -> None:
    """Inference on NVIDIA Triton, kept answering."""


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
