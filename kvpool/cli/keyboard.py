"""Keys from a terminal, one at a time, on the event loop; afterwards the terminal is as before."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

#: What terminals send for keys without a character.
_SEQUENCES: Final = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1bOC": "right",
    b"\x1bOD": "left",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b": "escape",
    b"\r": "enter",
    b"\n": "enter",
    b"\x7f": "backspace",
}
_READ_MAX: Final = 1024
#: In what `termios.tcgetattr` returns.
_CHARACTERS: Final = 6


def keys_of(pressed: bytes) -> Iterator[str]:
    """The keys in what a terminal has sent; sequences that are not known are left out."""
    while pressed:
        length = 1
        if pressed[:2] in (b"\x1b[", b"\x1bO"):
            length = 3
            while length < len(pressed) and not 0x40 <= pressed[length - 1] <= 0x7E:
                length += 1
        key, pressed = pressed[:length], pressed[length:]
        if key in _SEQUENCES:
            yield _SEQUENCES[key]
        elif len(key) == 1 and 0x20 <= key[0] < 0x7F:
            yield key.decode()


@contextmanager
def keyboard(on_key: Callable[[str], None]) -> Iterator[None]:
    """Call `on_key` for each key, until the `with` ends, however it ends.

    Without a terminal, or in the background of one, there are no keys. Ctrl-C stays a signal;
    Ctrl-Z is no key, for a stopped process would leave the screen as it is.
    """
    try:
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
        there = os.tcgetpgrp(terminal) == os.getpgrp()
    except (OSError, ValueError, termios.error):
        there = False
    if not there:
        yield
        return
    loop = asyncio.get_running_loop()

    def ready() -> None:
        try:
            pressed = os.read(terminal, _READ_MAX)
        except BlockingIOError:
            return
        except OSError:  # the terminal has gone
            pressed = b""
        if not pressed:
            loop.remove_reader(terminal)
        for key in keys_of(pressed):
            on_key(key)

    # In the background by then (fg, bg) it may still be set back, instead of being stopped.
    stops = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        tty.setcbreak(terminal)
        changed = termios.tcgetattr(terminal)
        changed[_CHARACTERS][termios.VSUSP] = b"\0"
        termios.tcsetattr(terminal, termios.TCSADRAIN, changed)
        loop.add_reader(terminal, ready)
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSAFLUSH, before)
        signal.signal(signal.SIGTTOU, stops)
