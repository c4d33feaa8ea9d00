"""How calls, channels and listeners end: in time, with one of our errors, and leaving nothing.

These are the promises that are easy to miss, because nothing is wrong until something goes wrong.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import threading
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from kvpool import removals
from kvpool.errors import ConfigError, DeadlineExceeded, Overloaded, PeerError, Unavailable
from kvpool.protocols import Channel, ReadOptions, SupportsZeroCopyView, View
from kvpool.testing.harness import (
    CLUSTER,
    LARGE,
    NAMESPACE,
    PROMPT_S,
    NotDeclared,
    Stage,
    TransportCheck,
    blank,
    blocks,
    describe,
    digest,
)
from kvpool.types import Cluster, ReadStatus

#: Loop steps after which calls are cancelled or cut off: each early one, then further apart.
STEPS: Final = (*range(12), 15, 20, 30, 50, 80, 130, 210, 340, 550)


async def steps(count: int) -> None:
    """Let the loop run so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def cut_off(call: Coroutine[Any, Any, Any], after: int) -> tuple[bool, object]:
    """Cancel a call after so many steps: whether it had ended before, and what it ended with."""
    task = asyncio.ensure_future(call)
    await steps(after)
    ended = task.done()
    task.cancel()
    outcomes: list[object] = await asyncio.gather(task, return_exceptions=True)
    return ended, outcomes[0]


# --- deadlines -------------------------------------------------------------------------------


def every_call(stage: Stage, channel: Channel, name: str, within_s: float) -> list[Any]:
    """One call of each kind that asks the server to do something."""
    deadline = stage.within(within_s)
    return [
        stage.write(channel, blocks(name, 2, 1000), within_s=within_s),
        removals.remove(channel, NAMESPACE, [digest(name)], deadline=deadline),
        removals.report_corruption(channel, NAMESPACE, 0, [digest(name)], deadline=deadline),
    ]


@TransportCheck
async def a_silent_server_costs_a_deadline(stage: Stage) -> None:
    """Calls end by their deadline, and what the server had reserved for them is free again."""
    channel = await stage.connect()
    stage.recorder.answering.clear()
    started = stage.within(0)
    calls = [asyncio.ensure_future(c) for c in every_call(stage, channel, "late", 0.15)]
    for outcome in await stage.promptly(calls, "by its deadline"):
        stage.expect(isinstance(outcome, DeadlineExceeded), "DeadlineExceeded", describe(outcome))
    took = stage.within(0) - started
    stage.expect(took > 0.1, "the server to be given its time", f"they took {took:.3f} s of 0.15")
    await stage.nothing_held("once a call's deadline is over, though the server still works on it")
    stage.recorder.answering.set()
    await stage.stored(channel, blocks("late", 2, 1000))


@TransportCheck
async def nobody_there_is_unavailable(stage: Stage) -> None:
    """Connecting to an address where no server listens ends with Unavailable, by its deadline."""
    listener = await stage.listen()
    await listener.close()
    started = stage.within(0)
    dialling = stage.client_transport.connect(
        listener.address, cluster=stage.recorder.cluster, client="late", deadline=stage.within(0.5)
    )
    await stage.raises(Unavailable, dialling, "dialling where nobody listens")
    took = stage.within(0) - started
    stage.expect(took < 0.5 + PROMPT_S, "an end by the deadline", f"it took {took:.2f} s")


# --- cancelled calls -------------------------------------------------------------------------


