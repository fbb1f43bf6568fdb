"""The command line: one small file a verb. Bad input ends in one line on standard error and exit code 2."""

import os
import sys
from typing import NoReturn

import typer

from autonl.cli.models import models
from autonl.cli.profile import profile
from autonl.errors import AutoNLError
from autonl.version import __version__

# click's, which newer releases of typer carry inside themselves
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="autonl",
    help="Efficient vision networks that know where non-local context pays.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(models)
app.command()(profile)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autonl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> NoReturn:
    try:
        status = app(standalone_mode=False)
    except AutoNLError as error:
        _fail(str(error))
    except UsageError as error:
        _fail(f"{error}; see --help")
    except typer.Abort:  # Ctrl-C
        sys.exit(130)
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str) -> NoReturn:
    print("autonl: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)
