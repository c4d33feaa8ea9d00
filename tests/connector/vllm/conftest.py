"""Real vLLM engines: `make test WITH=vllm` runs these, in a virtual environment of their own.

An engine takes 15 seconds to start, so most tests share two: `plain` has no pool, `reader` has one.
`Engine.forget` makes the reader's own cache as empty as that of a new process.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("vllm") is None:
    collect_ignore_glob = ["*"]
else:
    from examples import tiny_model
    from kvpool_engines import whole_files
    from tests.connector.vllm.engine import ENVIRONMENT
    from tests.connector.vllm.helpers import (
        Engine,
        Logs,
        Models,
        Processes,
        Running,
        closing,
        transfer,
    )
    from tests.connector.vllm.played import Play, Played
    from tests.support.local_pool import LocalPool

    os.environ["VLLM_USE_AOT_COMPILE"] = ENVIRONMENT["VLLM_USE_AOT_COMPILE"]


@pytest.fixture(scope="session")
def model(request: pytest.FixtureRequest) -> Models:
    """The directory of a tiny model, by architecture; made once and kept."""
    assert request.config.cache is not None
    folder = request.config.cache.mkdir("kvpool-models")

    def make(kind: str = "qwen3", **options: int) -> Path:
        name = "-".join([kind, *(f"{key}{value}" for key, value in options.items())])
        if not (folder / name).exists():
            with tempfile.TemporaryDirectory(dir=folder) as fresh:
                whole = tiny_model.make(Path(fresh) / name, kind, **options)
                with contextlib.suppress(OSError):  # another process of pytest was first
                    os.rename(whole, folder / name)
        whole_files.read(str(folder / name))  # so that its engines share from the beginning
        return folder / name

    return make


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Logs:
    folder = tmp_path_factory.mktemp("engines")
    return lambda name: folder / f"{name}.log"


@pytest.fixture(scope="session")
def shared_pool() -> Iterator[LocalPool]:
    pool = LocalPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def running(logs: Logs) -> Iterator[Running]:
    """A context with an engine of this test alone: of a model, with these arguments."""
    processes = Processes(logs)
    yield processes.run
    processes.close()


@pytest.fixture(scope="session")
def engines(model: Models, logs: Logs, shared_pool: LocalPool) -> Iterator[tuple[Engine, Engine]]:
    plain = Engine(model(), logs("plain"))
    reader = Engine(
        model(), logs("reader"), kv_transfer_config=transfer(shared_pool.master, transports=["tcp"])
    )
    with closing(plain, reader):
        yield plain, reader


@pytest.fixture
def plain(engines: tuple[Engine, Engine]) -> Engine:
    """An engine without a pool, its cache empty."""
    engines[0].forget()
    return engines[0]


@pytest.fixture
def reader(engines: tuple[Engine, Engine]) -> Engine:
    """An engine with a pool over tcp, its own cache empty."""
    engines[1].forget()
    return engines[1]


@pytest.fixture
def pool() -> Iterator[LocalPool]:
    """A pool of this test alone."""
    pool = LocalPool()
    yield pool
    pool.close()


@pytest.fixture
def play(pool: LocalPool, model: Models) -> Iterator[Play]:
    """Makes schedulers of vLLM's on it."""
    with contextlib.ExitStack() as stack:

        def make(config: dict[str, Any] | None = None, **options: Any) -> Played:
            made = Played(model(), config or transfer(pool.master), **options)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def played(pool: LocalPool, play: Play) -> Played:
    """vLLM's scheduler on it."""
    return play(transfer(pool.master, load_timeout_s=0.5))