@TransportCheck
async def a_cancelled_read_leaves_nothing(stage: Stage) -> None:
    """Cancelled at many points: no pin, and no later byte in the caller's buffers."""
    channel = await stage.connect()
    size = 3 << 20  # takes longer to copy than the end of a cancelled call
    data = blocks("read", 3, size)
    await stage.stored(channel, data)
    hardly_begun: list[bytearray] = []
    for after in STEPS:
        buffers = [blank(size) for _ in data]
        hardly_begun += buffers if after < 3 else []
        ended, outcome = await cut_off(stage.read(channel, list(data), buffers), after)
        fine = isinstance(outcome, asyncio.CancelledError | list)
        stage.expect(fine, "CancelledError or a result from a cancelled read", describe(outcome))
        for buffer in buffers:
            buffer[:] = blank(size)
        await stage.nothing_held("after a read was cancelled")
        await asyncio.sleep(0.002)
        untouched = all(buffer == blank(size) for buffer in buffers)
        stage.expect(untouched, "no byte in the buffers after the call has ended")
        if ended:
            break
    await stage.holds(channel, data)
    untouched = all(buffer == blank(size) for buffer in hardly_begun)
    stage.expect(untouched, "no byte in the buffers long after the call has ended")


@TransportCheck
async def a_cancelled_write_leaves_nothing(stage: Stage) -> None:
    """Cancelled at many points: a block is there as it was, or not at all, and nothing is held."""
    channel = await stage.connect()
    for after in STEPS:
        data = blocks(f"write after {after}", 3, LARGE)
        sources = {key: bytearray(value) for key, value in data.items()}
        ended, outcome = await cut_off(stage.write(channel, sources), after)
        fine = isinstance(outcome, asyncio.CancelledError | list)
        stage.expect(fine, "CancelledError or a result from a cancelled write", describe(outcome))
        for source in sources.values():
            source[:] = blank(LARGE)  # the memory is the caller's again
        await stage.nothing_held("after a write was cancelled")
        here = {
            key: data[key] for key in data if stage.store.index.peek(NAMESPACE, 0, key) is not None
        }
        if here:
            await stage.holds(channel, here)
        if ended:
            break
    await stage.stored(channel, blocks("afterwards", 3, LARGE))


@TransportCheck
async def the_server_sees_that_a_caller_gave_up(stage: Stage) -> None:
    """Also while it works on the call: what it has reserved is free when the caller leaves."""
    channel = await stage.connect()
    stage.recorder.answering.clear()
    calls = [asyncio.ensure_future(c) for c in every_call(stage, channel, "given up", 10)]
    await stage.eventually(
        lambda: stage.store.held.reservations == 2,
        "the write to be heard",
        lambda: "it was not",
    )
    for call in calls:
        call.cancel()
    for outcome in await stage.promptly(calls, "when it is cancelled"):
        cancelled = isinstance(outcome, asyncio.CancelledError)
        stage.expect(cancelled, "CancelledError", describe(outcome))
    await stage.nothing_held("after the caller has left, though the server still works on it")
    stage.recorder.answering.set()
    await stage.stored(channel, blocks("given up", 2, 1000))


@TransportCheck
async def a_cancelled_connect_leaves_nothing(stage: Stage) -> None:
    """Cancelled at many points: the server keeps no connection open."""
    for after in STEPS:
        ended, outcome = await cut_off(stage.connect(), after)
        fine = ended or isinstance(outcome, asyncio.CancelledError)
        stage.expect(fine, "CancelledError from a cancelled connect", describe(outcome))
        if ended:
            break
        await stage.eventually(
            lambda: not stage.recorder.open,
            "no connection of a client whose `connect` was cancelled",
            lambda: f"{len(stage.recorder.open)} are open",
        )


# --- either side closes ----------------------------------------------------------------------


def running(stage: Stage, channel: Channel, name: str) -> list[asyncio.Task[Any]]:
    """Large calls in progress, both ways."""
    old = list(blocks("old", 3, LARGE))
    return [
        asyncio.ensure_future(stage.write(channel, blocks(f"{name}/1", 1, 6 << 20))),
        asyncio.ensure_future(stage.write(channel, blocks(f"{name}/2", 3, LARGE))),
        asyncio.ensure_future(stage.read(channel, old, [blank(LARGE) for _ in old])),
    ]


def expect_ended(stage: Stage, outcomes: Sequence[object], when: str) -> None:
    """Each has its result, or Unavailable."""
    for outcome in outcomes:
        fine = isinstance(outcome, list | Unavailable)
        stage.expect(fine, f"a result or Unavailable {when}", describe(outcome))


