"""How long a chain takes to reach many servers: from each other, and in other ways.

    python -m benchmarks.spread                        # 16 servers, 3 GB, in virtual time
    sudo python -m benchmarks.spread --namespaces 4    # real servers, each in a network namespace

In virtual time the real `SpreadPlan` names the calls; a transfer takes the receiver's budget, a
quarter of its link, or its share of the source's link if that is less. In namespaces the links are
shaped by `tc`, and the chain is as large as 8 seconds of one budget.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from rich.console import Console
from rich.table import Table

from kvpool import ClientConfig, Namespace, Pool, admin, connect
from kvpool.client import spread_plan
from kvpool.client.spread_plan import Call, SpreadPlan, cut
from kvpool.protocols import WriteOptions
from kvpool.types import ROOT, MoveStatus, Replica, Run, WriteBlock

#: The figures are ratios: the same for any link.
_LINK: float = 12.5e9
_SHARE = 0.25
#: One request, and the round trip to the masters at its end.
_REQUEST_S = 0.003
_CHAIN_BYTES = 3e9
_BLOCK_BYTES = 2 << 20
_NAMESPACE = Namespace("benchmark")


# --- in virtual time -----------------------------------------------------------------------------


def spread_s(receivers: int, *, at_once: int, size: float = _CHAIN_BYTES) -> tuple[float, float]:
    """Seconds until all have the chain, and the largest part of one link that serving it took."""
    blocks = int(size // _BLOCK_BYTES)
    run = Run(0, blocks - 1, (Replica("first", "dram"),))
    usual, vars(spread_plan)["FETCHES_MAX"] = spread_plan.FETCHES_MAX, at_once
    try:
        plan = SpreadPlan(cut([run], 1, blocks), [f"r{number}" for number in range(receivers)])
        return _play(plan)
    finally:
        vars(spread_plan)["FETCHES_MAX"] = usual


def _play(plan: SpreadPlan) -> tuple[float, float]:
    now, busiest = 0.0, 0.0
    left: dict[Call, float] = {}  # bytes; the request itself counts as its time at full rate
    while calls := {**left, **{call: _bytes(call) for call in plan.ready()}}:
        left = calls
        serving = Counter(call.source for call in left)
        rates = {call: min(_SHARE * _LINK, _LINK / serving[call.source]) for call in left}
        busiest = max(busiest, *(_SHARE * count for count in serving.values()))
        step = min(left[call] / rates[call] for call in left)
        now += step
        for call in list(left):
            left[call] -= rates[call] * step
            if left[call] <= 1e-3:
                del left[call]
                blocks = call.piece.end - call.piece.first
                plan.ended(call, [MoveStatus.DONE] * blocks)
    assert not any(problem for *_, problem in plan.progress())
    return now, min(1.0, busiest)


def _bytes(call: Call) -> float:
    blocks = call.piece.end - call.piece.first
    return blocks * _BLOCK_BYTES + _REQUEST_S * _SHARE * _LINK


def virtual(receivers: int) -> Table:
    one = _CHAIN_BYTES / (_SHARE * _LINK)
    rounds = receivers.bit_length()  # whole copies: each round doubles those that have it
    shown = Table(title=f"{_CHAIN_BYTES / 1e9:g} GB to {receivers} servers, {_LINK / 1e9:g} GB/s")
    for column in ("", "seconds", "copies' time", "of the first server's link"):
        shown.add_column(column)
    star = max(one, receivers * _CHAIN_BYTES / _LINK)
    rows = [
        ("one after the other", receivers * one, _SHARE),
        ("all from the first server", star, min(1.0, receivers * _SHARE)),
        ("whole copies, doubling", rounds * one, _SHARE),
        *(
            (f"from each other, {n} from one", *spread_s(receivers, at_once=n))
            for n in (1, 2, 3, 4)
        ),
    ]
    for name, seconds, share in rows:
        shown.add_row(name, f"{seconds:.2f}", f"{seconds / one:.2f}", f"{share:.0%}")
    return shown


# --- in network namespaces -----------------------------------------------------------------------


def _ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True)


@contextmanager
def hosts(count: int, mbit: int) -> Iterator[list[str]]:
    """Namespaces on one bridge, which lies in the last of them: the clients' own."""
    hub, names = f"kvs{os.getpid()}hub", [f"kvs{os.getpid()}n{n}" for n in range(count)]
    made = []
    try:
        for name in (*names, hub):
            _ip("netns", "add", name)
            made.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", hub, "link", "add", "name", "br0", "type", "bridge")
        _ip("-n", hub, "addr", "add", "10.77.0.1/24", "dev", "br0")
        _ip("-n", hub, "link", "set", "br0", "up")
        for number, name in enumerate(names):
            end = f"v{number}"
            ends = ("name", "eth0", "netns", name), ("name", end, "netns", hub)
            _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            _ip("-n", name, "addr", "add", f"10.77.0.{10 + number}/24", "dev", "eth0")
            _ip("-n", hub, "link", "set", end, "master", "br0", "up")
            _ip("-n", name, "link", "set", "eth0", "up")
            for where, device in ((name, "eth0"), (hub, end)):
                shape = ("tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms")
                run = ("ip", "netns", "exec", where, "tc", "qdisc", "add", "dev", device, "root")
                subprocess.run((*run, *shape), check=True)
        yield [*names, hub]
    finally:
        for name in made:
            _ip("netns", "del", name)


