"""Any messages in any order: the master answers or raises KvpoolError; its directory is valid.

An input is a list of records, each a type byte, a length and a body. Type 0 moves the clock.
"""

from __future__ import annotations

import asyncio

import atheris

with atheris.instrument_imports(include=["kvpool"]):
    from kvpool.config import MasterConfig
    from kvpool.errors import KvpoolError
    from kvpool.master.service import Master
    from kvpool.net import requests
    from kvpool.types import ServerStats
    from tests.support import messages

from kvpool.testing.invariants import check_invariants
from tests.fuzz.driver import Record, fuzz
from tests.wire.offline import Loop, NoNetwork
from tests.wire.samples import KEYS, SAMPLES, TOKEN

CLUSTER = requests.cluster_id("default")


def split(data: bytes) -> list[Record]:
    parts = []
    while len(data) >= 3:
        size = int.from_bytes(data[1:3], "little")
        parts.append((data[0], data[3 : 3 + size]))
        data = data[3 + size :]
    return parts


def join(parts: list[Record]) -> bytes:
    return b"".join(
        bytes([number]) + len(body).to_bytes(2, "little") + body
        for number, body in parts
        if len(body) < 1 << 16
    )


def target(data: bytes) -> None:
    master = Master(MasterConfig(), NoNetwork())
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    for number, body in split(data):
        if number == 0:
            loop.clock.now += len(body)
            master.directory.servers.tick(loop.time())
            master.sweeper.step(1 + len(body))
        else:
            ask(master, requests.encode_envelope(number, CLUSTER, 1, body))
    check_invariants(master.directory)


def ask(master: Master, message: bytes) -> None:
    """Handle one message as the control plane does."""
    try:
        envelope = requests.decode_envelope(message, CLUSTER)
        type, body = master.handle(envelope.type, envelope.body)
        requests.encode_envelope(type, CLUSTER, envelope.id, body)
    except KvpoolError:
        pass


def seeds() -> list[bytes]:
    """Each request by itself, and the messages of two servers that share blocks."""
    requests = [messages.encode(sample) for sample in SAMPLES if messages.TYPES[type(sample)] > 31]
    here, gone = (messages.BlockChanges(**KEYS, part=0, tier=0, status=status) for status in (0, 2))
    life: list[Record] = []
    for server in ("s", "t"):
        story = (
            messages.Register(server, 1, TOKEN, "h", ["tcp://x:1"], ["dram"], 1 << 30),
            messages.Inventory(server, 1, TOKEN, 1, 0, False, [here]),
            messages.Inventory(server, 1, TOKEN, 1, 1, True, []),
            messages.Announce(server, 1, TOKEN, 2, [gone, here]),
            messages.Heartbeat(server, 1, TOKEN, ServerStats(2, 3, 4, 5, 6, 0.5, {"a": 1})),
            messages.Place(**KEYS, parent=b"", size=10, host="h", copies=1),
            messages.Explain(**KEYS),
            messages.Namespaces(),
            messages.Find(**KEYS, prefix=True, session="chat"),
            messages.Demands(),
        )
        life += [*map(messages.encode, story), (0, bytes(1))]
    life += [messages.encode(messages.Leave("s", 1, TOKEN)), (0, bytes(250)), *requests]
    return [*(join([request]) for request in requests), join(life)]


async def main() -> None:
    fuzz("master", target, seeds(), split, join)


if __name__ == "__main__":
    asyncio.Runner(loop_factory=Loop).run(main())