async def expect_unavailable(stage: Stage, channel: Channel, when: str) -> None:
    """Every call raises Unavailable now."""
    reading = stage.read(channel, [digest(1)], [blank(1)])
    calls = [*every_call(stage, channel, "too late", 1.0), reading]
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        expected = f"Unavailable from a call {when}"
        stage.expect(isinstance(outcome, Unavailable), expected, describe(outcome))
    if isinstance(channel, SupportsZeroCopyView):
        looking = look(stage, channel, [digest(1)]).__aenter__()
        await stage.raises(Unavailable, looking, f"`read_view` {when}")


@TransportCheck
async def a_closed_listener_ends_its_calls(stage: Stage) -> None:
    """A server that goes in mid-call is Unavailable, never an OSError; so is every later call."""
    await stage.stored(await stage.connect(), blocks("old", 3, LARGE))
    for after in (0, 1, 2, 4, 8, 16, 40, 100):
        listener = await stage.listen()
        channel = await stage.connect(listener.address)
        calls = running(stage, channel, f"cut after {after}")
        await steps(after)
        await listener.close()
        outcomes = await stage.promptly(calls, "when the server has closed")
        expect_ended(stage, outcomes, "from a call whose server has closed")
        await expect_unavailable(stage, channel, "to a server that has closed")


@TransportCheck
async def a_closed_listener_ends_calls_it_has_not_answered(stage: Stage) -> None:
    """Calls end at once when the server closes; they do not wait until their deadline."""
    listener = await stage.listen()
    channel = await stage.connect(listener.address)
    stage.recorder.answering.clear()
    calls = [asyncio.ensure_future(c) for c in every_call(stage, channel, "unanswered", 10)]
    await stage.eventually(
        lambda: stage.store.held.reservations == 2,
        "the write to be heard",
        lambda: "it was not",
    )
    await listener.close()
    for outcome in await stage.promptly(calls, "when the server has closed"):
        stage.expect(isinstance(outcome, Unavailable), "Unavailable", describe(outcome))


@TransportCheck
async def abort_ends_running_calls(stage: Stage) -> None:
    """Each has its result or Unavailable, wherever it was."""
    await stage.stored(await stage.connect(), blocks("old", 3, LARGE))
    for after in (0, 1, 2, 4, 8, 16, 40, 100, 200):
        channel = await stage.connect()
        calls = running(stage, channel, f"aborted after {after}")
        await steps(after)
        channel.abort()
        outcomes = await stage.promptly(calls, "when its channel is aborted")
        expect_ended(stage, outcomes, "from a call whose channel was aborted")
        await stage.nothing_held("after an abort")
        await expect_unavailable(stage, channel, "on an aborted channel")


@TransportCheck
async def an_abort_stops_its_copies(stage: Stage) -> None:
    """When the server notices the end of a write, nothing writes into the reserved extents any
    more: the server reuses them."""
    for after in (0, 5, 20, 40, 70):
        channel = await stage.connect()
        data = blocks(f"half written {after}", 1, 12 << 20)
        writing = asyncio.ensure_future(stage.write(channel, data))
        while not stage.store.held.reservations and not writing.done():
            await steps(1)
        await steps(after)
        channel.abort()
        outcomes = await stage.promptly([writing], "when its channel is aborted")
        expect_ended(stage, outcomes, "from a write whose channel was aborted")
        await stage.nothing_held("after an abort")
        await asyncio.sleep(0.01)
        altered = stage.recorder.overwritten()
        stage.expect(
            not altered, "no write into memory that was given back", f"{altered} were made"
        )
        await stage.eventually(
            lambda: not stage.store.held.quarantined,
            "`writer_exited` when a client has gone",
            lambda: f"{stage.store.held.quarantined} extents are in quarantine",
        )


