"""Files that say too much: a configuration, a list of tenants, a trace."""

from __future__ import annotations

import gzip
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attack.castle import ATTACK_S, MIB
from tests.conftest import patient

#: What a command may take to say that a file is wrong, its start included.
SAID_S, MEMORY = 6.0, 200 * MIB

#: Twelve levels of ten: a tenth of a kilobyte that stands for a terabyte.
LAUGHS = "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10 if before else ['lol'] * 10)}]\n"
    for before, name in zip([None, *"abcdefghijk"], "abcdefghijkl", strict=True)
)
CONFIGS = {
    "aliases of aliases": LAUGHS,
    "aliases as a value": "cluster:\n" + "".join(f"  {one}\n" for one in LAUGHS.splitlines()),
    "aliases in a list": "client:\n  masters:\n"
    + "".join(f"  - {one.partition(': ')[2]}\n" for one in LAUGHS.splitlines()),
    "a section that holds itself": "server: &s {id: *s, listen: [*s]}\n",
    "a long key": "k" * 1_000_000 + ": 1\n",
    "a long list": "a: [" + "a: b," * 12_000 + "]\n",
    "a number to the base of 60": "a: " + "59:" * 20_000 + "1\n",
    "brackets that stay open": "[" * 60_000,
    "deep": "{a: " * 5_000 + "}" * 5_000,
}


def zeros(path: Path) -> None:
    """A quarter of a megabyte that unpacks to 256 MiB without an end of a line."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(256):
            file.write(bytes(MIB))


def many_ids(path: Path) -> None:
    path.write_text('{"timestamp": 1, "hash_ids": [' + "1," * 2_000_000 + "1]}")


def many_lines(path: Path) -> None:
    path.write_text('{"timestamp": 1e300, "hash_ids": [1]}\n' * 300_000)


TRACES: list[Callable[[Path], None]] = [zeros, many_ids, many_lines]


#: Runs a command and prints the bytes that it had at most: of this small process a child inherits
#: no more than a few MiB, of that of a test whatever the suite has loaded.
MEASURED = """
import resource, subprocess, sys
ended = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, timeout=20)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10)
sys.exit(ended.returncode)
"""


def refused(*words: str) -> tuple[float, int, str]:
    """Run a command that must refuse; seconds, bytes of memory at most, what it said."""
    began = time.perf_counter()
    command = [sys.executable, "-c", MEASURED, sys.executable, "-m", "kvpool", *words]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr[:1000]
    return time.perf_counter() - began, int(ended.stdout), ended.stderr


def check(seconds: float, memory: int, said: str) -> None:

    assert "Traceback" not in said
    assert said.startswith("error: ")
    assert len(said) < 1000, said[:1000]
    assert seconds < patient(SAID_S)
    assert memory < MEMORY


@pytest.mark.parametrize(
    "name", CONFIGS if ATTACK_S > 1 else ["aliases as a value", "brackets that stay open"]
)
def test_a_configuration_that_says_too_much_is_a_sentence(tmp_path: Path, name: str) -> None:
    path = tmp_path / "kvpool.yaml"
    path.write_text(CONFIGS[name])
    check(*refused("master", "--config", str(path)))


@pytest.mark.parametrize("entry", ["- name:\n", "- rate:\n"] if ATTACK_S > 1 else ["- name:\n"])
def test_a_list_of_tenants_that_says_too_much_is_a_sentence(tmp_path: Path, entry: str) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef-cluster")
    (tmp_path / "secret").chmod(0o600)
    path = tmp_path / "tenants.yaml"
    lines = (f"  - {one.partition(': ')[2]}\n" for one in LAUGHS.splitlines())
    path.write_text(f"tenants:\n{entry}{''.join(lines)}")
    secret = ("--secret-file", str(tmp_path / "secret"))
    check(*refused("master", "--bind", "127.0.0.1:0", *secret, "--tenants", str(path)))


@pytest.mark.parametrize("make", TRACES if ATTACK_S > 1 else [zeros])
def test_a_trace_that_says_too_much_is_a_sentence(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "trace")
    check(*refused("replay", "--dry", str(tmp_path / "trace")))
