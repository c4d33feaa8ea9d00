"""A master of millions of blocks: how long its servers take to send them, and its longest turn.

    python -m benchmarks.masters [--blocks 1000000] [--servers 4] [--indexed]

A real master in its own process, and real announcers over loopback in this one. Three phases: all
servers join; the master is killed and restarted (G7); one server restarts. A
client asks for 640 blocks every 20 ms throughout. A *turn* is the CPU time of one pass of an event
loop, so other programs of the machine count little. The servers' blocks are made up as they are
asked for; with `--indexed` they are real entries of a store, of which 5 million need 3 GB.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import secrets
import selectors
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, cast

from kvpool import runtime
from kvpool.config import MasterConfig
from kvpool.errors import Unavailable
from kvpool.master.service import Master
from kvpool.net.control_network import TcpNetwork
from kvpool.ops import process
from kvpool.protocols import ReserveRequest
from kvpool.server.announcer import Announcer, Identity
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.entry import Stretch
from kvpool.server.state.store import Store
from kvpool.types import ROOT, Namespace, ReadStatus, ServerStats
from kvpool.wire import messages as wire

NAMESPACE: Final = Namespace("bench/masters")
_DIGEST: Final = 16
_STEP: Final = 512
_ASKED: Final = 640
_HEARTBEAT_S: Final = 1.0


class TimedLoop(asyncio.SelectorEventLoop):
    """Records the CPU time of its longest turn."""

    def __init__(self) -> None:
        super().__init__(selectors.DefaultSelector())
        self.longest_s = 0.0

    def _run_once(self) -> None:
        began = time.thread_time()
        super()._run_once()  # type: ignore[misc]  # waiting in it takes no CPU time
        self.longest_s = max(self.longest_s, time.thread_time() - began)

    def take_longest_ms(self) -> float:
        longest, self.longest_s = self.longest_s, 0.0
        return longest * 1e3


class MasterState(NamedTuple):
    """What the master's process reports of itself."""

    address: str
    blocks: int
    longest_ms: float
    resident: int
    sweeping: bool


def run_master(bind: str, pipe: Connection) -> None:
    """The process of the master: reports each time that it is asked to."""
    process.freeze_gc()

    async def main(loop: TimedLoop) -> None:
        network = TcpNetwork()
        master = Master(MasterConfig(bind=bind), network)
        await master.start()

        def report() -> None:
            pipe.recv()
            directory, longest_ms = master.directory, loop.take_longest_ms()
            sweeping = master.sweeper.due
            resident = runtime.resident_bytes()
            pipe.send(MasterState(master.address, len(directory), longest_ms, resident, sweeping))

        loop.add_reader(pipe.fileno(), report)
        await asyncio.Event().wait()

    loop = TimedLoop()
    loop.run_until_complete(main(loop))


class RunningMaster:
    """The process of a master, as this process sees it."""

    def __init__(self, bind: str = "127.0.0.1:0") -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=run_master, args=(bind, theirs), daemon=True)
        self._process.start()

    def state(self) -> MasterState:
        self._pipe.send(None)
        return cast(MasterState, self._pipe.recv())

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def made_up(server: int, step: int) -> list[bytes]:
    """The digests of one step of a server's inventory."""
    raw = random.Random(f"{server}/{step}").randbytes(_STEP * _DIGEST)
    return [raw[at : at + _DIGEST] for at in range(0, len(raw), _DIGEST)]


