"""Blocks for memory of CUDA devices, and from it: staged through pinned memory of the host, or
directly, as `client.device_path` says (design: device-memory).

What torch and numpy are needed for is imported with the first such block (design: layout).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvpool import logs
from kvpool.client.attempts import Attempt
from kvpool.client.block_transfers import BlockTransfers, ThroughHost, WriteBlocks, WriteRows
from kvpool.client.buffers import DeviceBlock, HostRows
from kvpool.client.context import ClientContext
from kvpool.client.device_paths import DevicePaths
from kvpool.client.idle_timeout import ServerUnresponsive
from kvpool.client.reader import Reader, ReadState
from kvpool.config import AUTO, DIRECT, STAGED, ClientConfig
from kvpool.errors import ConfigError, DeadlineExceeded, Overloaded, PeerError, Unavailable
from kvpool.protocols import Channel, DeviceReadBlock, DeviceWriteBlock, ReadOptions, WriteOptions
from kvpool.protocols.device_transport import DeviceArrival, SupportsDeviceRead
from kvpool.types import ReadResult, ReadStatus, WriteStatus

if TYPE_CHECKING:
    import torch

    from kvpool.client.device_direct import Devices, DeviceTargets, DirectReads
    from kvpool.client.device_staging import Staging
    from kvpool.client.device_writes import DirectWrites
    from kvpool.device.thread import DeviceFailed

log = logs.get("kvpool.client")


class DeviceTransfers(BlockTransfers):
    """What reads and writes of one client need for devices, made when the first one needs it."""

    def __init__(self, config: ClientConfig, context: ClientContext) -> None:
        self._config = config
        self._context = context
        #: Of reads: `auto` becomes staged once direct reads gave wrong bytes, or their device
        #: failed.
        self.path = config.device_path
        self.paths = DevicePaths(context.servers)
        if self.path == DIRECT and (lack := self.paths.lack):
            raise ConfigError(
                f"setting 'client.device_path' is {DIRECT}: {lack}; or set it to auto or staged"
            )
        if self.path == DIRECT and not self.paths.has_fabric:
            log.warning("device_path is direct, and no lane to devices has RDMA: staged is faster")
        self._staging_logged = False
        self.pinned: Staging | None = None
        self.devices: list[Devices] = []  # of reads, and of writes
        self._reads: DirectReads | None = None
        self._writes: DirectWrites | None = None

    async def read(self, reader: Reader, state: ReadState, blocks: dict[int, DeviceBlock]) -> None:
        # A read that asks a master again comes here twice: what came wrong before still counts.
        if not isinstance(state.asker, DirectRead):
            state.asker = DirectRead(self, self._context, reader, state)
        if self.path != STAGED:
            blocks = await state.asker.read(blocks)
        if blocks:
            await self._read_staged(reader, state, blocks)
            state.asker.distrust()

    async def _read_staged(
        self, reader: Reader, state: ReadState, blocks: Mapping[int, DeviceBlock]
    ) -> None:
        """Through pinned memory of the host."""

        async def fetch_rows(rows: HostRows) -> Mapping[int, ReadResult]:
            for position, row in rows.items():  # rows of the host stand in for the device's
                state.host[position] = row
            await reader.fetch(state, list(rows))
            return {position: state.results[position] for position in rows}

        # A hit counts when the device has the bytes, so results are set again here.
        staged = await self.staging().read(blocks, fetch_rows, state.deadline)
        for position, result in staged.items():
            state.results[position] = result

    async def write(
        self,
        options: WriteOptions,
        names: Mapping[int, tuple[bytes, bytes]],
        blocks: Mapping[int, DeviceBlock],
        write_blocks: WriteBlocks,
        write_rows: WriteRows,
        deadline: float,
    ) -> Mapping[int, WriteStatus]:
        statuses: dict[int, WriteStatus] = {}
        left = dict(blocks)
        if self._config.device_path != STAGED:
            direct = self.direct_writes()
            chosen, left = direct.choose(blocks)
            names = {i: names[i] for i in chosen}
            statuses |= await direct.write(options, names, chosen, write_blocks, deadline)
            left |= {i: block for i, block in chosen.items() if i not in statuses}
        if left:
            statuses |= await self.staging().write(left, write_rows, deadline)
        return statuses

    async def write_to(
        self,
        server: str,
        options: WriteOptions,
        blocks: Sequence[DeviceWriteBlock],
        through_host: ThroughHost,
        deadline: float,
    ) -> list[WriteStatus]:
        return await self.direct_writes().write_to(server, options, blocks, through_host, deadline)

    def close(self) -> None:
        if self.pinned is not None:
            self.pinned.close()
        for devices in self.devices:
            devices.close()

    def staging(self) -> Staging:
        """The pinned memory. Raises Closed: for a call that was running when the pool was
        closed."""
        self._context.check_open()
        if self.pinned is None:
            from kvpool.client.device_staging import Staging

            self.pinned = Staging(self._config.device_staging, self._context.counters)
        return self.pinned

    def direct_reads(self) -> DirectReads:
        """What direct reads need. Raises Closed."""
        self._context.check_open()
        if self._reads is None:
            from kvpool.client.device_direct import DirectReads

            self._reads = DirectReads(self._new_devices(), self._context.counters)
        return self._reads

    def direct_writes(self) -> DirectWrites:
        """What direct writes need. Raises Closed."""
        self._context.check_open()
        if self._writes is None:
            from kvpool.client.device_writes import DirectWrites

            self._writes = DirectWrites(
                self._config.device_path,
                self._context.servers,
                self.paths,
                self._new_devices(),
                self.staging,
                self._context.counters,
            )
        return self._writes

    def log_what_is_staged(self, blocks: int) -> None:
        """Once: who chose `auto` learns that it is of no use for some blocks, and why."""
        if blocks and not self._staging_logged:
            self._staging_logged = True
            why = self.paths.lack or (
                "their servers are on this host, or no network card is known to reach them, or "
                "triton is not installed or still compiles, or they are large and in pieces"
            )
            log.info("blocks for devices are staged", device_path=AUTO, blocks=blocks, why=why)

    def _new_devices(self) -> Devices:
        from kvpool.client.device_direct import Devices

        self.devices.append(Devices())
        return self.devices[-1]


class DirectRead:
    """The blocks of one read that come from the network into devices."""

    def __init__(
        self,
        memory: DeviceTransfers,
        context: ClientContext,
        reader: Reader,
        state: ReadState,
    ) -> None:
        self._memory = memory
        self._servers = context.servers
        self._counters = context.counters
        self._reader = reader
        self._state = state
        #: Memory on devices that blocks are received into, while that is tried.
        self._targets: dict[int, torch.Tensor] = {}
        #: Servers that did not bring a block directly, and may through the host: best last.
        self._indirect: dict[int, list[str]] = {}
        #: Blocks that came directly with wrong bytes.
        self._corrupt: set[int] = set()

    async def read(self, blocks: dict[int, DeviceBlock]) -> dict[int, DeviceBlock]:
        """Returns the blocks that are to be staged instead."""
        # not at the top (design: layout)
        from kvpool.client import device_direct
        from kvpool.device.thread import DeviceFailed

        memory, state = self._memory, self._state
        if memory.path == DIRECT:
            device_direct.check_sizes(blocks, "read")
            chosen = blocks
        else:
            chosen = {
                i: block
                for i, block in blocks.items()
                if device_direct.fits(block)
                and memory.paths.reach(state.candidates[i][-1], only_fabrics=True)
                and memory.direct_reads().is_ready(block)
            }
            memory.log_what_is_staged(len(blocks) - len(chosen))
        if not chosen:
            return blocks
        candidates = {i: list(state.candidates[i]) for i in chosen}
        try:
            found = await memory.direct_reads().read(chosen, self._fetch, state.deadline)
        except DeviceFailed as error:
            if memory.path == DIRECT:
                raise
            self._give_up(candidates, error)
            return blocks
        for position, result in found.items():
            state.results[position] = result
        left = {i: block for i, block in blocks.items() if i not in chosen}
        if self._corrupt and memory.path == AUTO:
            await self._acquit_the_way()
        for position, servers in self._indirect.items():
            if not state.results[position].status.hit:
                state.candidates[position] += servers
                left[position] = blocks[position]
        self._indirect.clear()
        return left

    def takes(self, position: int) -> bool:
        return position in self._targets

    async def ask(self, attempt: Attempt, hedged: bool) -> list[ReadResult]:
        """As `Reader._ask`; the blocks are verified once they are there."""
        reader, state = self._reader, self._state
        server, positions, _ = attempt
        blocks = [DeviceReadBlock(state.digests[i], self._targets[i]) for i in positions]
        only_fabrics = self._memory.path == AUTO
        try:
            async with reader.timer(state, attempt, hedged) as timer:
                options = state.options._replace(idle_timeout=timer)
                arrivals = await self._memory.paths.call(
                    server,
                    functools.partial(_receive, options, blocks, state.deadline),
                    state.deadline,
                    only_fabrics=only_fabrics,
                    counted_as="read",
                )
        except (Unavailable, PeerError, Overloaded) as error:
            if isinstance(error, ServerUnresponsive):
                self._memory.paths.avoid(server)  # the lane may be at fault
            elif only_fabrics and not isinstance(error, DeadlineExceeded):
                self._note_indirect(server, positions)
            return reader.failed(state, attempt, hedged, error)
        # Outside of the timer, and no error of a device is one of the server.
        verify = self._memory.direct_reads().verify
        try:
            results = await verify(options, blocks, arrivals, state.deadline)
        except DeadlineExceeded:
            return [ReadResult(ReadStatus.DEADLINE)] * len(positions)
        wrong = [
            i for i, one in zip(positions, results, strict=True) if one.status is ReadStatus.CORRUPT
        ]
        self._counters["direct_corrupt"] += len(wrong)
        if only_fabrics and wrong:
            # Is the server's copy wrong, or the way to this device? The next look is the host's.
            self._corrupt.update(wrong)
            self._note_indirect(server, wrong)
        return results

    def distrust(self) -> None:
        """Bytes that were wrong on the device and right on the host: the server is well, and the
        way to the device is not."""
        wrong = [i for i in self._corrupt if self._state.results[i].status.hit]
        if wrong and self._memory.path == AUTO:
            self._memory.path = STAGED
            log.error(
                "direct reads gave wrong bytes, which were not used: staged from now on",
                blocks=len(wrong),
                advice="make gpu-acceptance, and client.device_path: staged",
            )

    # --- inside --------------------------------------------------------------------------

    async def _fetch(self, targets: DeviceTargets) -> Mapping[int, ReadResult]:
        self._targets.update(targets)
        try:
            await self._reader.fetch(self._state, list(targets))
        finally:
            for position in targets:
                del self._targets[position]
        return {position: self._state.results[position] for position in targets}

    def _give_up(self, candidates: Mapping[int, list[str]], error: DeviceFailed) -> None:
        """All once more, through the host: what has come is in rows that nobody has verified."""
        if self._memory.path != STAGED:
            self._memory.path = STAGED
            log.warning("direct reads failed: staged from now on", error=str(error))
        for position, servers in candidates.items():
            self._state.candidates[position] = servers
            self._state.results[position] = ReadResult(ReadStatus.DEADLINE)
        self._indirect.clear()
        self._corrupt.clear()

    async def _acquit_the_way(self) -> None:
        """Have servers look at their copies before these are read once more: then a wrong one may
        be gone, and another right, and nobody could say what was wrong."""
        confirmed = await self._reader.report_corruption(self._state)
        self._state.corrupt.clear()
        self._corrupt = {i for i in self._corrupt if self._state.digests[i] not in confirmed}

    def _note_indirect(self, server: str, positions: Sequence[int]) -> None:
        for position in positions:
            self._indirect.setdefault(position, []).insert(0, server)


async def _receive(
    options: ReadOptions, blocks: Sequence[DeviceReadBlock], deadline: float, channel: Channel
) -> list[DeviceArrival]:
    if not isinstance(channel, SupportsDeviceRead):
        raise Overloaded("this transport receives nothing into memory on devices")
    return await channel.read_to_device(options, blocks, deadline=deadline)
