"""What a connector must do, one check for each promise. Engines are whatever its author plays.

A check starts a real pool, in a process of its own where the pool is killed, frozen or slow, and
compares what an engine answers with what the same engine answers without a pool. Nothing here needs
a test runner. Each check takes as long as its engines do, and a few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

from kvpool import dev
from kvpool.client.opening import connect
from kvpool.errors import KvpoolError
from kvpool.protocols import Addressable
from kvpool.testing.harness import ConformanceError, NotDeclared
from kvpool.types import Namespace

T = TypeVar("T")

#: What shapes the bytes of a cache, and a salt, which keeps apart who must not share: a tenant, or
#: vLLM's `cache_salt`. An engine that cannot vary one raises NotDeclared for it.
VARIANTS: Final = ("model", "dtype", "layout", "salt")
#: Tokens of a prompt, each at least `_TOKEN_MIN` and less than `_TOKEN_MAX`: of any vocabulary.
PROMPT_TOKENS: Final = 300
_TOKEN_MIN, _TOKEN_MAX = 5, 1000
#: Seconds that a fault may add to one run of an engine, on a machine with other work.
FAULT_S: Final = 20.0
#: Characters of what happened that an error shows: outputs may be long.
_SHOWN_MAX: Final = 300
#: Seconds in which what happens in the background must have happened.
SETTLED_S: Final = 60.0


class Ran(NamedTuple):
    """What an engine made of a prompt."""

    #: Anything that compares and that every token's cache has an influence on.
    output: object
    #: Tokens, or bytes: more than 0 when the pool was of use.
    loaded: int


class TestedEngine(Protocol):
    """An engine with the connector in it. It has no other cache, or an empty one."""

    @property
    def namespaces(self) -> Collection[Namespace]:
        """Where it saves."""

    def run(self, prompt: Sequence[int]) -> Ran:
        """Answer a prompt, and save what was computed of it, perhaps in the background."""

    def cancel(self, prompt: Sequence[int]) -> None:
        """Begin with a prompt, and give it up before it has ended. Raises NotDeclared where
        requests of this engine cannot be given up."""

    def settle(self) -> None:
        """Wait until saves have ended, or were given up."""

    def close(self) -> None:
        """End it. Idempotent."""


#: Makes an engine: the master's address ("" for none), and "" or one of `VARIANTS`.
MakeEngine: TypeAlias = Callable[[str, str], TestedEngine]


class Trial:
    """One check in progress: its engines and its pool end with it."""

    def __init__(self, check: str, make: MakeEngine, stack: contextlib.ExitStack) -> None:
        self.check = check
        self._make = make
        self._stack = stack

    def expect(self, condition: bool, expected: str, happened: object) -> None:
        """Raises ConformanceError unless the condition holds."""
        if not condition:
            raise ConformanceError(self.check, expected, str(happened)[:_SHOWN_MAX])

    def engine(self, master: str, variant: str = "") -> TestedEngine:
        """An engine that is closed with the check."""
        engine = self._make(master, variant)
        self._stack.callback(engine.close)
        return engine

    def alone(self, variant: str, *prompts: Sequence[int]) -> list[object]:
        """What an engine without a pool answers."""
        engine = self._make("", variant)
        try:
            return [engine.run(one).output for one in prompts]
        finally:
            engine.close()

    def process(self, capacity: str = "64MiB") -> ProcessPool:
        """A pool in a process of its own."""
        return self._stack.enter_context(ProcessPool(capacity))

    def pool(self) -> ThreadedPool:
        """A pool whose memory can be reached."""
        return self._stack.enter_context(ThreadedPool())

    def run_right(
        self, engine: TestedEngine, prompt: Sequence[int], right: object, when: str
    ) -> Ran:
        """Run a prompt, and see that its answer is right and did not take long."""
        began = time.monotonic()
        ran = engine.run(prompt)
        took_s = time.monotonic() - began
        self.expect(ran.output == right, f"the answer of an engine without a pool {when}", ran)
        self.expect(took_s < FAULT_S, f"an answer in {FAULT_S:g} s {when}", f"{took_s:.1f} s")
        return ran

    def eventually(self, happens: Callable[[], bool], expected: str) -> None:
        """Try until something happens."""
        until = time.monotonic() + SETTLED_S
        while not happens():
            self.expect(time.monotonic() < until, expected, f"not within {SETTLED_S:g} s")
            time.sleep(0.2)


class ConnectorCheck:
    """One check of a connector. Its name is that of the function."""

    def __init__(self, body: Callable[[Trial, MakeEngine], None]) -> None:
        functools.update_wrapper(self, body)
        self.name = getattr(body, "__name__", "")
        self._body = body

    def __call__(self, make: MakeEngine) -> None:
        """See `check_connector` for `make`."""
        with contextlib.ExitStack() as stack:
            self._body(Trial(self.name, make, stack), make)


class ProcessPool:
    """`kvpool dev`, to be killed, frozen and slowed down; it comes back at the same address."""

    def __init__(self, capacity: str) -> None:
        self._command = [sys.executable, "-m", "kvpool", "dev", "--capacity", capacity, "--bind"]
        self.address = "127.0.0.1:0"
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> ProcessPool:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, again if it was killed."""
        self._process = subprocess.Popen(
            [*self._command, self.address],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().rpartition(" ")[2].strip()

    def kill(self) -> None:
        """SIGKILL: nothing is flushed, no connection is closed by the pool itself."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def send(self, signal_number: int) -> None:
        """A signal, for example SIGSTOP."""
        if self._process is not None:
            os.kill(self._process.pid, signal_number)

    @contextlib.contextmanager
    def slow(self, stopped_s: float = 0.19, running_s: float = 0.01) -> Iterator[None]:
        """It runs a twentieth of the time: every answer is late, and some come too late."""
        ended = threading.Event()

        def play() -> None:
            while not ended.is_set():
                self.send(signal.SIGSTOP)
                ended.wait(stopped_s)
                self.send(signal.SIGCONT)
                ended.wait(running_s)

        thread = threading.Thread(target=play)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def blocks(self) -> int:
        """Blocks in the pool; 0 also while no master answers."""

        async def count() -> int:
            from kvpool.client.admin import admin  # a ring

            async with connect(self.address) as pool:
                return sum(blocks for _, blocks in await admin(pool).namespaces())

        try:
            return asyncio.run(count())
        except KvpoolError:
            return 0


class ThreadedPool:
    """A pool in a thread of this process: a check can change what it holds."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._serving = dev.serve("64MiB", listen=("shm://", "tcp://127.0.0.1:0"))

    def __enter__(self) -> ThreadedPool:
        self._thread.start()
        self._dev = self._do(self._serving.__aenter__())
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._do(self._serving.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def address(self) -> str:
        return self._dev.address

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def damage(self) -> int:
        """Flip a bit in the middle of every block; how many."""

        async def flip() -> int:
            (server,) = self._dev.servers
            entries = server.store.index.inventory()
            for entry in entries:
                assert isinstance(server.tier, Addressable)
                server.tier.view(entry.offset, entry.size)[entry.size // 2] ^= 1
            return len(entries)

        return self._do(flip())

    def shorten(self, namespaces: Collection[Namespace]) -> int:
        """Replace every block by one of half its size; how many."""

        async def replace() -> int:
            (server,) = self._dev.servers
            sizes = {entry.digest: entry.size for entry in server.store.index.inventory()}
            async with self._dev.pool() as pool:
                for namespace in namespaces:
                    gone = await pool.remove(namespace, list(sizes))
                    digests = [one for one, there in zip(sizes, gone, strict=True) if there]
                    halves = [bytes(sizes[one] // 2) for one in digests]
                    for part in range(namespace.parts):
                        await pool.write(namespace, digests, halves, part=part)
            return len(sizes)

        return self._do(replace())

    def held(self) -> tuple[int, int]:
        """Pins of readers, and reservations of writers."""

        async def count() -> tuple[int, int]:
            (server,) = self._dev.servers
            return server.store.held.pins, server.store.held.reservations

        return self._do(count())


def prompt(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    """So many tokens: equal for an equal `seed`."""
    rng = random.Random(seed)
    return [rng.randrange(_TOKEN_MIN, _TOKEN_MAX) for _ in range(tokens)]


def _save(trial: Trial, master: str, *prompts: Sequence[int], variant: str = "") -> TestedEngine:
    engine = trial.engine(master, variant)
    for one in prompts:
        engine.run(one)
    engine.settle()
    return engine


@ConnectorCheck
def loads_what_another_engine_has_saved(trial: Trial, make: MakeEngine) -> None:
    """Also the common beginning of another prompt; the answers are those without a pool."""
    first, longer = prompt(1), prompt(1) + prompt(2, 100)
    right, right_longer = trial.alone("", first, longer)
    pool = trial.process()
    saver = _save(trial, pool.address, first)
    loader = trial.engine(pool.address)
    trial.expect(
        set(saver.namespaces) == set(loader.namespaces),
        "two equal engines with equal namespaces",
        f"{saver.namespaces} and {loader.namespaces}",
    )
    loaded = trial.run_right(loader, first, right, "with its blocks loaded").loaded
    trial.expect(loaded > 0, "something loaded", loaded)
    fresh = trial.engine(pool.address)
    loaded = trial.run_right(fresh, longer, right_longer, "with its beginning loaded").loaded
    trial.expect(loaded > 0, "the common beginning loaded", loaded)


@ConnectorCheck
def engines_that_differ_share_nothing(trial: Trial, make: MakeEngine) -> None:
    """Another model, type, layout or salt: nothing loaded, never its bytes, other namespaces; but a
    salt may be in the keys instead."""
    tokens = prompt(3)
    pool = trial.process()
    base = _save(trial, pool.address, tokens)
    varied = 0
    for variant in VARIANTS:
        try:
            (right,) = trial.alone(variant, tokens)
        except NotDeclared:
            continue
        varied += 1
        other = trial.engine(pool.address, variant)
        ran = trial.run_right(other, tokens, right, f"with another {variant}")
        trial.expect(ran.loaded == 0, f"nothing loaded with another {variant}", ran.loaded)
        other.settle()
        trial.expect(
            variant == "salt" or not set(base.namespaces) & set(other.namespaces),
            f"other namespaces with another {variant}",
            f"{base.namespaces} and {other.namespaces}",
        )
    if not varied:
        raise NotDeclared("an engine that varies nothing")


@ConnectorCheck
def the_engine_starts_before_its_pool(trial: Trial, make: MakeEngine) -> None:
    """It computes, and uses the pool once it is there."""
    one, two = prompt(4), prompt(5)
    right, right_two = trial.alone("", one, two)
    pool = trial.process()
    pool.kill()
    engine = trial.engine(pool.address)
    trial.run_right(engine, one, right, "before the pool has started")
    pool.start()

    def saved() -> bool:
        trial.run_right(engine, two, right_two, "after the pool has started")
        engine.settle()
        return pool.blocks() > 0

    trial.eventually(saved, "blocks in a pool that has started after the engine")


@ConnectorCheck
def the_pool_is_killed_and_comes_back(trial: Trial, make: MakeEngine) -> None:
    """While engines load and save: each answer is right, and the pool is filled again."""
    prompts = [prompt(10 + number) for number in range(4)]
    rights = trial.alone("", *prompts)
    pool = trial.process()
    _save(trial, pool.address, *prompts)
    engine = trial.engine(pool.address)
    trial.run_right(engine, prompts[0], rights[0], "before the pool was killed")
    killer = threading.Timer(0.01, pool.kill)
    killer.start()
    for one, right in zip(prompts, rights, strict=True):
        trial.run_right(engine, one, right, "while the pool is killed")
    killer.join()
    engine.settle()
    pool.start()

    def saved() -> bool:
        trial.run_right(engine, prompts[-1], rights[-1], "after the pool has come back")
        engine.settle()
        return pool.blocks() > 0

    trial.eventually(saved, "blocks in a pool that was killed and has started again")


@ConnectorCheck
def the_pool_is_frozen(trial: Trial, make: MakeEngine) -> None:
    """It is there and answers nothing: the worst time to wait, and the answer is right."""
    prompts = [prompt(20 + number) for number in range(3)]
    rights = trial.alone("", *prompts)
    pool = trial.process()
    _save(trial, pool.address, prompts[0])
    engine = trial.engine(pool.address)
    pool.send(signal.SIGSTOP)
    for one, right in zip(prompts, rights, strict=True):
        trial.run_right(engine, one, right, "while the pool is frozen")
    pool.send(signal.SIGCONT)
    engine.settle()
    trial.run_right(engine, prompts[0], rights[0], "after the pool was frozen")


@ConnectorCheck
def the_pool_is_slow(trial: Trial, make: MakeEngine) -> None:
    """It runs a twentieth of the time: answers come late, and some parts of a load do not."""
    prompts = [prompt(30 + number) for number in range(3)]
    rights = trial.alone("", *prompts)
    pool = trial.process()
    _save(trial, pool.address, *prompts)
    engine = trial.engine(pool.address)
    with pool.slow():
        for one, right in zip(prompts, rights, strict=True):
            trial.run_right(engine, one, right, "while the pool is slow")
    engine.settle()


@ConnectorCheck
def the_pool_is_full(trial: Trial, make: MakeEngine) -> None:
    """Blocks are refused and evicted all the time."""
    prompts = [prompt(40 + number, 600) for number in range(6)]
    rights = trial.alone("", *prompts)
    pool = trial.process("1MiB")
    engines = [trial.engine(pool.address) for _ in range(2)]
    for turn in range(2):
        for one, right in zip(prompts, rights, strict=True):
            trial.run_right(engines[turn], one, right, "with a pool that is full")
        engines[turn].settle()


@ConnectorCheck
def damaged_blocks_are_computed(trial: Trial, make: MakeEngine) -> None:
    """A bit of every block is flipped."""
    tokens = prompt(50)
    (right,) = trial.alone("", tokens)
    pool = trial.pool()
    _save(trial, pool.address, tokens)
    trial.expect(pool.damage() > 0, "blocks in the pool", 0)
    trial.run_right(trial.engine(pool.address), tokens, right, "with damaged blocks in the pool")


@ConnectorCheck
def blocks_of_another_size_are_computed(trial: Trial, make: MakeEngine) -> None:
    """They are hits for the pool, and fill half of a buffer."""
    tokens = prompt(60)
    (right,) = trial.alone("", tokens)
    pool = trial.pool()
    saver = _save(trial, pool.address, tokens)
    trial.expect(pool.shorten(saver.namespaces) > 0, "blocks in the pool", 0)
    ran = trial.run_right(trial.engine(pool.address), tokens, right, "with shorter blocks")
    trial.expect(ran.loaded == 0, "nothing loaded of blocks that are too short", ran.loaded)


@ConnectorCheck
def a_cancelled_request_leaves_nothing(trial: Trial, make: MakeEngine) -> None:
    """No pin, no reservation, and the next request is right."""
    tokens = prompt(70)
    (right,) = trial.alone("", tokens)
    pool = trial.pool()
    _save(trial, pool.address, tokens)
    engine = trial.engine(pool.address)
    for number in range(3):
        engine.cancel(tokens)
        engine.cancel(prompt(71 + number))
    trial.run_right(engine, tokens, right, "after requests were given up")
    engine.settle()
    trial.eventually(
        lambda: pool.held() == (0, 0), "no pins and no reservations after cancelled requests"
    )


@ConnectorCheck
def closing_ends_everything(trial: Trial, make: MakeEngine) -> None:
    """Twice is once; no thread, pin or reservation stays, and no socket."""
    tokens = prompt(80)
    pool = trial.pool()
    make(pool.address, "").close()  # what is loaded once for all stays
    threads = set(threading.enumerate())
    engine = make(pool.address, "")
    engine.run(tokens)
    engine.close()
    engine.close()
    more: set[threading.Thread] = set()

    def ended() -> bool:
        more.clear()
        more.update(one for one in set(threading.enumerate()) - threads if one.is_alive())
        return not more and pool.held() == (0, 0)

    trial.eventually(ended, f"no threads, pins and reservations after close ({more})")