@asynccontextmanager
async def started(host: str, first: str, *arguments: str) -> AsyncIterator[None]:
    """A kvpool process in a namespace, when it has printed its first line."""
    process = await asyncio.create_subprocess_exec(
        *("ip", "netns", "exec", host, sys.executable, "-m", "kvpool", first, *arguments),
        *("--die-with-parent", "--log-level", "error"),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 30)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def measure(names: Sequence[str], mbit: int) -> dict[str, float]:
    """Run in the clients' namespace: start servers, write the chain, and spread it both ways."""
    *servers, hub = names
    budget = mbit * 1e6 / 8 * _SHARE
    blocks = int(8 * budget / (1 << 20))
    config = ClientConfig(masters=["10.77.0.1:7450"], transports=["tcp"], timeout_s=600)
    seconds: dict[str, float] = {}
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(
            started(hub, "master", "--bind", "10.77.0.1:7450", "--insecure")
        )
        for number, name in enumerate(servers):
            arguments = ("--masters", "10.77.0.1:7450", "--capacity", "1GiB", "--id", f"s{number}")
            listen = ("--listen", f"tcp://10.77.0.{10 + number}:7500", "--insecure")
            await stack.enter_async_context(started(name, "server", *arguments, *listen))
        pool = await stack.enter_async_context(await connect(config=config))
        await asyncio.sleep(2.0)  # until all are registered
        assert len(await pool.members()) == len(servers)
        receivers = [f"s{number}" for number in range(1, len(servers))]
        for way in ("one after the other", "spread"):
            chain = await write(pool, way, blocks)
            began = time.perf_counter()
            for to in [receivers] if way == "spread" else [[one] for one in receivers]:
                report = await admin(pool).spread(_NAMESPACE, chain, to=to)
                assert report.complete, report
            seconds[way] = time.perf_counter() - began
        seconds["one copy"] = blocks * (1 << 20) / budget
    return seconds


async def write(pool: Pool, name: str, blocks: int) -> list[bytes]:
    """A chain of blocks of 1 MiB on the first server."""
    chain = [f"{name}/{number}".encode().ljust(32)[:32] for number in range(blocks)]
    options = WriteOptions(_NAMESPACE, 0, visible=True)
    deadline = asyncio.get_running_loop().time() + 600
    for number, digest in enumerate(chain):
        parent = chain[number - 1] if number else ROOT
        data = (digest * (1 << 15),)
        block = WriteBlock(digest, parent, tuple(map(memoryview, data)), 1 << 20)
        (status,) = await pool._writer.write_on("s0", options, [block], deadline)
        assert status.present, status
    return chain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--receivers", type=int, default=15, help="in virtual time")
    parser.add_argument("--namespaces", type=int, metavar="RECEIVERS", default=0)
    parser.add_argument("--mbit", type=int, default=400, help="of each link")
    parser.add_argument("--inside", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        for name, seconds in asyncio.run(measure(arguments.inside, arguments.mbit)).items():
            print(f"{name:>20} {seconds:8.2f} s", flush=True)
    elif arguments.namespaces:
        with hosts(arguments.namespaces + 1, arguments.mbit) as names:
            again = (sys.executable, "-m", "benchmarks.spread", "--mbit", str(arguments.mbit))
            inside = ("ip", "netns", "exec", names[-1], *again, "--inside", *names)
            subprocess.run(inside, check=True)
    else:
        Console().print(virtual(arguments.receivers))


if __name__ == "__main__":
    main()
