"""The `kvpool` command: every subcommand, and `kvpool --version`.

Thin: a command reads settings, calls the library and prints. With --json it prints one JSON
document on stdout and nothing else. Exit codes: 0 success, 1 failure, 2 usage error.

Commands import what they run inside themselves, so that `kvpool --help` stays fast.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from kvpool import __version__
from kvpool.cli import (
    config,
    events,
    inspect,
    leave,
    measure,
    prefetch,
    remove,
    run,
    spread,
    tenant,
    top,
    up,
    usage,
)
from kvpool.cli.standard_streams import open_standard_streams

app = typer.Typer(
    name="kvpool",
    help="KV-cache pool for LLM inference with code that people can read. "
    "Exit codes: 0 success, 1 failure, 2 usage error.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _paragraphs(text: str) -> str:
    """Without line ends inside: a terminal breaks lines at its own width."""
    return "\n\n".join(" ".join(one.split()) for one in text.split("\n\n"))


class _Command(TyperCommand):
    """One whose help is cut nowhere: in a narrow terminal it is text without frames."""

    def get_help(self, ctx: Any) -> str:
        if shutil.get_terminal_size().columns < _FRAMED_MIN:
            self.rich_markup_mode = None
        return super().get_help(ctx)


#: Columns of a terminal: with fewer, frames and three columns leave no room for an address.
_FRAMED_MIN: Final = 80

for command in (
    run.dev,
    up.up,
    run.master,
    run.server,
    inspect.status,
    top.top,
    usage.usage,
    inspect.explain,
    inspect.doctor,
    config.config,
    leave.drain,
    remove.remove,
    spread.spread,
    prefetch.prefetch,
    events.events,
    measure.replay,
    measure.bench,
    tenant.secret,
    tenant.tenant_key,
):
    app.command(cls=_Command, help=_paragraphs(command.__doc__ or ""))(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvpool {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options before the command."""


#: A file cannot be written, whatever the program does: mostly what stdout was sent to.
_CANNOT_WRITE: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def _output_fails() -> bool:
    """One byte more fails, too. (What could not be written may be in no buffer any more.)"""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return True
    return False


def main() -> None:
    """The console script. SIGTERM ends it as a default does, also where it is process 1."""
    open_standard_streams()
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:  # before a command has begun, which would say so itself
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        if error.errno not in {errno.EPIPE, *_CANNOT_WRITE}:
            raise
        if error.errno != errno.EPIPE and (error.filename or not _output_fails()):
            sys.exit(f"error: {error.filename or 'a file cannot be written'}: {error.strerror}")
        # What is still buffered would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            print(f"error: cannot write the output: {error.strerror}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
