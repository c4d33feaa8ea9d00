"""Matches of long chains at one master: how many a second, and what each costs it.

    python -m benchmarks.matches [--blocks 1000000] [--chain 2048] [--clients 64] [--announce 0]

A real master in its own process. 64 clients ask it over loopback for chains that are in its map, as
clients do: with the keys of all blocks (a client's first match of a chain), and with marks of the
spans that were found before. Their questions are made in advance, and one thread asks all of them,
so that the other core is the master's. `--announce N` announces N new blocks a second beside them,
and takes as many away. CPU time is that of the master's process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from functools import partial
from typing import Final, NamedTuple

import uvloop

from benchmarks.masters import NAMESPACE, RunningMaster, TimedLoop
from kvpool.net.control_network import TcpNetwork, master_address
from kvpool.net.control_session import CallerSession
from kvpool.net.requests import cluster_id, decode_envelope, encode_envelope
from kvpool.spans import SPAN_BLOCKS, marks_of, pack_marks
from kvpool.types import Cluster, ReadStatus, ServerStats
from kvpool.wire import messages as wire

_DIGEST: Final = 32
_CLUSTER: Final = cluster_id("default")
_TOKEN: Final = bytes(16)
_ANNOUNCED: Final = 1024
_TICKS_S: Final = os.sysconf("SC_CLK_TCK")


def packed_chain(number: int, blocks: int) -> bytes:
    """The keys of a chain."""
    return random.Random(number).randbytes(blocks * _DIGEST)


class Server:
    """What announces blocks: several messages in flight."""

    def __init__(self, network: TcpNetwork, address: str) -> None:
        self._link = network.connect(address)
        self._sequence = 0
        self.announced = 0  # blocks that came or went

    async def register(self) -> None:
        where = ("server", 1, _TOKEN, "host", ["tcp://127.0.0.1:1"], ["dram"])
        await self._ask(wire.Register(*where, 1 << 45))

    async def announce(self, packed: bytes, status: ReadStatus = ReadStatus.HIT) -> None:
        for at in range(0, len(packed), _ANNOUNCED * _DIGEST):
            keys = packed[at : at + _ANNOUNCED * _DIGEST]
            change = wire.BlockChanges(NAMESPACE.name, 1, _DIGEST, keys, 0, 0, status)
            self._sequence += 1
            self.announced += len(keys) // _DIGEST
            await self._ask(wire.Announce("server", 1, _TOKEN, self._sequence, [change]))

    async def beat(self) -> None:
        """Heartbeats for ever."""
        while True:
            await self._ask(wire.Heartbeat("server", 1, _TOKEN, ServerStats()))
            await asyncio.sleep(0.5)

    async def _ask(self, message: wire.Message) -> None:
        deadline = asyncio.get_running_loop().time() + 30.0
        await self._link.request(*wire.encode(message), deadline=deadline)

    async def stream(self, blocks_s: int) -> None:
        """New blocks for ever, and those of a second before go."""
        kept: list[bytes] = []
        began = asyncio.get_running_loop().time()
        for number in range(1 << 30):
            packed = os.urandom(_ANNOUNCED * _DIGEST)
            kept.append(packed)
            await self.announce(packed)
            if len(kept) > 100:
                await self.announce(kept.pop(0), ReadStatus.EVICTED)
            due = began + number * _ANNOUNCED / blocks_s
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))


def by_keys(packed: bytes) -> wire.Message:
    return wire.Find(NAMESPACE.name, 1, _DIGEST, packed, True)


def by_marks(packed: bytes) -> wire.Message:
    marks = marks_of(packed, _DIGEST)[: len(packed) // _DIGEST // SPAN_BLOCKS - 1]
    rest = packed[len(marks) * SPAN_BLOCKS * _DIGEST :]
    return wire.Find(NAMESPACE.name, 1, _DIGEST, rest, True, before=pack_marks(marks))


class Asked(NamedTuple):
    """Replies a second, the median time of one in us, and how many blocks each has found."""

    rate: float
    median_us: float
    lengths: set[int]


class Times:
    """What came when, of clients that ask without a pause."""

    def __init__(self, seconds: float) -> None:
        self._took: list[float] = []
        self._lengths: set[int] = set()
        self._began = time.perf_counter()
        self.until = self._began + seconds

    def add(self, reply: bytes, sent_at: float) -> int:
        """The number of this reply."""
        answer = decode_envelope(reply, _CLUSTER)
        found = wire.decode_answer(wire.FindReply, answer.type, answer.body)
        self._lengths.add(found.runs[-1][1] + 1 if found.runs else 0)
        self._took.append(time.perf_counter() - sent_at)
        return len(self._took)

    def asked(self) -> Asked:
        elapsed = time.perf_counter() - self._began
        median = sorted(self._took)[len(self._took) // 2]
        return Asked(len(self._took) / elapsed, median * 1e6, self._lengths)


class Client(asyncio.Protocol):
    """Asks, and asks again at each answer. `opened` is done when it may."""

    def __init__(self, questions: list[bytes]) -> None:
        self._questions = questions
        self._session = CallerSession(Cluster())
        self._sent_at = 0.0
        self.times: Times | None = None
        self.opened = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        for reply in self._session.feed(data):
            assert self.times is not None
            self.ask(self.times.add(reply, self._sent_at))
        if not self.opened.done():
            self.transport.write(self._session.take())
            if self._session.open:
                self.opened.set_result(None)

    def ask(self, number: int) -> None:
        self._sent_at = time.perf_counter()
        question = self._questions[number % len(self._questions)]
        self.transport.write(self._session.seal(question))


def _same(client: Client) -> Client:
    return client


def ask_all(address: str, questions: list[bytes], clients: int, seconds: float) -> Asked:
    """Each client on a connection of its own."""

    async def ask() -> Asked:
        loop = asyncio.get_running_loop()
        all_of_them = [Client(questions) for _ in range(clients)]
        for client in all_of_them:
            await loop.create_connection(partial(_same, client), *master_address(address))
            await client.opened
        times = Times(seconds)
        for number, client in enumerate(all_of_them):
            client.times = times
            client.ask(number)
        await asyncio.sleep(seconds)
        asked = times.asked()
        for client in all_of_them:
            client.transport.abort()
        return asked

    return uvloop.run(ask())


def cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_S


async def measure(options: argparse.Namespace) -> None:
    """One line for each kind of question."""
    master = RunningMaster()
    state = master.state()
    network = TcpNetwork()
    server = Server(network, state.address)
    await server.register()
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(server.beat())]
    count = options.blocks // options.chain
    for number in range(count):
        await server.announce(packed_chain(number, options.chain))
    chains = [
        packed_chain(number, options.chain) for number in range(0, count, max(1, count // 64))
    ]
    unknown = [packed_chain(1 << 40 | number, options.chain) for number in range(64)]
    if options.announce:
        tasks.append(loop.create_task(server.stream(options.announce)))
    kinds = {
        "keys": ([by_keys(packed) for packed in chains], options.chain),
        "marks": ([by_marks(packed) for packed in chains], options.chain),
        "new prompts": ([by_keys(packed[: 512 * _DIGEST]) for packed in unknown], 0),
    }
    await asyncio.to_thread(master.state)
    for name, (messages, length) in kinds.items():
        questions = [
            encode_envelope(type, _CLUSTER, 1, body)
            for type, body in (wire.encode(message) for message in messages)
        ]
        before, told_before = cpu_s(master.pid), server.announced
        began = loop.time()
        rate, median_us, lengths = await asyncio.to_thread(
            ask_all, state.address, questions, options.clients, options.seconds
        )
        assert lengths == {length}, lengths
        spent, told = cpu_s(master.pid) - before, server.announced - told_before
        after = await asyncio.to_thread(master.state)
        print(
            f"{name}: {rate:,.0f} a second, median {median_us:,.0f} us, "
            f"{told / options.seconds:,.0f} changes of the map a second, "
            f"{spent / (loop.time() - began):.2f} cores of the master, "
            f"{spent / (rate * options.seconds) * 1e6:.0f} us of CPU for each, "
            f"{len(questions[0]):,} bytes; longest turn {after.longest_ms:.1f} ms; "
            f"{after.blocks:,} blocks, "
            f"{(after.resident - state.resident) / after.blocks:.0f} bytes a block",
            flush=True,
        )
    for task in tasks:
        task.cancel()
    network.close()
    master.kill()


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.matches", description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--chain", type=int, default=2048)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument(
        "--announce", type=int, default=0, help="blocks a second beside the matches"
    )
    TimedLoop().run_until_complete(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
