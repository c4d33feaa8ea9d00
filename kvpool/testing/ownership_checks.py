"""What a channel owns, and what it passes on to a server, and back, beside blocks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any, Final

from kvpool.protocols import Peer, ReadOptions, SupportsZeroCopyView, WriteOptions
from kvpool.testing.harness import (
    LARGE,
    NAMESPACE,
    NotDeclared,
    Stage,
    TransportCheck,
    blocks,
    describe,
    write_blocks,
)

#: Turns of the loop in which a socket that is closed is gone, on both sides.
_TURNS: Final = 50
#: Once in a while another thread opens a file just then.
_ATTEMPTS: Final = 3


def _threads() -> set[threading.Thread]:
    """But for those of the loop's own executor, which stay."""
    of_loops = ("asyncio_", "uvloop_")
    return {one for one in threading.enumerate() if not one.name.startswith(of_loops)}


def _mapped() -> int:
    """Mappings that this process shares with others."""
    with open("/proc/self/maps") as file:
        return sum(line.split()[1].endswith("s") for line in file)


def _descriptors() -> set[tuple[str, str]]:
    """Their numbers, and what they are of."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of this list itself
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


@TransportCheck
async def what_a_channel_owns_is_free_when_it_is_closed(stage: Stage) -> None:
    """When `close` returns, not some time after: its memory and threads, and nothing goes on to
    close it. Its descriptors follow within some turns of the loop."""
    await _left_by_a_channel(stage, "first")  # what is made once and kept is no leak
    for number in range(_ATTEMPTS):
        await asyncio.sleep(0.1)
        left = await _left_by_a_channel(stage, f"attempt {number}")
        if not left:
            return
    stage.expect(False, "nothing of a channel to be left when it is closed", left)


async def _left_by_a_channel(stage: Stage, name: str) -> str:
    """What is there after a channel's life that was not before; empty: nothing."""
    threads, mapped, descriptors = _threads(), _mapped(), _descriptors()
    channel = await stage.connect()
    data = blocks(name, 3, LARGE)
    await stage.stored(channel, data)
    await stage.holds(channel, data)
    tasks = asyncio.all_tasks()
    await channel.close()
    if new := asyncio.all_tasks() - tasks:
        return f"{new} go on"
    if new_threads := _threads() - threads:
        return f"{new_threads} run"
    if _mapped() > mapped:
        return "its memory is mapped"
    for _ in range(_TURNS):
        if not (new_descriptors := _descriptors() - descriptors):
            return ""
        await asyncio.sleep(0)
    return f"{new_descriptors} are open after {_TURNS} turns of the loop"


def _beside(stage: Stage, change: Callable[[Any], None]) -> None:
    """Change each connection that is made from now on."""
    connect = stage.recorder.connect

    def changed(peer: Peer) -> Any:
        connection = connect(peer)
        change(connection)
        return connection

    stage.recorder.connect = changed  # type: ignore[method-assign]


@TransportCheck
async def a_writer_hears_whether_its_blocks_are_alone(stage: Stage) -> None:
    """`on_alone` hears what the server's masters say, once for each answer by which blocks are
    stored, however the bytes came."""
    for alone in (True, False):

        def say(connection: Any, value: bool = alone) -> None:
            says = {"alone": property(lambda _: value)}
            connection.__class__ = type("Says", (type(connection),), says)

        _beside(stage, say)
        channel = await stage.connect()
        for size in (100, LARGE):
            heard: list[bool] = []
            options = WriteOptions(NAMESPACE, 0, True, on_alone=heard.append)
            data = write_blocks(blocks(f"alone {alone} {size}", 2, size))
            for again, wanted in (("a write", [alone]), ("one of stored blocks", [])):
                heard.clear()
                await channel.write(options, data, deadline=stage.within())
                what = f"{wanted} from {again}, of {size} bytes"
                stage.expect(heard == wanted, what, describe(heard))


@TransportCheck
async def a_server_knows_how_long_it_may_wait(stage: Stage) -> None:
    """A visible write waits for masters until the caller's deadline, however the bytes came."""
    given: list[float] = []

    def listen(connection: Any) -> None:
        seal = connection.seal

        async def heard(*asked: Any, deadline: float, **more: Any) -> Any:
            given.append(deadline)
            return await seal(*asked, deadline=deadline, **more)

        connection.seal = heard

    _beside(stage, listen)
    channel = await stage.connect()
    for size in (100, LARGE):
        deadline = stage.within()
        await stage.stored(channel, blocks(f"sealed {size}", 2, size))
        late_s = given.pop() - deadline
        stage.expect(-2.0 < late_s < 2.0, "the caller's deadline", f"{late_s:+g} s off")


@TransportCheck
async def a_view_is_pinned_as_one(stage: Stage) -> None:
    """The server knows what a client may hold for as long as it likes, and bounds that apart."""
    asked: list[bool] = []

    def listen(connection: Any) -> None:
        pin = connection.pin

        async def heard(*wanted: Any, view: bool = False, **more: Any) -> Any:
            asked.append(view)
            return await pin(*wanted, view=view, **more)

        connection.pin = heard

    _beside(stage, listen)
    channel = await stage.connect()
    if not isinstance(channel, SupportsZeroCopyView):
        raise NotDeclared("this channel shows no memory in place")
    data = blocks("as a view", 2, 5000)
    await stage.stored(channel, data)
    await stage.holds(channel, data)
    options = ReadOptions(NAMESPACE, 0)
    async with channel.read_view(options, list(data), deadline=stage.within()):
        pass
    stage.expect(asked == [False, True], "a read, then a view", describe(asked))