@TransportCheck
async def close_ends_running_calls(stage: Stage) -> None:
    """`close` in the middle of calls is as safe as `abort`."""
    await stage.stored(await stage.connect(), blocks("old", 3, LARGE))
    for after in (0, 1, 3, 10, 30, 100):
        channel = await stage.connect()
        calls = running(stage, channel, f"closed after {after}")
        await steps(after)
        await channel.close()
        outcomes = await stage.promptly(calls, "when its channel is closed")
        expect_ended(stage, outcomes, "from a call whose channel was closed")
        await stage.nothing_held("after a close")


@TransportCheck
async def abort_ends_calls_that_wait(stage: Stage) -> None:
    """A call that waits for its answer ends at once, and the server releases its blocks."""
    channel = await stage.connect()
    stage.recorder.answering.clear()
    calls = [asyncio.ensure_future(c) for c in every_call(stage, channel, "waiting", 10)]
    await stage.eventually(
        lambda: stage.store.held.reservations == 2,
        "the write to be heard",
        lambda: "it was not",
    )
    channel.abort()
    for outcome in await stage.promptly(calls, "when its channel is aborted"):
        stage.expect(isinstance(outcome, Unavailable), "Unavailable", describe(outcome))
    await stage.nothing_held("after an abort, though the server still works on it")


@TransportCheck
async def an_abort_ends_one_client_only(stage: Stage) -> None:
    """Another client of the same server notices nothing."""
    channel, other = await stage.connect(), await stage.connect()
    data = blocks("steady", 4, LARGE)
    await stage.stored(other, data)
    calls = running(stage, channel, "ours")
    reading = asyncio.ensure_future(stage.holds(other, data))
    await steps(3)
    channel.abort()
    await stage.promptly(calls, "when its channel is aborted")
    await reading
    await stage.holds(other, data)


@TransportCheck
async def closing_twice_is_closing_once(stage: Stage) -> None:
    """`close` and `abort` in any order, any number of times; `abort` needs no await."""
    listener = await stage.listen()
    for ending in ("close close", "abort abort", "abort close", "close abort close"):
        channel = await stage.connect(listener.address)
        for word in ending.split():
            if word == "close":
                await channel.close()
            else:
                returned: object = channel.abort()  # type: ignore[func-returns-value]
                stage.expect(not inspect.isawaitable(returned), "`abort` to be synchronous")
        await expect_unavailable(stage, channel, f"after {ending!r}")
    await listener.close()
    await listener.close()


@TransportCheck
async def nothing_stays_when_both_sides_close(stage: Stage) -> None:
    """No task, no descriptor (so no reader), no thread."""

    def held() -> tuple[int, int, int]:
        descriptors = len(os.listdir("/proc/self/fd"))
        # The loop's own executor has as many as were busy at once: a few, and no leak.
        threads = [one for one in threading.enumerate() if not one.name.startswith("asyncio_")]
        return len(asyncio.all_tasks()), descriptors, len(threads)

    async def cycle(name: str) -> None:
        listener = await stage.listen()
        for number in range(3):
            channel = await stage.connect(listener.address)
            data = blocks(f"{name}/{number}", 2, LARGE)
            await stage.stored(channel, data)
            await stage.holds(channel, data)
            calls = running(stage, channel, f"{name}/{number}/running")
            await steps(number)
            if number == 0:
                channel.abort()
            if number < 2:
                await channel.close()
            else:
                await listener.close()
                await channel.close()
            await stage.promptly(calls, "when its channel is closed")

    await cycle("first")  # what is made once and kept is no leak
    await asyncio.sleep(0.05)
    gc.collect()  # so that what others have left behind does not hide what is left behind here
    before = held()
    for again in ("second", "third", "fourth"):
        await cycle(again)
    await stage.eventually(
        lambda: all(now <= then for now, then in zip(held(), before, strict=True)),
        "as many tasks, descriptors and threads as before",
        lambda: f"there were {before}, there are {held()}",
    )


# --- addresses, clusters, limits -------------------------------------------------------------


