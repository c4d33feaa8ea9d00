"""The command top: a pool on the screen, drawn anew as often as it changes."""

from __future__ import annotations

import itertools
import signal
import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvpool.cli.shared import (
    FOR_OPERATORS,
    QUERY_S,
    ClusterName,
    ConfigFile,
    LocalOnly,
    Masters,
    SecretFile,
    console,
    open_pool,
    parsed,
    query_settings,
    run,
)
from kvpool.config import cluster_of
from kvpool.errors import ConfigError, KvpoolError, Unavailable
from kvpool.ops import process
from kvpool.units import parse_duration

if TYPE_CHECKING:
    from rich.text import Text

    from kvpool.client.pool import Pool
    from kvpool.config import Config
    from kvpool.ops.top import Top


def top(
    config: ConfigFile = None,
    masters: Masters = None,
    every: Annotated[str, typer.Option(help="Refresh interval, e.g. 500ms.")] = "1s",
    refreshes: Annotated[
        int,
        typer.Option(
            "--refreshes", "--looks", min=0, help="Number of refreshes; 0 means until q or Ctrl-C."
        ),
    ] = 0,
    cluster: ClusterName = None,
    secret_file: SecretFile = None,
    local_only: LocalOnly = False,
) -> None:
    """Show a pool live: memory, hit rate, traffic, and each server.

    Keys: arrows select a server, enter looks at it, s sorts, ? shows all keys, q quits. Without a
    terminal the same is printed at each refresh. NO_COLOR=1 leaves colours out.
    """
    settings = query_settings(config, masters, cluster, secret_file, local_only)

    async def main() -> None:
        await process.until_stopped(_watch(settings, _pause_of(every), refreshes))

    run(main(), "error")  # the view shows when no master answers; a log line would spoil it


def _pause_of(every: str) -> float:
    """Seconds. Raises ConfigError for none: it would ask masters without a pause."""
    pause_s = parsed("--every", parse_duration, every)
    if not pause_s:
        raise ConfigError(f"--every {every}: expected some time, e.g. 500ms")
    return pause_s


async def _watch(settings: Config, pause_s: float, refreshes: int) -> None:
    import asyncio

    from kvpool.ops.top import Top

    view = Top(FOR_OPERATORS if cluster_of(settings).tenant else "")
    async with await open_pool(settings) as pool:
        if console.is_terminal and not console.is_dumb_terminal:
            await _on_screen(pool, view, pause_s, refreshes)
            return
        for count in itertools.count(1):
            await _look(pool, view)
            for line in _lines(view, console.width, None):
                console.print(line)
            if count == refreshes:
                return
            console.print()
            await asyncio.sleep(pause_s)


async def _look(pool: Pool, view: Top) -> None:
    """Ask for what is there; when no master answers, the view says so."""
    from kvpool.client.admin import admin

    try:
        members = await pool.members(timeout=QUERY_S)
        try:
            demand = await admin(pool).demand(timeout=QUERY_S)
        except KvpoolError:  # of a tenant
            demand = None
        view.seen(time.monotonic(), members, demand)
    except Unavailable as error:  # the master may be restarting: try again
        view.lost(time.monotonic(), time.strftime("%H:%M:%S"), str(error))


async def _on_screen(pool: Pool, view: Top, pause_s: float, refreshes: int) -> None:
    """Draw after each look, key and change of the size. The screen is as before at the end."""
    import asyncio

    from rich.console import Group
    from rich.live import Live

    from kvpool.cli.keyboard import keyboard

    changed = asyncio.Event()

    def pressed(key: str) -> None:
        view.press(key)
        changed.set()

    async def look_again_and_again() -> None:
        try:
            for count in itertools.count(1):
                await _look(pool, view)
                changed.set()
                if count == refreshes:
                    return
                await asyncio.sleep(pause_s)
        finally:
            changed.set()

    loop = asyncio.get_running_loop()
    looking = loop.create_task(look_again_and_again())
    loop.add_signal_handler(signal.SIGWINCH, changed.set)
    try:
        with keyboard(pressed), Live(console=console, auto_refresh=False, screen=True) as live:
            while not view.quit and not looking.done():
                live.update(Group(*_lines(view, console.width, console.height)), refresh=True)
                await changed.wait()
                changed.clear()
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
        looking.cancel()
        await asyncio.wait([looking])
    if not looking.cancelled():
        looking.result()


def _lines(view: Top, width: int, height: int | None) -> list[Text]:
    ascii_only = console.options.ascii_only
    return view.lines(time.monotonic(), width, height, ascii_only=ascii_only)
