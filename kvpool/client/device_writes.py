"""Blocks that a transport sends from the memory of a CUDA device, with checksums made there.

A block in one row is sent from that row. Blocks in several rows, as engines have them, are gathered
in memory of this client on the same device, all of a round in one launch, and sent from there. The
device hashes them in one more launch; no byte is in the host's memory (design: device-memory).

The host is the way round: where no such path leads to a server, or it fails, `auto` copies the
blocks for that server to pinned memory and sends them from there.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from kvpool import logs, removals
from kvpool.checksum import block_seeds
from kvpool.client import device_direct as direct
from kvpool.client.buffers import DeviceBlock, HostRows
from kvpool.client.device_arena import until
from kvpool.client.device_direct import Devices, DeviceTargets, Round
from kvpool.client.device_paths import DevicePaths
from kvpool.client.device_staging import wait_for_stream
from kvpool.client.servers import Servers
from kvpool.config import AUTO, DIRECT
from kvpool.device.checksum import copy_rows, unsigned
from kvpool.device.lane import beside
from kvpool.device.thread import DeviceFailed
from kvpool.errors import DeadlineExceeded, KvpoolError, Overloaded, PeerError, Unavailable
from kvpool.protocols import Channel, DeviceToken, DeviceWriteBlock, WriteOptions
from kvpool.protocols.device_transport import BlocksToHost, SupportsDeviceWrite
from kvpool.types import WriteBlock, WriteStatus

if TYPE_CHECKING:
    import torch

    from kvpool.client.device_staging import Staging

log = logs.get("kvpool.client")

#: Of the first batch that a server stores, so many blocks are verified there.
_CHECKED: Final = 8

#: Place blocks and write them to servers; one status each.
WriteBlocks: TypeAlias = Callable[[Sequence[DeviceWriteBlock]], Awaitable[list[WriteStatus]]]
#: Write blocks to one server, from memory of the host.
ThroughHost: TypeAlias = Callable[[Sequence[WriteBlock]], Awaitable[list[WriteStatus]]]


class DirectWrites:
    """Direct writes of one client, with this `client.device_path`: direct or auto."""

    def __init__(
        self,
        path: str,
        servers: Servers,
        paths: DevicePaths,
        devices: Devices,
        staging: Callable[[], Staging],
        counters: Counter[str],
    ) -> None:
        self._path = path
        self._servers = servers
        self._paths = paths
        self._devices = devices
        self._staging = staging
        self._counters = counters
        #: Servers that had the right bytes when they were asked.
        self._checked: set[str] = set()
        #: `auto` has seen wrong bytes, or a device that fails: all is staged.
        self._distrusted = False
        self._reasons: set[tuple[str, str]] = set()

    def choose(
        self, blocks: Mapping[int, DeviceBlock]
    ) -> tuple[dict[int, DeviceBlock], dict[int, DeviceBlock]]:
        """The blocks to write directly, and those to stage. Raises TooLarge where it may not
        stage."""
        if self._path == DIRECT:
            direct.check_sizes(blocks, "write")
            return dict(blocks), {}
        if self._distrusted or not self._paths.reach_some(only_fabrics=True):
            return {}, dict(blocks)
        chosen = {
            i: block
            for i, block in blocks.items()
            if direct.fits(block) and self._devices.is_ready(block)
        }
        return chosen, {i: block for i, block in blocks.items() if i not in chosen}

    async def write(
        self,
        options: WriteOptions,
        names: Mapping[int, tuple[bytes, bytes]],
        blocks: Mapping[int, DeviceBlock],
        write_blocks: WriteBlocks,
        deadline: float,
    ) -> Mapping[int, WriteStatus]:
        """Have `write_blocks` send blocks, in order, once the device has gathered and hashed them.

        `names` are their digests and parents. However it ends, nothing reads the blocks' memory any
        more. Raises Unavailable when a device fails; with `auto` the blocks that are left then have
        no status, and may be staged.
        """
        done: dict[int, WriteStatus] = {}
        try:
            # Before the first byte: its owner's work may still fill that memory.
            await wait_for_stream(blocks.values(), deadline)
            for one in direct.rounds(blocks):
                async with AsyncExitStack() as stack:
                    places: DeviceTargets = {}
                    try:
                        if one.in_rows:
                            memory = await stack.enter_async_context(
                                self._devices.scratch(one.device, one.room, deadline)
                            )
                            places = direct.places_in(memory, one.in_rows)
                        ready = await self._gather(options, names, blocks, one, places, deadline)
                    except DeviceFailed as error:
                        if self._path != AUTO:
                            raise
                        self._give_up(error)
                        return done
                    # The scratch memory is this round's until no transfer uses it any more.
                    written = await write_blocks(ready)
                    done.update(zip(one.numbers, written, strict=True))
        except DeadlineExceeded:
            pass
        return dict.fromkeys(blocks, WriteStatus.DEADLINE) | done

    async def write_to(
        self,
        server: str,
        options: WriteOptions,
        blocks: Sequence[DeviceWriteBlock],
        through_host: ThroughHost,
        deadline: float,
    ) -> list[WriteStatus]:
        """`Channel.write` to one server, directly, or with `auto` through the host where that is
        no way. Raises what `DevicePaths.call` and `through_host` raise."""
        auto = self._path == AUTO
        if auto and self._distrusted:
            return await self._through_host(blocks, through_host, deadline)
        try:
            token = await self._devices.token(direct.tensor_of(blocks[0]).device, deadline)
            send = partial(_send, options, blocks, token, self._to_host(deadline), deadline)
            statuses = await self._paths.call(
                server, send, deadline, only_fabrics=auto, counted_as="write"
            )
        except DeadlineExceeded:
            raise
        except (Unavailable, PeerError, Overloaded) as error:
            if not auto:
                raise
            self._note(server, error, len(blocks))
            return await self._through_host(blocks, through_host, deadline)
        statuses = await self._check(server, options, blocks, statuses, deadline)
        for block, status in zip(blocks, statuses, strict=True):
            if status is WriteStatus.STORED:
                self._counters["direct_write_bytes"] += block.size
        if auto and self._distrusted:
            return await self._again(blocks, statuses, through_host, deadline)
        return statuses

    # --- inside --------------------------------------------------------------------------

    async def _gather(
        self,
        options: WriteOptions,
        names: Mapping[int, tuple[bytes, bytes]],
        blocks: Mapping[int, DeviceBlock],
        one: Round,
        places: DeviceTargets,
        deadline: float,
    ) -> list[DeviceWriteBlock]:
        """The blocks of a round, each in one row, with its checksum. When it returns the device has
        done its work on them."""
        whole = [places.get(number, blocks[number].rows[0]) for number in one.numbers]
        digests = [names[number][0] for number in one.numbers]
        seeds = block_seeds(options.namespace, options.part, digests)

        def work() -> torch.Tensor:  # in the thread: an engine has thousands of rows in a round
            pairs = [
                pair
                for number in one.in_rows
                for pair in beside(blocks[number].rows, places[number])
            ]
            copy_rows([row for row, _ in pairs], [place for _, place in pairs])
            return direct.hash_rows(whole, seeds)

        async with until(deadline):
            checksums = await self._devices.thread(one.device).run(work, unsigned)
        return [
            DeviceWriteBlock(*names[number], memory, checksum)
            for number, memory, checksum in zip(one.numbers, whole, checksums, strict=True)
        ]

    def _to_host(self, deadline: float) -> BlocksToHost:
        async def copy(blocks: Sequence[DeviceWriteBlock]) -> list[memoryview]:
            tensors = [direct.tensor_of(block) for block in blocks]
            thread = self._devices.thread(tensors[0].device)
            try:
                async with until(deadline):
                    return await thread.run(partial(_copies, tensors), list)
            except Unavailable as error:  # of the device: the server and the path to it are well
                raise Overloaded(str(error)) from None

        return copy

    async def _through_host(
        self, blocks: Sequence[DeviceWriteBlock], through_host: ThroughHost, deadline: float
    ) -> list[WriteStatus]:
        """By the pinned memory of this client, in rounds."""

        async def send(rows: HostRows) -> Mapping[int, WriteStatus]:
            chosen = [
                WriteBlock(blocks[i].digest, blocks[i].parent, pieces, blocks[i].size)
                for i, pieces in rows.items()
            ]
            return dict(zip(rows, await through_host(chosen), strict=True))

        whole = {i: DeviceBlock((direct.tensor_of(b),), b.size, ()) for i, b in enumerate(blocks)}
        statuses = await self._staging().write(whole, send, deadline)
        return [statuses[i] for i in range(len(blocks))]

    async def _check(
        self,
        server: str,
        options: WriteOptions,
        blocks: Sequence[DeviceWriteBlock],
        statuses: list[WriteStatus],
        deadline: float,
    ) -> list[WriteStatus]:
        """Have the server verify some of the first blocks that it has stored directly.

        Wrong ones are gone then, and REFUSED. Every reader would find them, too; but a way that
        changes bytes would fill the pool with blocks that nobody can use, and nobody would know.
        """
        stored = [i for i, status in enumerate(statuses) if status is WriteStatus.STORED]
        if server in self._checked or not stored:
            return statuses

        async def wrong(positions: Sequence[int]) -> list[int]:
            digests = [blocks[i].digest for i in positions]
            ask = partial(_ask, options, digests, deadline)
            flags = await self._servers.call(server, ask, deadline)
            return [i for i, is_wrong in zip(positions, flags, strict=True) if is_wrong]

        try:
            bad = await wrong(stored[:_CHECKED])
        except (Unavailable, PeerError, Overloaded):
            return statuses  # the next batch is asked about
        if not bad:
            self._checked.add(server)
            return statuses
        with contextlib.suppress(Unavailable, PeerError, Overloaded):
            bad += await wrong(stored[_CHECKED:])
        self._counters["direct_corrupt"] += len(bad)
        self._distrusted = True
        log.error(
            "direct writes gave wrong bytes, which the server has dropped",
            server=server,
            blocks=len(bad),
            advice="make gpu-acceptance, and client.device_path: staged",
        )
        return [WriteStatus.REFUSED if i in bad else one for i, one in enumerate(statuses)]

    async def _again(
        self,
        blocks: Sequence[DeviceWriteBlock],
        statuses: Sequence[WriteStatus],
        through_host: ThroughHost,
        deadline: float,
    ) -> list[WriteStatus]:
        """The blocks that came wrong once more, through the host."""
        found = list(statuses)
        wrong = [i for i, status in enumerate(statuses) if status is WriteStatus.REFUSED]
        if wrong:
            chosen = [blocks[i] for i in wrong]
            again = await self._through_host(chosen, through_host, deadline)
            for position, status in zip(wrong, again, strict=True):
                found[position] = status
        return found

    def _give_up(self, error: DeviceFailed) -> None:
        if not self._distrusted:
            self._distrusted = True
            log.warning("direct writes failed: staged from now on", error=str(error))

    def _note(self, server: str, error: KvpoolError, blocks: int) -> None:
        """Count what goes through the host, and say why, once for a server and reason."""
        self._counters["direct_writes_staged"] += blocks
        why = str(error)
        if (server, why) not in self._reasons and len(self._reasons) < _REASONS_MAX:
            self._reasons.add((server, why))
            log.info("blocks from devices are staged", device_path=AUTO, server=server, why=why)


#: Reasons that are written down; a server chooses some of these words.
_REASONS_MAX: Final = 64


async def _send(
    options: WriteOptions,
    blocks: Sequence[DeviceWriteBlock],
    token: DeviceToken,
    to_host: BlocksToHost,
    deadline: float,
    channel: Channel,
) -> list[WriteStatus]:
    if not isinstance(channel, SupportsDeviceWrite):
        raise Overloaded("this transport sends nothing from memory on devices")
    return await channel.write_from_device(options, blocks, token, to_host, deadline=deadline)


async def _ask(
    options: WriteOptions, digests: Sequence[bytes], deadline: float, channel: Channel
) -> list[bool]:
    if not digests:
        return []
    return await removals.report_corruption(
        channel, options.namespace, options.part, digests, deadline=deadline
    )


def _copies(tensors: Sequence[torch.Tensor]) -> list[memoryview]:
    return [tensor.cpu().numpy().data for tensor in tensors]