@TransportCheck
async def a_listener_says_where_it_is(stage: Stage) -> None:
    """Its address has the transport's scheme, and a client can dial it; two have two."""
    scheme = stage.transport.scheme
    stage.expect(stage.address.startswith(f"{scheme}://"), f"{scheme}://…", describe(stage.address))
    other = await stage.listen()
    stage.expect(other.address != stage.address, "a free address where none is given")
    for address in (stage.address, other.address):
        channel = await stage.connect(address)
        await stage.stored(channel, blocks(address, 1, 100))


@TransportCheck
async def an_address_is_free_again_after_close(stage: Stage) -> None:
    """A server that restarts may listen where it was."""
    listener = await stage.listen()
    channel = await stage.connect(listener.address)
    await stage.stored(channel, blocks("before", 1, 100))
    await listener.close()
    again = await stage.listen(listener.address)
    stage.expect(again.address == listener.address, "the address that was asked for", again.address)
    data = blocks("after", 1, 100)
    channel = await stage.connect(again.address)
    await stage.stored(channel, data)
    await stage.holds(channel, data)


@TransportCheck
async def a_wrong_address_is_a_config_error(stage: Stage) -> None:
    """One that is taken; one that is none, to listen at or to dial."""
    await stage.raises(ConfigError, stage.listen(stage.address), "an address that is taken")
    for address in ("nonsense", "other-scheme://somewhere", f"{stage.transport.scheme}:/"):
        await stage.raises(ConfigError, stage.listen(address), f"listening at {address!r}")
        await stage.raises(ConfigError, stage.connect(address), f"dialling {address!r}")
    await stage.stored(await stage.connect(), blocks("still there", 1, 100))


async def connect_and_call(stage: Stage, cluster: Cluster = CLUSTER) -> None:
    """Where a refusal shows: in `connect`, or in the first call."""
    channel = await stage.connect(cluster=cluster)
    await stage.write(channel, blocks("refused", 1, 100))


@TransportCheck
async def another_cluster_is_a_peer_error(stage: Stage) -> None:
    """A client of another cluster gets nothing but an error that names the reason."""
    elsewhere = Cluster("elsewhere")
    await stage.raises(PeerError, connect_and_call(stage, elsewhere), "another cluster")
    stage.expect(not stage.store.index.stored, "nothing to be written by another cluster")


@TransportCheck
async def who_lacks_the_secret_is_refused(stage: Stage) -> None:
    """A client with another secret or none gets only an error; one with the secret is served.

    Nor does a client that has a secret trust a server that has none.
    """
    secret = CLUSTER._replace(secret=b"that all of them know")
    await stage.raises(PeerError, connect_and_call(stage, secret), "a server without a secret")
    stage.recorder.cluster = secret
    other = CLUSTER._replace(secret=b"that of somebody else")
    await stage.raises(PeerError, connect_and_call(stage, other), "another secret")
    await stage.raises(PeerError, connect_and_call(stage), "no secret")
    stage.expect(not stage.store.index.stored, "nothing to be written without the secret")
    await connect_and_call(stage, secret)


@TransportCheck
async def a_refused_client_gets_an_error(stage: Stage) -> None:
    """At the limit of connections the client gets Overloaded; later it is served."""
    stage.recorder.refuse_clients = Overloaded("1024 clients are connected, the limit")
    await stage.raises(Overloaded, connect_and_call(stage), "a server at its limit")
    stage.recorder.refuse_clients = None
    await connect_and_call(stage)


# --- views -----------------------------------------------------------------------------------


def look(
    stage: Stage,
    channel: Channel,
    keys: Sequence[bytes],
    *,
    verify: bool = True,
    within_s: float = 10.0,
) -> AbstractAsyncContextManager[list[View]]:
    """`read_view`, for a channel that has it."""
    if not isinstance(channel, SupportsZeroCopyView):
        raise NotDeclared("this channel shows no memory in place")
    return channel.read_view(
        ReadOptions(NAMESPACE, 0, verify), keys, deadline=stage.within(within_s)
    )


def shows(view: View, value: bytes | memoryview) -> bool:
    """It is a hit, with these bytes."""
    return view.data is not None and view.data == value