class MadeUpStore:
    """The part of `Blocks` that an announcer uses; its blocks take no memory."""

    def __init__(self, server: int, blocks: int) -> None:
        self._server, self.stored = server, blocks // _STEP * _STEP
        self.fingerprint = None
        self.backing = SimpleNamespace(allocator=SimpleNamespace(capacity=1 << 40))

    def inventory_steps(self) -> Iterator[list[Stretch]]:
        for step in range(self.stored // _STEP):
            yield [Stretch(NAMESPACE, 0, made_up(self._server, step), ReadStatus.HIT)]


def indexed_store(server: int, blocks: int) -> Blocks:
    """A store with real entries of 64 bytes each."""
    store = Store(blocks * 64, alignment=64)
    for step in range(blocks // _STEP):
        digests = made_up(server, step)
        roots, sizes = [ROOT] * _STEP, [64] * _STEP
        request = ReserveRequest(NAMESPACE, 0, digests, roots, sizes)
        for answer in store.reserve(1, request, 0.0):
            store.seal(1, answer.id, 0, 0.0)
        store.index.change_log.take()
    return Blocks([store])


class Servers:
    """All announcers, in the loop of this process."""

    def __init__(self, network: TcpNetwork, address: str, options: argparse.Namespace) -> None:
        self._network, self._address = network, address
        make = indexed_store if options.indexed else MadeUpStore
        share = options.blocks // options.servers
        self._stores = [make(number, share) for number in range(options.servers)]
        self._secrets = [secrets.token_bytes(16) for _ in self._stores]
        self.blocks = sum(store.stored for store in self._stores)
        #: Inventories that each server has begun.
        self.inventories = [0] * len(self._stores)
        self.announcers = [self.start(number) for number in range(len(self._stores))]

    def start(self, number: int) -> Announcer:
        """A new process of this server, as far as a master can see."""
        identity = Identity(
            f"server-{number}", secrets.randbits(63), "host", [], ["dram"], self._secrets[number]
        )
        store = self._stores[number]
        steps = store.inventory_steps

        def inventory_steps() -> Iterator[list[Stretch]]:
            self.inventories[number] += 1
            return steps()

        watched = SimpleNamespace(
            stored=store.stored,
            backing=store.backing,
            fingerprint=store.fingerprint,
            inventory_steps=inventory_steps,
        )
        announcer = Announcer(
            identity,
            cast(Any, watched),
            self._network.connect(self._address),
            _HEARTBEAT_S,
            stats=lambda now: ServerStats(),
        )
        announcer.start()
        return announcer

    async def kill(self, number: int) -> None:
        """Without a word to the master."""
        task = self.announcers[number]._task
        assert task is not None
        task.cancel()
        await asyncio.wait([task])


class Asker:
    """A client: asks for blocks of random servers, and counts what it gets."""

    def __init__(self, network: TcpNetwork, address: str, options: argparse.Namespace) -> None:
        self._link = network.connect(address)
        self._rng = random.Random(1)
        self._servers = options.servers
        self._steps = options.blocks // options.servers // _STEP
        self.take()

    def take(self) -> str:
        """What happened since the last call."""
        done = getattr(self, "took_ms", [0.0])
        late = getattr(self, "late", 0)
        self.took_ms: list[float] = []
        self.late = 0
        done.sort()
        median = done[len(done) // 2] if done else 0.0
        worst = done[-1] if done else 0.0
        return f"{len(done)} questions, median {median:.1f} ms, slowest {worst:.0f} ms, {late} late"

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            server, step = self._rng.randrange(self._servers), self._rng.randrange(self._steps)
            digests = b"".join(made_up(server, step) * 2)[: _ASKED * _DIGEST]
            find = wire.Find(NAMESPACE.name, 1, _DIGEST, digests, True)
            began = loop.time()
            try:
                await self._link.request(*wire.encode(find), deadline=began + 1.0)
                self.took_ms.append((loop.time() - began) * 1e3)
            except Unavailable:
                self.late += 1
            await asyncio.sleep(0.02)


async def measure(options: argparse.Namespace) -> None:
    """All phases, each as one line."""
    loop = cast(TimedLoop, asyncio.get_running_loop())
    master = RunningMaster()
    empty = master.state()
    network = TcpNetwork()
    servers = Servers(network, empty.address, options)
    process.freeze_gc()
    asker = Asker(network, empty.address, options)
    asking = loop.create_task(asker.run())

    async def phase(name: str, began: float) -> None:
        """Until the master has all blocks, and nothing is left to sweep."""
        blocks, longest_ms = servers.blocks, 0.0
        while True:
            await asyncio.sleep(0.05)
            state = master.state()
            longest_ms = max(longest_ms, state.longest_ms)
            if state.blocks == blocks and not state.sweeping:
                break
        seconds = loop.time() - began
        print(
            f"{name}: {seconds:.2f} s, {blocks:,} blocks; inventories {servers.inventories}; "
            f"longest turn: master {longest_ms:.1f} ms, servers {loop.take_longest_ms():.1f} ms; "
            f"{(state.resident - empty.resident) / max(1, blocks):.0f} bytes a block; "
            f"{asker.take()}",
            flush=True,
        )
        servers.inventories[:] = [0] * options.servers

    await asyncio.sleep(0)  # the turn that made the stores ends here
    loop.take_longest_ms()
    await phase("all servers join", loop.time())
    master.kill()
    asker.take()
    master = RunningMaster(empty.address)
    master.state()  # it listens
    await phase("the master restarts", loop.time())
    await servers.kill(0)
    restarted = loop.time()
    servers.announcers[0] = servers.start(0)
    await asyncio.sleep(_HEARTBEAT_S)
    await phase("one server restarts", restarted)
    await asyncio.sleep(5 * _HEARTBEAT_S)
    print(f"in the 5 s after that: inventories {servers.inventories}; {asker.take()}")
    asking.cancel()
    for announcer in servers.announcers:
        await announcer.close()
    network.close()
    master.kill()


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.masters", description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="of all servers together")
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--indexed", action="store_true", help="real entries, one store each")
    loop = TimedLoop()
    loop.run_until_complete(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
