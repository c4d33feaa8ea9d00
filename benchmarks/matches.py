"""Matches of long chains at one master: how many a second, and what each costs it.

    python -m benchmarks.matches [--blocks 1000000] [--chain 2048] [--clients 64] [--announce 0]
                                 [--over streams]

A real master in its own process. 64 clients ask it over loopback for chains that are in its map, as
clients do: with the keys of all blocks (a client's first match of a chain), and with marks of the
spans that were found before. Their questions are made in advance, and one thread asks all of them,
so that the other core is the master's. They have streams, or ask over zmq as those do that ask
seldom (`--over zmq`). `--announce N` announces N new blocks a second beside them, and takes as many
away. CPU time is that of the master's process, with the threads of zmq.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import random
import time
from typing import Final, NamedTuple

import uvloop
import zmq

from benchmarks.masters import NAMESPACE, RunningMaster, TimedLoop
from kvpool.net.control_stream import CallerStream, open_stream
from kvpool.net.zmq_rpc import ZmqNetwork
from kvpool.spans import SPAN_BLOCKS, marks_of, pack_marks
from kvpool.types import ReadStatus, ServerStats
from kvpool.wire import messages as wire
from kvpool.wire.frames import cluster_id, decode_envelope, encode_envelope

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

    def __init__(self, network: ZmqNetwork, address: str) -> None:
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
    return wire.FindChain(NAMESPACE.name, 1, _DIGEST, rest, pack_marks(marks))


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


def over_streams(address: str, questions: list[bytes], clients: int, seconds: float) -> Asked:
    """Each client on a stream of its own."""

    async def ask() -> Asked:
        network = ZmqNetwork()
        loop = asyncio.get_running_loop()
        sent_at = [0.0] * clients
        streams: list[CallerStream] = []

        def replied(number: int, reply: bytes) -> None:
            count = times.add(reply, sent_at[number])
            sent_at[number] = time.perf_counter()
            streams[number].send(questions[count % len(questions)])

        link = network.connect(address)
        for number in range(clients):
            request = wire.encode(wire.AskStream())
            reply = await link.request(*request, deadline=loop.time() + 10)
            offer = wire.decode_answer(wire.StreamOffer, *reply)
            on_message = functools.partial(replied, number)
            streams.append(await open_stream(address, offer, on_message, lambda: None, set()))
        times = Times(seconds)
        for number, stream in enumerate(streams):
            sent_at[number] = time.perf_counter()
            stream.send(questions[number % len(questions)])
        await asyncio.sleep(seconds)
        asked = times.asked()
        for stream in streams:
            stream.abort()
        network.close()
        return asked

    return uvloop.run(ask())


def over_zmq(address: str, questions: list[bytes], clients: int, seconds: float) -> Asked:
    """Each client with a socket of its own."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    poller, sent_at = zmq.Poller(), {}
    sockets = []
    for number in range(clients):
        socket = context.socket(zmq.DEALER)
        socket.connect(f"tcp://{address}")
        poller.register(socket, zmq.POLLIN)
        sockets.append(socket)
        socket.send(questions[number % len(questions)])
        sent_at[socket] = time.perf_counter()
    times = Times(seconds)
    while time.perf_counter() < times.until:
        for socket, _ in poller.poll(1000):
            count = times.add(socket.recv(), sent_at[socket])
            sent_at[socket] = time.perf_counter()
            socket.send(questions[count % len(questions)])
    context.destroy(linger=0)
    return times.asked()


def cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_S


_WAYS: Final = {"streams": over_streams, "zmq": over_zmq}


async def measure(options: argparse.Namespace) -> None:
    """One line for each kind of question."""
    master = RunningMaster()
    state = master.state()
    network = ZmqNetwork()
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
            _WAYS[options.over], state.address, questions, options.clients, options.seconds
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
    parser.add_argument("--over", choices=list(_WAYS), default="streams")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument(
        "--announce", type=int, default=0, help="blocks a second beside the matches"
    )
    TimedLoop().run_until_complete(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
