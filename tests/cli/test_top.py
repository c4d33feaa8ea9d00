"""`kvpool top` in a real terminal: what it draws at each size, its keys, and what it leaves behind.

The terminal is a pseudo-terminal with a real process in it; the screen is rebuilt from its bytes.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool.cli.keyboard import keys_of
from tests.support.programs import ROOT, RunningPrograms, free_address


class RunningPool(RunningPrograms):
    """A master and servers, as processes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.master = free_address()
        self.start_master()

    def start_master(self) -> None:
        self.start_kvpool("master", "master", "--bind", self.master)
        host, port = self.master.split(":")
        for _ in range(300):
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
                return
            except OSError:
                time.sleep(0.1)

    def serve(self, name: str) -> None:
        which = ("--masters", self.master, "--id", name)
        self.start_kvpool(name, "server", *which, "--capacity", "8MiB")


class Terminal:
    """A process in a terminal of its own, and the screen that it draws."""

    def __init__(self, width: int, height: int, *words: str, **environment: str) -> None:
        self.width, self.height = width, height
        self.master, self.slave = pty.openpty()
        self.resize(width, height)
        self.settings = termios.tcgetattr(self.slave)
        clean = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvpool", "top", "--every", "200ms", *words],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**clean, "TERM": "xterm-256color", "LANG": "C.UTF-8", **environment},
            cwd=ROOT,
        )
        self.sent = b""

    def resize(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def read(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not select.select([self.master], [], [], left)[0]:
                return
            try:
                self.sent += os.read(self.master, 65536)
            except OSError:  # the process has ended
                return

    def screen(self) -> list[str]:
        """The last screen that was drawn as a whole: each begins at the top left corner."""
        drawn = re.split(rb"\x1b\[H", self.sent)[-1] if b"\x1b[H" in self.sent else b""
        plain = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", drawn).decode(errors="replace")
        return plain.replace("\r", "").split("\n")

    def until(self, condition: Callable[[list[str]], object], seconds: float = 30.0) -> list[str]:
        end = time.monotonic() + seconds
        while True:
            self.read(0.3)
            if condition(screen := self.screen()):
                return screen
            assert time.monotonic() < end, "\n".join(screen)
            assert self.process.poll() is None, self.sent[-2000:].decode(errors="replace")

    def ended(self) -> int:
        self.read(0.5)
        code = self.process.wait(timeout=20)
        self.read(0.2)
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPool]:
    running = RunningPool(tmp_path_factory.mktemp("top"))
    running.serve("alpha")
    running.serve("beta")
    yield running
    running.close()


@pytest.fixture
def opened() -> Iterator[Callable[..., Terminal]]:
    terminals: list[Terminal] = []

    def start(width: int, height: int, *words: str, **environment: str) -> Terminal:
        terminals.append(Terminal(width, height, *words, **environment))
        return terminals[-1]

    yield start
    for one in terminals:
        one.close()


def shows(*texts: str) -> Callable[[list[str]], bool]:
    return lambda screen: all(any(text in line for line in screen) for text in texts)


def test_it_fits_and_looks_into_a_server(
    pool: RunningPool, opened: Callable[..., Terminal]
) -> None:
    width, height = 40, 15
    terminal = opened(width, height, "--masters", pool.master)
    screen = terminal.until(shows("2 up", "> alpha", "  beta", "hit rate", "q"))
    assert len(screen) <= height
    assert all(len(line) <= width for line in screen), screen
    assert shows("░")(screen)
    assert b"\x1b[3" in terminal.sent, "no colour"
    terminal.press(b"\x1b[B")
    terminal.until(shows("  alpha", "> beta"))
    terminal.press(b"\r")
    inside = terminal.until(shows("beta  up", "dram", "victims"))
    assert len(inside) <= height
    assert all(len(line) <= width for line in inside), inside
    terminal.press(b"\x1b")
    terminal.until(shows("> beta"))
    terminal.press(b"r")
    terminal.until(lambda screen: "".join(screen).index("beta") < "".join(screen).index("alpha"))
    terminal.press(b"q")
    assert terminal.ended() == 0


def test_the_size_may_change(pool: RunningPool, opened: Callable[..., Terminal]) -> None:
    terminal = opened(80, 24, "--masters", pool.master, "--every", "1h")
    terminal.until(shows("2 up", "written"))
    terminal.resize(40, 15)
    terminal.process.send_signal(signal.SIGWINCH)
    terminal.until(shows("? keys"))
    assert all(len(line) <= 40 for line in terminal.screen())


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM", "--refreshes"])
def test_the_terminal_is_as_before(
    pool: RunningPool, opened: Callable[..., Terminal], how: str
) -> None:
    terminal = opened(
        80, 24, "--masters", pool.master, *(["--refreshes", "3"] if how == "--refreshes" else [])
    )
    if how != "--refreshes":
        terminal.until(shows("2 up"))
        assert termios.tcgetattr(terminal.slave)[3] != terminal.settings[3], "keys are not read"
    if how == "Ctrl-C":
        terminal.press(b"\x03")
    elif how == "SIGTERM":
        terminal.process.send_signal(signal.SIGTERM)
    assert terminal.ended() == 0
    assert termios.tcgetattr(terminal.slave) == terminal.settings
    assert terminal.sent.rindex(b"\x1b[?1049l") > terminal.sent.rindex(b"\x1b[?1049h"), "screen"
    assert terminal.sent.rindex(b"\x1b[?25h") > terminal.sent.rindex(b"\x1b[?25l"), "cursor"
    assert b"Traceback" not in terminal.sent


def test_there_is_no_colour_where_none_is_wanted(
    pool: RunningPool, opened: Callable[..., Terminal]
) -> None:
    terminal = opened(80, 24, "--masters", pool.master, NO_COLOR="1")
    terminal.until(shows("2 up", "> alpha"))
    assert not re.search(rb"\x1b\[(\d+;)*(3[0-7]|38|9[0-7])", terminal.sent)


def test_a_pipe_gets_lines_without_colours_and_a_screen_that_is_ascii_gets_ascii(
    pool: RunningPool,
) -> None:
    command = [sys.executable, "-m", "kvpool", "top", "--masters", pool.master]
    done = subprocess.run(
        [*command, "--refreshes", "2", "--every", "50ms"],
        capture_output=True,
        cwd=ROOT,
        timeout=60,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert b"\x1b" not in done.stdout
    assert done.stdout.count(b"alpha") == done.stdout.count(b"beta") == 2
    assert done.stdout.isascii()
    assert b"#" in done.stdout or b"........" in done.stdout


def test_without_any_master_it_says_so(opened: Callable[..., Terminal]) -> None:
    terminal = opened(80, 24, "--masters", free_address())
    assert terminal.ended() == 1
    assert termios.tcgetattr(terminal.slave) == terminal.settings


@pytest.mark.parametrize(
    ("pressed", "keys"),
    [
        (b"q", ["q"]),
        (b"\x1b[A\x1b[B", ["up", "down"]),
        (b"\x1bOA", ["up"]),
        (b"\x1b", ["escape"]),
        (b"\x1b[5~n", ["page up", "n"]),
        (b"\x1b[1;5Aq", ["q"]),  # Ctrl and an arrow: not known, and not five letters
        (b"\xff\x00\x1b[", []),
        (b"\r", ["enter"]),
        (b" ~\x7f", [" ", "~", "backspace"]),
    ],
)
def test_keys(pressed: bytes, keys: list[str]) -> None:
    assert list(keys_of(pressed)) == keys
