"""The ``fedtail`` command. Commands are thin: parse, call, print."""

from __future__ import annotations

import io
import json
import sys
import warnings
from typing import Any, NoReturn

import typer

from fedtail.cli.lazy import MARKUP, ClickException, LazyGroup
from fedtail.cli.progress import Stopped
from fedtail.errors import FedtailError
from fedtail.version import VERSION

app = typer.Typer(
    name="fedtail",
    cls=LazyGroup,
    help="Federated learning when the class that matters is rare.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=MARKUP,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point: bad input is one line and exit code 2; ``--debug`` anywhere shows the traceback."""
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    for stream in (sys.stdout, sys.stderr):  # print "?" for a "–" that the encoding lacks, not fail
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    warnings.showwarning = lambda message, *_, **__: typer.echo(f"warning: {message}", err=True)
    try:
        code = app([a for a in arguments if a != "--debug"], standalone_mode=False)
    except FedtailError as error:
        if debug:
            raise
        fail(str(error))
    except Stopped as stopped:
        typer.echo(f"stopped: {stopped}", err=True)
        sys.exit(130)
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    except ClickException as error:
        if message := once(error.format_message()):  # a bare group has printed its help and has nothing to add
            context: Any = getattr(error, "ctx", None)
            known = "Invalid value" in message or "Did you mean" in message or context is None
            fail(message if known else f"{message.rstrip('.')}; see: {context.command_path} --help")
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:
        from fedtail.registry import OWN, in_words  # which --help does without

        if debug or not (OWN or isinstance(error, OSError)):
            raise
        if OWN:
            fail(f"{in_words(error)} (with {', '.join(OWN.values())}); use --debug for the full traceback")
        fail(f"{getattr(error, 'filename', None) or 'a file'}: {getattr(error, 'strerror', None) or error}")
    if code == 130:  # what typer returns after Ctrl-C
        typer.echo("stopped", err=True)
    sys.exit(code if isinstance(code, int) else 0)


def fail(message: str) -> NoReturn:
    """Print an error as one line, and for ``--json`` also as an object, and exit with code 2."""
    typer.echo(f"error: {message}", err=True)
    if "--json" in sys.argv:
        typer.echo(json.dumps({"error": message}))
    sys.exit(2)


def once(message: str) -> str:
    """An error message with one "Did you mean": for an unknown command typer and click each append their own."""
    said, _, guess = message.partition(" Did you mean ")
    return f"{said} Did you mean {guess.partition(' Did you mean ')[0]}" if guess else message


@app.callback(invoke_without_command=True)
def version(show: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """Federated learning when the class that matters is rare."""
    if show:
        typer.echo(f"fedtail {VERSION}")
        raise typer.Exit


__all__ = ["app", "main"]
