"""The deletion test: a ring is a mechanism that the kernel works without.

A copy of the product lacks the ring's files and its lines in the tables of extensions, and nothing
else is changed. Then the kernel's tests pass, and a pool writes, matches and reads.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Set
from pathlib import Path

import pytest

from tests.repo.test_budgets import PRODUCT, RINGS, files_of, module_of
from tests.repo.test_house import ROOT

#: Where a ring says that it is there.
TABLES = (
    "kvpool/guard.py",
    "kvpool/client/block_transfers.py",
    "kvpool/client/buffers.py",
    "kvpool/client/extension.py",
    "kvpool/client/opening.py",
    "kvpool/server/extension.py",
    "kvpool/server/tiers.py",
    "kvpool/server/eviction/order.py",
    "kvpool/server/state/store.py",
    "kvpool/master/extension.py",
    "kvpool/master/service.py",
    "kvpool/master/state/directory.py",
    "transports/kvpool_transports/shm.py",
)
#: What stands upon a ring goes with it.
UPON = {
    "files": ("identity", "secrets", "tenancy", "tls"),
    "gpu": ("ucx",),
    "heaps": ("sessions", "tiers", "prefetch", "cold"),
    "moves": ("prefetch",),
    "namespaces": ("demand", "events", "questions", "removal"),
    "operators": ("admin", "moves", "prefetch", "removal"),
    "questions": ("demand", "removal"),
    "secrets": ("tenancy",),
    "threads": ("cold", "clearing", "gpu", "moves", "prefetch", "tenancy", "tiers", "tls", "ucx"),
    "tiers": ("prefetch", "cold"),
}
#: The tests look at a pool by it, so it is deleted alone, and what it stands upon with it.
INSTRUMENT = {"admin", "dev", "namespaces", "operators", "questions"}
KERNEL_TESTS = ("tests/client/test_pool.py", "tests/client/test_reader.py")
WHAT_THEY_NEED = tuple(
    f"tests/{one}.py" for one in ("__init__", "conftest", "client/__init__", "client/conftest")
)

#: Another program runs in each, on a machine with other work.
pytestmark = pytest.mark.timeout(300)

PLAY = """
import asyncio, kvpool, kvpool.cli.app, kvpool.testing
from kvpool import ClientConfig, Namespace, dev
async def main():
    space, chain = Namespace("a"), [bytes([number]) * 32 for number in range(4)]
    async with dev.serve("4MiB") as served:
        for scheme in ("inproc", "tcp", "shm"):
            config = ClientConfig(masters=[served.address], transports=[scheme])
            async with served.pool(config) as pool:
                await pool.write(space, chain, [digest * 2048 for digest in chain])
                match = await pool.match(space, chain)
                into = [bytearray(65536) for _ in chain]
                await pool.read(space, chain, into, match=match)
                assert into == [digest * 2048 for digest in chain], scheme