@TransportCheck
async def a_view_is_pinned_and_read_only(stage: Stage) -> None:
    """Inside the `with` the blocks are held and cannot be changed; after it they are free."""
    channel = await stage.connect()
    data = {**blocks("view", 2, 5000), **blocks("large view", 2, LARGE)}
    await stage.stored(channel, data)
    async with look(stage, channel, [*data, digest("never")]) as views:
        stage.expect(stage.store.held.pins == 4, "4 pins", f"there are {stage.store.held.pins}")
        for view, value in zip(views, data.values(), strict=False):
            stage.expect(shows(view, value), "the block's bytes")
            stage.expect(view.data is not None and view.data.readonly, "read-only memory")
        stage.expect(
            views[4] == View(ReadStatus.NEVER_WRITTEN), "a miss with its reason", describe(views[4])
        )
        await removals.remove(channel, NAMESPACE, list(data), deadline=stage.within())
        await stage.stored(channel, blocks("filler", 15, 1 << 20))
        stage.expect(
            all(map(shows, views, data.values())),
            "pinned memory to be nobody else's",
        )
    await stage.nothing_held("after the `with`")


@TransportCheck
async def a_damaged_view_is_corrupt(stage: Stage) -> None:
    """Without data; with `verify=False` the bytes are shown as they are."""
    channel = await stage.connect()
    data = blocks("damaged view", 2, LARGE)
    good, bad = data
    await stage.stored(channel, data)
    stage.memory_of(bad)[5] ^= 1
    async with look(stage, channel, [bad, good]) as views:
        stage.expect(
            views[0] == View(ReadStatus.CORRUPT), "CORRUPT without data", describe(views[0])
        )
        stage.expect(shows(views[1], data[good]), "its neighbour to be shown")
    async with look(stage, channel, [bad, good], verify=False) as views:
        stage.expect(shows(views[0], stage.memory_of(bad)), "the bytes as they are, unverified")


@TransportCheck
async def a_view_ends_with_its_block_only(stage: Stage) -> None:
    """The deadline is for getting it, not for looking; an error inside comes out as it is."""
    channel = await stage.connect()
    data = blocks("long look", 1, 5000)
    await stage.stored(channel, data)
    async with look(stage, channel, list(data), within_s=0.25) as (view,):
        await asyncio.sleep(0.35)
        stage.expect(stage.store.held.pins == 1, "the pin to be there after the deadline")
        stage.expect(shows(view, data[next(iter(data))]), "the bytes to be there")
    await stage.nothing_held("after the `with`")

    async def fail() -> None:
        async with look(stage, channel, list(data)):
            raise ZeroDivisionError("the caller's own")

    await stage.raises(ZeroDivisionError, fail(), "a body that raises it")
    await stage.nothing_held("after an error inside the `with`")
    for after in (*STEPS[:12], 100):
        await cut_off(dwell(look(stage, channel, list(data))), after)
        await stage.nothing_held("after a view was cancelled")
    await stage.holds(channel, data)


async def dwell(view: AbstractAsyncContextManager[list[View]]) -> None:
    """Look until cancelled."""
    async with view:
        await asyncio.Event().wait()


@TransportCheck
async def a_view_outlives_its_channel_but_not_its_server(stage: Stage) -> None:
    """An abort leaves the views' pins; leaving the `with` after either end raises nothing."""
    data = blocks("held", 3, LARGE)
    other, channel = await stage.connect(), await stage.connect()
    await stage.stored(other, data)
    async with look(stage, channel, list(data)) as views:
        channel.abort()
        await removals.remove(other, NAMESPACE, list(data), deadline=stage.within())
        await stage.stored(other, blocks("filler", 15, 1 << 20))
        same = all(map(shows, views, data.values()))
        stage.expect(same, "a view's memory to be nobody else's")
    await stage.nothing_held("after the `with`")
    await stage.stored(other, data)
    listener = await stage.listen()
    channel = await stage.connect(listener.address)
    async with look(stage, channel, list(data)):
        await listener.close()
        await stage.nothing_held("after the server has closed")
