"""Worlds of their own for a server's HBM tier: readers that are sent blocks from there.

The server is real (`BlockServer`, its index, its mover), and so is the session that answers a
reader (`kvpool_transports/ucx.py`); its stream is a card, which reads the memory that it is given
piece by piece, when it likes. Meanwhile writers fill both tiers, so that blocks leave them, others
remove blocks, and readers give up. The tier is small memory of the fake device.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch

from kvpool.checksum import block_seeds, checksum
from kvpool.config import ServerConfig
from kvpool.errors import KvpoolError
from kvpool.protocols import DeviceToken, Network, Peer, ReserveRequest, Tier
from kvpool.runtime import Host
from kvpool.server.block_server import BlockServer
from kvpool.server.state.tier_stores import stores_of
from kvpool.testing.invariants import check_invariants
from kvpool.types import ROOT, Cluster, Namespace, ReadStatus, WriteStatus
from kvpool.wire.messages import Data, Read
from kvpool_transports import ucx
from kvpool_transports.streams.stream import Stream
from tests.simulation.loop import SimLoop
from tests.simulation.memory import SimTier
from tests.support.fake_device import FakeGpu, FakeTensor

_NAMESPACE: Final = Namespace("tiers")
_USERS: Final = 4
_CALLS: Final = 12
_ALIGNMENT: Final = 256
_MEMORY, _DEVICE = 24 * _ALIGNMENT, 40 * _ALIGNMENT
_SIZES: Final = (90, 256, 300, 700, 1000)
#: An answer with so many bytes comes from memory, with its frame.
SMALL: Final = 600


class _DeviceTier:
    """Memory of the fake device, to which and from which bytes come piece by piece."""

    name = "hbm"
    alignment = _ALIGNMENT
    survives_restart = False
    capacity = _DEVICE

    def __init__(self, gpu: FakeGpu, rng: random.Random) -> None:
        self._gpu = gpu
        self._rng = rng
        self._memory = gpu.tensor(bytes(_DEVICE), 1)
        self.device_token = DeviceToken("cuda:1", gpu.tensor(b"token 42", 1), b"token 42")

    def device_view(self, offset: int, size: int) -> Any:
        return self._memory[offset : offset + size]

    async def read_into(self, offset: int, buffer: memoryview) -> None:
        for start in range(0, len(buffer), 128):
            await asyncio.sleep(self._rng.expovariate(3000))
            size = len(buffer[start : start + 128])
            view = self.device_view(offset + start, size)
            buffer[start : start + size] = self._gpu.content(view)

    async def write_from(self, offset: int, buffer: memoryview) -> None:
        for start in range(0, len(buffer), 128):
            await asyncio.sleep(self._rng.expovariate(3000))
            part = torch.frombuffer(bytearray(buffer[start : start + 128]), dtype=torch.uint8)
            self.device_view(offset + start, len(part)).behind.copy_(part)

    def close(self) -> None:
        pass


class _Stream:
    """The server's end of a reader's stream."""

    peer_address = ""

    def __init__(self, gpu: FakeGpu, rng: random.Random) -> None:
        self._gpu = gpu
        self._rng = rng
        self.answer: tuple[Data, list[bytes]] | None = None

    async def send_device_token(self, token: DeviceToken, deadline: float) -> None:
        await asyncio.sleep(self._rng.expovariate(1000))

    async def send(self, message: Data, payload: Sequence[Any] = (), *, deadline: float) -> None:
        blocks = []
        for (memory,) in payload:
            data = bytearray()
            while len(data) < len(memory):
                await asyncio.sleep(self._rng.expovariate(2000))
                part = memory[len(data) : len(data) + self._rng.randint(1, 200)]
                data += self._gpu.content(part) if isinstance(part, FakeTensor) else bytes(part)
            blocks.append(bytes(data))
        self.answer = message, blocks

    def abort(self) -> None:
        pass


class TierWorld:
    """One server, and users of it."""

    def __init__(self, seed: int, loop: SimLoop, gpu: FakeGpu) -> None:
        self.rng = random.Random(f"{seed}/device-tiers")
        self.loop = loop
        self.gpu = gpu
        self.truth: dict[bytes, bytes] = {}
        self.sent = 0
        tiers: list[Tier] = [SimTier(_MEMORY, _ALIGNMENT), _DeviceTier(gpu, self.rng)]
        self.server = BlockServer(
            ServerConfig(id="server", masters=[], listen=[]),
            cluster=Cluster(),
            network=cast(Network, None),  # no master: nothing is connected
            transports={},
            tiers=tiers,
            stores=stores_of(tiers, alignment=_ALIGNMENT),
            host=Host("host", "host", "server", lambda: 0),
            rng=self.rng,
        )

    async def play(self) -> None:
        await self.server.start()
        stack = self.server.stack
        async with asyncio.TaskGroup() as group:
            for _ in range(_USERS):
                group.create_task(self._use())
        await asyncio.sleep(1.0)
        for store in stack.stores:
            used = sum(budget.used for budget in store.held.limits)
            if store.held.pins or store.held.reservations or used:
                self.loop.fail("G4: a pin or a reservation has outlived its connection")
        check_invariants(stack)
        await self.server.close()

    async def _use(self) -> None:
        for _ in range(_CALLS):
            kind = self.rng.choices(
                [self._write, self._read, self._remove, self._report], [4, 8, 1, 1]
            )[0]
            await self._call(kind)
            await asyncio.sleep(self.rng.choice((0.0, 0.005, 0.02)))

    async def _call(self, kind: Callable[[Any], Any]) -> None:
        connection = self.server.connect(Peer("user"))
        call = asyncio.ensure_future(kind(connection))
        if self.rng.random() < 0.3:
            await asyncio.sleep(self.rng.expovariate(100))
            call.cancel()
        await asyncio.wait([call])
        connection.close()
        error = None if call.cancelled() else call.exception()
        if error is not None and not isinstance(error, KvpoolError):
            raise error

    # --- users ---------------------------------------------------------------------------------

    async def _write(self, connection: Any) -> None:
        """A chain of blocks; the oldest of both tiers make room for it."""
        count = self.rng.randint(1, 4)
        keys = [(len(self.truth) + i + 1).to_bytes(32, "big") for i in range(count)]
        for key in keys:
            self.truth[key] = self.rng.randbytes(self.rng.choice(_SIZES))
        sizes = [len(self.truth[key]) for key in keys]
        request = ReserveRequest(_NAMESPACE, 0, keys, [ROOT, *keys[:-1]], sizes)
        answers = await connection.reserve(request, deadline=self.loop.time() + 1.0)
        ids, sums = [], []
        for key, answer in zip(keys, answers, strict=True):
            if answer.status is WriteStatus.RESERVED:
                await asyncio.sleep(self.rng.expovariate(2000))
                (view,) = connection.views([answer])
                view[:] = self.truth[key]
                ids.append(answer.id)
                sums.append(_checksum(key, self.truth[key]))
        if ids:
            await connection.seal(ids, sums, visible=False, deadline=self.loop.time() + 1.0)

    async def _read(self, connection: Any) -> None:
        """As a session answers it, to a reader that is on a device or not."""
        if not self.truth:
            return
        stream = _Stream(self.gpu, self.rng)
        session = ucx._DeviceSession(cast(Stream, stream), self.server, mapped=False, scheme="ucx")
        for _ in range(self.rng.randint(1, 3)):
            keys = self.rng.sample(list(self.truth), min(len(self.truth), self.rng.randint(1, 5)))
            await session._read(self._request(keys), connection)
            assert stream.answer is not None
            data, blocks = stream.answer
            hits = [k for k, s in zip(keys, data.statuses, strict=True) if s == ReadStatus.HIT]
            for key, block, sum_ in zip(hits, blocks, data.checksums, strict=True):
                self.sent += 1
                if block != self.truth[key] or sum_ != _checksum(key, block):
                    self.loop.fail("G4: a block was sent with other bytes than its own")

    def _request(self, keys: Sequence[bytes]) -> Read:
        return Read(
            namespace=_NAMESPACE.name,
            parts=1,
            digest_size=32,
            digests=b"".join(keys),
            part=0,
            buffer_sizes=[2000] * len(keys),
            to_device=self.rng.random() < 0.8,
        )

    async def _remove(self, connection: Any) -> None:
        if self.truth:
            await connection.remove(_NAMESPACE, [self.rng.choice(list(self.truth))])

    async def _report(self, connection: Any) -> None:
        """A reader has seen wrong bytes, but the way was at fault."""
        if self.truth:
            keys = self.rng.sample(list(self.truth), min(3, len(self.truth)))
            if any(await connection.report_corruption(_NAMESPACE, 0, keys)):
                self.loop.fail("G1: a block that is right was dropped as corrupt")


def _checksum(key: bytes, data: bytes) -> int:
    (seed,) = block_seeds(_NAMESPACE, 0, [key])
    return checksum(data, seed)
