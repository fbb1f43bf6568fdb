"""The command line: one small file a verb. Bad input ends in one line on standard error and exit code 2."""

import io
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

import typer

from autonl.cli.cam import cam
from autonl.cli.evaluate import evaluate
from autonl.cli.export import export
from autonl.cli.measure import measure
from autonl.cli.models import models
from autonl.cli.profile import profile
from autonl.cli.report import report
from autonl.cli.search import search
from autonl.cli.segment import segment
from autonl.cli.train import train
from autonl.errors import AutoNLError
from autonl.version import __version__

# click's, which newer releases of typer carry inside themselves
UsageError: Any = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="autonl",
    help="Efficient vision networks that know where non-local context pays.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(models)
app.command()(profile)
app.command()(train)
app.command()(evaluate)
app.command()(search)
app.command()(export)
app.command()(measure)
app.command()(segment)
app.command()(report)
app.command()(cam)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autonl {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a character shows its number
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGTERM, _leave)
    try:
        status = app(standalone_mode=False)
    except AutoNLError as error:
        _fail(str(error))
    except UsageError as error:
        _fail(f"{error.format_message()}; see --help")
    except typer.Abort:  # Ctrl-C
        sys.exit(130)
    except OSError as error:  # a full disk, say, behind standard output
        _fail(f"{error.filename or 'output'}: {error.strerror}")
    sys.exit(status if isinstance(status, int) else 0)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """As by Ctrl-C: what was begun is taken away again. Between two steps of a training it is the loop that answers."""
    sys.exit(128 + number)


def _fail(message: str) -> NoReturn:
    print("autonl: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)