asyncio.run(main())
"""
#: What is left without the ring that the play stands upon.
PROGRAMS = "import kvpool.cli.run, kvpool.client.opening, kvpool.server.block_server"


def copy_without(rings: Iterable[str], into: Path, *more: str) -> dict[str, str]:
    """The product without the files of these rings; the environment in which it runs. Files and
    folders that are as they were are links, since copies of all would take most of the time."""
    gone = set(files_of(*(pattern for ring in rings for pattern in RINGS[ring])))
    names = set(map(module_of, gone))
    touched = {*gone, *(ROOT / table for table in TABLES)}
    within = touched.union(*(path.parents for path in touched))
    for part in PRODUCT:
        _link(ROOT / part, into, within, gone)
    for file in ("pyproject.toml", *more):
        (into / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, into / file)
    for table in TABLES:
        rows = (ROOT / table).read_text().splitlines(keepends=True)
        kept = [row for row in rows if (named := re.search(r'"([\w.]+):\w+"', row)) is None
                or named[1] not in names]  # fmt: skip
        (into / table).unlink()
        (into / table).write_text("".join(kept))
    paths = [into, *(into / part for part in PRODUCT[1:])]
    # What is compiled of a table must not go through a link to that of the product.
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip


def _link(path: Path, into: Path, within: Set[Path], gone: Set[Path]) -> None:
    """Place a file or a folder: a folder in which something is touched is made anew."""
    if path.is_dir() and path in within:
        (into / path.name).mkdir()
        for one in path.iterdir():
            _link(one, into / path.name, within, gone)
    elif path not in gone:
        (into / path.name).symlink_to(path)


def run(folder: Path, environment: dict[str, str], *arguments: str) -> str:
    """What Python said, if it failed."""
    command = [sys.executable, *arguments]
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    return ended.stdout + ended.stderr if ended.returncode else ""


def test_the_kernel_s_tests_pass_without_any_ring(tmp_path: Path) -> None:
    tests = (*WHAT_THEY_NEED, *KERNEL_TESTS)
    environment = copy_without(RINGS.keys() - INSTRUMENT, tmp_path, *tests)
    options = ("-n0", "-q", "-p", "no:cacheprovider", "-k", "not inproc and not shm and not ucx")
    assert not run(tmp_path, environment, "-m", "pytest", *options, *KERNEL_TESTS)


@pytest.mark.parametrize("process", ["master", "server"])
@pytest.mark.parametrize("ring", ["tenancy", "secrets"])
def test_a_program_refuses_files_of_a_ring_that_it_lacks(
    process: str, ring: str, tmp_path: Path
) -> None:
    """It would serve everybody's blocks to everybody."""
    environment = copy_without([ring, *UPON.get(ring, ())], tmp_path)
    (tmp_path / "tenants.yaml").write_text("tenants: []")
    (tmp_path / "secret").write_text("0123456789abcdef-cluster")
    (tmp_path / "secret").chmod(0o600)
    tenants = ("--tenants", "tenants.yaml") if ring == "tenancy" else ()
    files = (*tenants, "--secret-file", "secret")
    said = run(tmp_path, environment, "-m", "kvpool", process, *files)
    lack = "tenants (setting tenants_file)" if tenants else "secrets (setting secret_file)"
    assert f"this program runs without {lack}" in said
    assert "Traceback" not in said


def test_without_secrets_only_who_asks_for_one_is_refused(tmp_path: Path) -> None:
    environment = copy_without(["secrets", *UPON["secrets"]], tmp_path)
    kvpool, up = ("-m", "kvpool"), ("up", "--dry", "--capacity", "16MiB")
    assert not run(tmp_path, environment, *kvpool, *up)
    engine = "import kvpool.ops.doctor; from kvpool_engines import settings"
    assert not run(tmp_path, environment, "-c", f"{engine}; settings.PoolSettings().member()")
    said = run(
        tmp_path, environment, "-c", f"{engine}; settings.PoolSettings(secret_file='a').member()"
    )
    assert said.endswith("ConfigError: this program runs without secrets (setting secret_file)\n")
    for command in (("master", "--bind", "127.0.0.1:0"), up):
        said = run(tmp_path, environment, *kvpool, *command, "--local-only")
        assert "this program runs without secrets" in said
        assert "Traceback" not in said


@pytest.mark.parametrize("ring", RINGS)
def test_a_pool_works_without(ring: str, tmp_path: Path) -> None:
    environment = copy_without([ring, *UPON.get(ring, ())], tmp_path)
    assert not run(tmp_path, environment, "-c", PROGRAMS if ring == "dev" else PLAY)


@pytest.mark.parametrize("ring", ["tiers", "everywhere", "paths"])
def test_a_server_refuses_what_it_would_not_do(ring: str, tmp_path: Path) -> None:
    """It would keep none of what it is told to keep, or not be found."""
    environment = copy_without([ring, *UPON.get(ring, ())], tmp_path)
    asked = {"tiers": "--tier dram:1MiB --tier dram:2MiB", "everywhere": "--announce 10.0.0.1"}
    words = asked.get(ring, "--listen shm:///a").split()
    said = run(tmp_path, environment, "-m", "kvpool", "server", *words)
    assert "this program " in said
    assert "Traceback" not in said
