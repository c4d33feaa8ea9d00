"""Every transport and tier keeps every promise, and the kit notices when one does not."""

from __future__ import annotations

import asyncio
import fcntl
import os
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from examples.write_a_transport import UnixTransport
from kvpool.errors import (
    Closed,
    Forbidden,
    LinkBroken,
    Overloaded,
    Unauthenticated,
    Unavailable,
    UsageError,
)
from kvpool.protocols import BlockStore, Channel, Connection, Listener, Peer, Tier, Transport, View
from kvpool.protocols import tier as contract
from kvpool.protocols.persistent_tier import Record, TierPart
from kvpool.testing import (
    TIER_CHECKS,
    TRANSPORT_CHECKS,
    ConformanceError,
    NotDeclared,
    check_connector,
    check_policy,
    check_tier,
    check_transport,
    device_checks,
    transport_checks,
)
from kvpool.testing.harness import CLUSTER
from kvpool.types import BATCH_BLOCKS_MAX, ROOT, Cluster, Pin, ReadResult, ReadStatus, WriteStatus
from kvpool_tiers.dram import Dram
from kvpool_tiers.hbm import Hbm
from kvpool_tiers.nvme.several import NvmeFiles
from kvpool_tiers.nvme.tier import Nvme
from kvpool_transports.inproc import InprocTransport
from kvpool_transports.shm import ShmTransport
from kvpool_transports.streams import requests
from kvpool_transports.tcp import TcpTransport
from kvpool_transports.tls import TlsTransport
from kvpool_transports.ucx import UcxTransport
from tests.support import messages as wire
from tests.support.certificates import certificate
from tests.support.programs import module_at


def makers() -> dict[str, Callable[[], Transport]]:
    """How to make each transport; inproc's two sides are one instance."""
    inproc = InprocTransport()
    return {
        "inproc": lambda: inproc,
        "shm": ShmTransport,
        "tcp": TcpTransport,
        "ucx": UcxTransport,
        "ucx-device": lambda: UcxTransport(tls="tcp,cuda_copy,self"),
        "tls": over_tls,
        "unix": UnixTransport,
    }


def over_tls() -> Transport:
    """Both sides show one certificate, which is its own authority."""
    mine = certificate("both")
    return TlsTransport(cert=mine.cert, key=mine.key, ca=mine.cert)


def needs_ucx() -> None:
    """Skips where UCX is not installed: it is an extra."""
    pytest.importorskip("ucxx", reason="the UCX transport needs ucxx: pip install kvpool[ucx]")


@pytest.mark.parametrize("check", TRANSPORT_CHECKS)
@pytest.mark.parametrize("scheme", ["inproc", "shm", "tcp", "tls", "ucx", "ucx-device", "unix"])
async def test_transport(scheme: str, check: str) -> None:
    if scheme.startswith("ucx"):
        needs_ucx()
    if scheme == "ucx-device" and check not in vars(device_checks):
        pytest.skip("as over ucx")
    with suppress(NotDeclared):
        await TRANSPORT_CHECKS[check](makers()[scheme])


@pytest.mark.parametrize(
    "check", [name for name in TRANSPORT_CHECKS if name in vars(transport_checks)]
)
@pytest.mark.parametrize("scheme", ["shm", "tcp"])
async def test_transport_with_every_write_in_steps(
    scheme: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those that are too large, or that a server cannot take at once."""
    for limit in ("ONE_REQUEST_MAX", "ONE_REQUEST_MAPPED_MAX"):
        monkeypatch.setattr(requests, limit, 0)
    await TRANSPORT_CHECKS[check](makers()[scheme])


@pytest.mark.parametrize(
    "check",
    ["a_full_batch_comes_back", "a_closed_listener_ends_its_calls", "abort_ends_running_calls"],
)
@pytest.mark.parametrize("scheme", ["shm", "tcp", "tls", "ucx", "unix"])
def test_transport_on_the_loop_of_production(scheme: str, check: str) -> None:
    """uvloop's transports raise where asyncio's keep quiet, once a connection is lost."""
    if scheme == "ucx":
        needs_ucx()
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(TRANSPORT_CHECKS[check](makers()[scheme]))


@pytest.mark.parametrize("check", TIER_CHECKS)
@pytest.mark.parametrize(
    "name",
    ["contract", "dram", "file", "nvme", "nvme-buffered", "nvme-encrypted", "nvme-files", "hbm"],
)
async def test_tier(name: str, check: str, tmp_path: Path) -> None:
    if name == "hbm":
        pytest.importorskip("torch", reason="the HBM tier needs torch")
    if name == "nvme-encrypted":
        pytest.importorskip("cryptography", reason="needs cryptography")
        if check in ("neighbours_are_left_alone", "what_survives_a_restart_is_there_again"):
            pytest.skip(
                "extents are read as they were written, and after a restart by their record"
            )
    path = tmp_path / "tier.py"
    example = (contract.__doc__ or "").partition("::\n")[2].rpartition("\n\n(design:")[0]
    if name == "contract":
        path.write_text(f"from kvpool.errors import Closed, UsageError\n{textwrap.dedent(example)}")

    def encrypted(capacity: int) -> Tier:
        tier = Nvme(capacity, path=path, encrypt=True)
        tier.use_key(bytes(32))
        return tier

    def files(capacity: int) -> Tier:
        """Two files, the second one larger; one where that is all there is room for."""
        first = capacity // 3 // 4096 * 4096
        sizes = [size for size in (first, capacity - first) if size]
        return NvmeFiles([Nvme(size, f"{path}-{number}") for number, size in enumerate(sizes)])

    tiers: dict[str, Callable[[int], Tier]] = {
        "contract": lambda capacity: module_at(path).Heap(capacity),
        "dram": PlainDram,
        "file": lambda capacity: FileTier(path, capacity),
        "nvme": lambda capacity: Nvme(capacity, path=path),
        "nvme-buffered": lambda capacity: Nvme(capacity, path=path, direct=False),
        "nvme-encrypted": encrypted,
        "nvme-files": files,
        "hbm": lambda capacity: Hbm(capacity, device="cpu"),
    }

    with suppress(NotDeclared):
        await TIER_CHECKS[check](tiers[name])


@pytest.mark.parametrize("check", TIER_CHECKS)
def test_nvme_under_uvloop(check: str, tmp_path: Path) -> None:
    """What servers run on: its futures and threads meet differently."""
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, suppress(NotDeclared):
        runner.run(TIER_CHECKS[check](lambda capacity: Nvme(capacity, path=tmp_path / "tier")))


async def test_the_kit_names_what_is_wrong() -> None:
    """The whole kit stops at the first broken promise and says which, what and instead of what."""
    with pytest.raises(ConformanceError, match=r"expected .*; got") as caught:
        await check_transport(broken(read=unverified))
    assert caught.value.check == "damaged_blocks_are_corrupt"
    with pytest.raises(ConformanceError, match="expected UsageError from writing") as caught:
        await check_tier(Endless)
    assert caught.value.check == "nothing_lies_outside"


async def test_what_only_passes_on_is_as_good_as_what_it_wraps() -> None:
    """The wrapper that the broken ones change keeps every promise itself."""
    await check_transport(broken())


async def test_the_kit_says_what_it_did_not_check(tmp_path: Path) -> None:
    left_out = await check_tier(lambda capacity: Nvme(capacity, tmp_path / "file"))
    assert "cannot be looked at in place" in left_out["a_view_is_the_memory_itself"]
    left_out = await check_tier(lambda capacity: Dram(capacity, prefault=False))
    assert 0 < len(left_out) < len(TIER_CHECKS)
    assert "not remember what its bytes mean" in left_out["what_was_remembered_is_found_again"]

    def unable(*_: Any, **__: Any) -> Any:
        raise NotDeclared("it starts no engine here")

    for check in (check_connector, check_policy):
        with pytest.raises(ConformanceError, match=r"one check that applies; .* no engine here"):
            check(unable)


# --- teeth: transports -------------------------------------------------------------------


CALLS = (*("write", "read", "read_view", "request", "close", "abort"),)


class Through:
    """A channel that passes everything on, but for the calls that are changed.

    A changed call gets the channel behind it first, and then what it was called with.
    """

    def __init__(self, inner: Channel, changed: dict[str, Callable[..., Any]]) -> None:
        for name in CALLS:
            if hasattr(inner, name):
                call = changed.get(name)
                setattr(self, name, partial(call, inner) if call else getattr(inner, name))


class ThroughTransport:
    """Inproc, with something else in front of its channels or of the server's books."""

    scheme = "inproc"
    same_host = True
    authenticated = True

    def __init__(
        self, store: Callable[[BlockStore], BlockStore] = lambda store: store, **changed: Any
    ) -> None:
        self.inner = InprocTransport()
        self.store = store
        self.changed = changed

    async def listen(self, address: str, store: BlockStore) -> Listener:
        return await self.inner.listen(address, self.store(store))

    async def connect(self, address: str, **options: Any) -> Any:
        return Through(await self.inner.connect(address, **options), self.changed)


def broken(**changed: Any) -> Callable[[], Transport]:
    transport = ThroughTransport(**changed)
    return lambda: transport


def altered(base: type[Any], **changed: Any) -> type[Any]:
    """The same, but for these of its attributes."""
    return type(f"{base.__name__}, altered", (base,), changed)


async def nothing(*_: Any, **__: Any) -> None:
    """Says that it is done."""


async def first_thousand(tier: Nvme, offsets: Sequence[int]) -> None:
    await Nvme.erase(tier, offsets[:1000])


async def unordered(inner: Any, reading: Any, blocks: Any, deadline: float) -> Any:
    """Answers in the order of the digests."""
    return await inner.read(reading, sorted(blocks, key=lambda b: b[0]), deadline=deadline)


async def unverified(inner: Any, reading: Any, blocks: Any, deadline: float) -> Any:
    """Trusts the memory."""
    return await inner.read(reading._replace(verify=False), blocks, deadline=deadline)


def caching() -> Callable[..., Any]:
    """Remembers what it has read."""
    seen: dict[object, bytes] = {}

    async def read(inner: Any, reading: Any, blocks: Any, deadline: float) -> Any:
        places = [(reading.namespace, reading.part, block.digest) for block in blocks]
        if all(place in seen for place in places):
            for place, block in zip(places, blocks, strict=True):
                block.pieces[0][: len(seen[place])] = seen[place]
            return [ReadResult(ReadStatus.HIT, len(seen[place])) for place in places]
        results = await inner.read(reading, blocks, deadline=deadline)
        for place, block, result in zip(places, blocks, results, strict=True):
            if result.status.hit:
                seen[place] = bytes(block.pieces[0][: result.size])
        return results

    return read


def insisting(name: str) -> Callable[..., Any]:
    """Does not take no for an answer."""

    async def call(inner: Any, *asked: Any, **options: Any) -> Any:
        with suppress(Overloaded):
            return await getattr(inner, name)(*asked, **options)
        return await getattr(inner, name)(*asked, **options)

    return call


def patient(name: str) -> Callable[..., Any]:
    """Has its own idea of a deadline."""

    async def call(inner: Any, *asked: Any, deadline: float) -> Any:
        return await getattr(inner, name)(*asked, deadline=deadline + 60)

    return call


def lingering(name: str) -> Callable[..., Any]:
    """Lets a call go on when its caller has left."""

    async def call(inner: Any, *asked: Any, **options: Any) -> Any:
        return await asyncio.shield(asyncio.ensure_future(getattr(inner, name)(*asked, **options)))

    return call


async def collecting(inner: Any, *asked: Any, deadline: float) -> Any:
    """Waits whether there is more to send."""
    await asyncio.sleep(0.02)
    return await inner.write(*asked, deadline=deadline)


async def fiddling(inner: Any, reading: Any, blocks: Any, deadline: float) -> Any:
    """Keeps the loop for each small block."""
    if blocks[0].size < 4096:
        time.sleep(0.02)  # noqa: ASYNC251, which is what it does wrong
    return await inner.read(reading, blocks, deadline=deadline)


async def summing(inner: Any, *asked: Any, deadline: float) -> Any:
    """Knows one kind of miss."""
    return [
        one if one.status.hit else ReadResult(ReadStatus.NEVER_WRITTEN, one.size)
        for one in await inner.read(*asked, deadline=deadline)
    ]


async def hurrying(inner: Any, *asked: Any, deadline: float) -> Any:
    """Takes every failed write for a full server."""
    statuses = await inner.write(*asked, deadline=deadline)
    return [WriteStatus.NO_SPACE if s is WriteStatus.BYPASSED else s for s in statuses]


async def translating(inner: Any, *asked: Any, **options: Any) -> Any:
    """Says what it thinks was meant."""
    try:
        return await inner.request(*asked, **options)
    except Forbidden as error:
        raise Unauthenticated(str(error)) from error


async def terser(inner: Any, *asked: Any, deadline: float) -> Any:
    """Leaves out why."""
    try:
        return await inner.request(*asked, deadline=deadline)
    except Overloaded as error:
        raise Overloaded("refused") from error


async def silent(inner: Any, reading: Any, blocks: Any, deadline: float) -> Any:
    """Tells nobody that an answer arrives."""
    return await inner.read(reading._replace(idle_timeout=None), blocks, deadline=deadline)


async def ticking(inner: Any, reading: Any, blocks: Any, deadline: float) -> Any:
    """Says that it goes on, whether it does or not."""
    reads = asyncio.ensure_future(inner.read(reading, blocks, deadline=deadline))
    while not reads.done():
        if reading.idle_timeout is not None:
            reading.idle_timeout.touch()
        await asyncio.wait([reads], timeout=0.01)
    return await reads


async def solitary(inner: Any, writing: Any, blocks: Any, deadline: float) -> Any:
    """Does not pass on whether others have the blocks."""
    return await inner.write(writing._replace(on_alone=None), blocks, deadline=deadline)


async def departing(inner: Any) -> None:
    """Goes on to close when it has closed."""
    inner.going = asyncio.ensure_future(asyncio.sleep(0.02, inner.abort()))


def deaf(inner: Any) -> None:
    """Does not hear `abort`."""


def blunt(inner: Any) -> None:
    """Ends the pins of views, too."""
    for connection in inner._listener.looks:
        connection.close()
    inner.abort()


@asynccontextmanager
async def scribbled(inner: Any, *asked: Any, deadline: float) -> AsyncIterator[list[View]]:
    """Shows memory that can be written into."""
    async with inner.read_view(*asked, deadline=deadline) as views:
        yield [
            view if view.data is None else View(view.status, memoryview(bytearray(view.data)))
            for view in views
        ]


async def backwards(inner: Any, writing: Any, blocks: Any, deadline: float) -> Any:
    """Sends the last piece first."""
    turned = [block._replace(pieces=block.pieces[::-1]) for block in blocks]
    return await inner.write(writing, turned, deadline=deadline)


async def headless(inner: Any, reading: Any, blocks: Any, deadline: float) -> Any:
    """Takes a first piece that is smaller than a header for one, and leaves it as it was."""
    kept = [bytes(block.pieces[0]) for block in blocks]
    results = await inner.read(reading, blocks, deadline=deadline)
    for block, before in zip(blocks, kept, strict=True):
        if len(before) < 16 and len(block.pieces) > 1:
            block.pieces[0][:] = before
    return results


async def overflowing(inner: Any, reading: Any, blocks: Any, deadline: float) -> Any:
    """Fills what a block does not need of its pieces."""
    results = await inner.read(reading, blocks, deadline=deadline)
    for block, result in zip(blocks, results, strict=True):
        if len(block.pieces) > 1 and result.size < block.size:
            block.pieces[-1][-1] ^= 255
    return results


async def shifting(inner: Any, reading: Any, blocks: Any, deadline: float) -> Any:
    """Puts the hits of a batch into the first pieces, as if there had been no miss."""
    results = await inner.read(reading, blocks, deadline=deadline)
    if not results[0].status.hit and len(blocks) > 1 and len(blocks[0].pieces) > 1:
        blocks[0].pieces[1][:] = blocks[1].pieces[1]
    return results


async def superficial(inner: Any, reading: Any, blocks: Any, deadline: float) -> Any:
    """Verifies blocks in one piece only."""
    whole = all(len(block.pieces) == 1 for block in blocks)
    options = reading._replace(verify=reading.verify and whole)
    return await inner.read(options, blocks, deadline=deadline)


def losing(kind: type[wire.Message], **lost: Any) -> Callable[..., Any]:
    """Passes these requests, or answers, on without some of their fields."""

    def passed(message: wire.Message) -> wire.Message:
        return structs.replace(message, **lost) if isinstance(message, kind) else message

    async def call(inner: Any, message: Any, answer: Any, deadline: float) -> Any:
        return passed(await inner.request(passed(message), answer, deadline=deadline))

    return call


async def piecemeal(inner: Any, *asked: Any, deadline: float) -> Any:
    """Has answers for half of a batch."""
    got = await inner.request(*asked, deadline=deadline)
    if isinstance(got, wire.StatusReply):
        return wire.StatusReply(got.statuses[: BATCH_BLOCKS_MAX // 2])
    return got


class Trusting(ThroughTransport):
    """Takes a tenant's word for it."""

    async def connect(self, address: str, *, cluster: Cluster, **options: Any) -> Any:
        secret = CLUSTER._replace(secret=b"the cluster's" if cluster.tenant else cluster.secret)
        return await super().connect(address, cluster=secret, **options)


class Parting(ThroughTransport):
    """Closes its connections when it has closed."""

    async def listen(self, address: str, store: BlockStore) -> Listener:
        listener = await super().listen(address, store)
        close = listener.close

        async def later() -> None:
            loop = asyncio.get_running_loop()
            loop.call_later(0.05, lambda: asyncio.ensure_future(close()))

        listener.close = later  # type: ignore[method-assign]
        return listener


class Raw(ThroughTransport):
    """Lets through what the operating system says."""

    async def connect(self, address: str, **options: Any) -> Any:
        try:
            return await super().connect(address, **options)
        except LinkBroken as error:
            raise ConnectionRefusedError(111, "Connection refused") from error


class Leaking(ThroughTransport):
    """Opens one descriptor more than it closes."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[int] = []

    async def connect(self, address: str, **options: Any) -> Any:
        self.opened.append(os.open("/dev/null", os.O_RDONLY))
        return await super().connect(address, **options)


class Linked(UnixTransport):
    """Shows its server another link than it has, or another client."""

    def __init__(self, change: Callable[[Peer], Peer]) -> None:
        super().__init__()
        self.change = change

    async def listen(self, address: str, store: Any) -> Listener:
        connect = store.connect
        store.connect = lambda peer: connect(self.change(peer))
        return await super().listen(address, store)


def link(**calls: Callable[..., Any]) -> Callable[[Peer], Peer]:
    """Changes a peer: its link answers so."""

    def change(peer: Peer) -> Peer:
        assert peer.link is not None
        real = {
            name: getattr(peer.link, name)
            for name in ("progress", "hang_up", "idle_since", "retire")
        }
        return peer._replace(link=SimpleNamespace(**(real | calls)))

    return change


class Dialling(UnixTransport):
    """Connects for as long as it takes."""

    async def connect(self, address: str, *, deadline: float, **options: Any) -> Any:
        return await super().connect(address, deadline=deadline + 60, **options)


def kept_so(change: Callable[[Connection], None]) -> Transport:
    """The server's half is broken: each of its connections is changed in one thing."""
    return ThroughTransport(store=lambda store: Books(store, change))


class Books:
    """A store whose connections are changed in one thing, so the server's half is broken."""

    def __init__(self, inner: BlockStore, change: Callable[[Connection], None]) -> None:
        self._inner = inner
        self._change = change
        self.cluster, self.server, self.tier = inner.cluster, inner.server, inner.tier
        self.count = inner.count

    def connect(self, peer: Peer) -> Connection:
        connection = self._inner.connect(peer)
        self._change(connection)
        return connection


def unpin_early(connection: Any) -> None:
    """Gives the pins back before the bytes were taken."""
    pin = connection.pin

    async def pin_and_unpin(*arguments: Any) -> list[Pin]:
        pins: list[Pin] = await pin(*arguments)
        connection.unpin(pins)
        return pins

    connection.pin = pin_and_unpin


def pin_alike(connection: Any) -> None:
    """Takes a view for a read."""
    pin = connection.pin
    connection.pin = lambda *asked, view=False: pin(*asked)


def seal_some_day(connection: Any) -> None:
    """Lets masters take their time."""
    seal = connection.seal
    connection.seal = lambda *asked, deadline, **more: seal(*asked, deadline=deadline + 60, **more)


def seal_anything(connection: Any) -> None:
    """Seals with checksums that it made up."""
    seal = connection.seal

    def seal_so(ids: list[int], _: list[int], **options: Any) -> Coroutine[Any, Any, Any]:
        sealing: Coroutine[Any, Any, Any] = seal(ids, [0] * len(ids), **options)
        return sealing

    connection.seal = seal_so


def forget_the_books(connection: Any) -> None:
    """Does not close the books of a call that was cancelled or cut off."""
    connection.close = lambda **_: None


BROKEN: dict[str, Callable[[], Transport]] = {
    "results_are_in_the_callers_order": lambda: ThroughTransport(read=unordered),
    "damaged_blocks_are_corrupt": lambda: ThroughTransport(read=unverified),
    "a_block_in_pieces_is_their_concatenation": lambda: ThroughTransport(write=backwards),
    "pieces_may_meet_anywhere": lambda: ThroughTransport(read=headless),
    "a_small_block_leaves_the_other_pieces_alone": lambda: ThroughTransport(read=overflowing),
    "hits_and_misses_keep_their_own_pieces": lambda: ThroughTransport(read=shifting),
    "a_checksum_covers_all_pieces": lambda: ThroughTransport(read=superficial),
    "a_channel_never_caches": lambda: ThroughTransport(read=caching()),
    "a_transport_never_retries": lambda: ThroughTransport(write=insisting("write")),
    "a_silent_server_costs_a_deadline": lambda: ThroughTransport(write=patient("write")),
    "a_cancelled_read_leaves_nothing": lambda: ThroughTransport(read=lingering("read")),
    "abort_ends_calls_that_wait": lambda: ThroughTransport(abort=deaf),
    "closing_twice_is_closing_once": lambda: ThroughTransport(close=nothing, abort=deaf),
    "a_view_is_pinned_and_read_only": lambda: ThroughTransport(read_view=scribbled),
    "a_view_outlives_its_channel_but_not_its_server": lambda: ThroughTransport(abort=blunt),
    "a_request_arrives_as_it_was_made": lambda: ThroughTransport(request=piecemeal),
    "a_request_ends_with_its_caller": lambda: ThroughTransport(request=lingering("request")),
    "a_refused_request_is_not_repeated": lambda: ThroughTransport(request=insisting("request")),
    "a_closed_channel_moves_nothing": lambda: ThroughTransport(close=nothing, abort=deaf),
    "nobody_there_is_unavailable": Raw,
    "a_refused_call_is_made_once": lambda: ThroughTransport(read=insisting("read")),
    "no_call_keeps_the_loop": lambda: ThroughTransport(read=fiddling),
    "nothing_stays_when_both_sides_close": Leaking,
    "no_small_call_waits_for_a_timer": lambda: ThroughTransport(write=collecting),
    "a_read_shows_that_it_goes_on": lambda: ThroughTransport(read=silent),
    "every_call_ends_by_its_deadline": lambda: ThroughTransport(read=patient("read")),
    "every_status_arrives": lambda: ThroughTransport(read=summing),
    "a_refusal_arrives_unchanged": lambda: ThroughTransport(request=translating),
    "a_tenants_client_is_known_or_refused": Trusting,
    # It finds no server where one is.
    "what_a_transport_declares_is_so": altered(ThroughTransport, can_reach=lambda *_: False),
    "a_closed_listener_has_no_connection": Parting,
    "what_a_channel_owns_is_free_when_it_is_closed": lambda: ThroughTransport(close=departing),
    "a_writer_hears_whether_its_blocks_are_alone": lambda: ThroughTransport(write=solitary),
    "a_view_is_pinned_as_one": lambda: kept_so(pin_alike),
    "a_server_knows_how_long_it_may_wait": lambda: kept_so(seal_some_day),
    "a_server_knows_who_calls": lambda: Linked(lambda peer: peer._replace(address="127.0.0.1:9")),
    "a_server_may_hang_up": lambda: Linked(link(hang_up=lambda why: None)),
    "a_server_sees_whether_a_client_is_idle": lambda: Linked(link(idle_since=lambda: None)),
    "bytes_are_taken_while_they_are_pinned": lambda: kept_so(unpin_early),
    "blocks_are_sealed_when_their_bytes_are_there": lambda: kept_so(seal_anything),
    "a_cancelled_write_leaves_nothing": lambda: kept_so(forget_the_books),
}


async def test_a_connect_without_a_deadline_is_noticed() -> None:
    with pytest.raises(ConformanceError, match="an end by the deadline"):
        await TRANSPORT_CHECKS["connecting_to_a_silent_server_keeps_its_deadline"](Dialling)


#: Others, which break the same promise elsewhere.
BROKEN_TOO: list[tuple[str, Callable[[], Transport]]] = [
    ("what_a_channel_owns_is_free_when_it_is_closed", Leaking),
    ("a_read_shows_that_it_goes_on", lambda: ThroughTransport(read=ticking)),
    ("every_call_ends_by_its_deadline", lambda: ThroughTransport(request=patient("request"))),
    *(
        (
            "a_request_arrives_as_it_was_made",
            partial(ThroughTransport, request=losing(kind, **lost)),
        )
        for kind, lost in (
            (wire.Proposed, {"copies": b""}),
            (wire.Fetch, {"extra": False}),
            (wire.Prefetch, {"part": 0}),
            (wire.Drain, {"back_in_s": 0.0}),
            (wire.Drained, {"left": []}),
            (wire.RemovedAll, {"at": None}),
        )
    ),
    ("every_status_arrives", lambda: ThroughTransport(write=hurrying)),
    ("a_refusal_arrives_unchanged", lambda: ThroughTransport(request=terser)),
    # It lacks nothing for devices, and has no channel for them; it has nothing to say.
    ("what_lacks_nothing_reaches_devices", altered(ThroughTransport, device_lack="")),
    ("what_a_transport_declares_is_so", altered(ThroughTransport, status_text="")),
    ("a_server_knows_who_calls", lambda: Linked(lambda peer: peer._replace(transport="tcp"))),
    ("a_server_sees_whether_a_client_is_idle", lambda: Linked(link(retire=lambda: None))),
    ("a_server_sees_whether_a_client_is_idle", lambda: Linked(link(idle_since=lambda: 1e9))),
    ("a_server_sees_whether_a_client_is_idle", lambda: Linked(link(progress=time.monotonic))),
]


@pytest.mark.parametrize(("check", "make"), [*BROKEN.items(), *BROKEN_TOO])
async def test_a_broken_transport_is_noticed(
    check: str, make: Callable[[], Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.testing.harness.PROMPT_S", 0.2)
    transport = make()
    with pytest.raises(ConformanceError, match=check) as caught:
        await TRANSPORT_CHECKS[check](lambda: transport)
    assert caught.value.check == check
    for descriptor in getattr(transport, "opened", ()):
        os.close(descriptor)


# --- teeth: tiers ----------------------------------------------------------------------------


class PlainDram(Dram):
    """Touches no page before it is used."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, prefault=False)


class FileTier:
    """The smallest tier that survives a restart: one file."""

    name = "file"
    alignment = 512
    survives_restart = True

    def __init__(self, path: Path, capacity: int) -> None:
        self.capacity = max(capacity // self.alignment, 1) * self.alignment
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        os.ftruncate(self._fd, self.capacity)

    async def read_into(self, offset: int, buffer: memoryview) -> None:
        self._check(offset, len(buffer))
        os.preadv(self._fd, [buffer], offset)

    async def write_from(self, offset: int, buffer: memoryview) -> None:
        self._check(offset, len(buffer))
        os.pwrite(self._fd, buffer, offset)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _check(self, offset: int, size: int) -> None:
        if self._fd < 0:
            raise Closed("the tier is closed")
        if not 0 <= offset <= offset + size <= self.capacity:
            raise UsageError(f"{size} bytes at {offset}: there are {self.capacity}")


ONE_POT = bytearray(1 << 20)


class Forgetful(FileTier):
    """Starts with an empty file."""

    def __init__(self, path: Path, capacity: int) -> None:
        path.unlink(missing_ok=True)
        super().__init__(path, capacity)


class Sprawling(FileTier):
    """Writes whole extents, and one more."""

    async def write_from(self, offset: int, buffer: memoryview) -> None:
        await super().write_from(offset, buffer)
        room = min(2 * self.alignment, self.capacity - offset - len(buffer))
        os.pwrite(self._fd, bytes(room), offset + len(buffer))


class Late(FileTier):
    """Writes when nobody waits for it any more."""

    async def write_from(self, offset: int, buffer: memoryview) -> None:
        writing = asyncio.ensure_future(self._write(offset, buffer))
        await asyncio.shield(writing)

    async def _write(self, offset: int, buffer: memoryview) -> None:
        await asyncio.sleep(0.001)
        await super().write_from(offset, buffer)


class Keeping(PlainDram):
    """Stores the caller's buffer, and no copy of it."""

    async def write_from(self, offset: int, buffer: memoryview) -> None:
        await super().write_from(offset, buffer)
        self.kept = offset, buffer

    async def read_into(self, offset: int, buffer: memoryview) -> None:
        where, kept = self.kept
        await super().write_from(where, kept)
        await super().read_into(offset, buffer)


def in_one_pot(self: PlainDram, offset: int, size: int) -> memoryview:
    """All tiers of its kind have one memory."""
    return memoryview(ONE_POT)[offset : offset + size]


def copied(self: PlainDram, offset: int, size: int) -> memoryview:
    """Shows a copy."""
    return memoryview(bytearray(Dram.view(self, offset, size)))


async def ponderous(self: PlainDram, offset: int, buffer: memoryview) -> None:
    """Waits for what is large."""
    time.sleep(len(buffer) / (50 << 20))  # noqa: ASYNC251, which is what it does wrong
    buffer[:] = self.view(offset, len(buffer))


async def stubborn(self: PlainDram, offset: int, buffer: memoryview) -> None:
    """Does not hear that it is cancelled."""
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(0.001)
    buffer[:] = self.view(offset, len(buffer))


async def exclusive(self: Any, offset: int, buffer: memoryview) -> None:
    """Has room for few calls."""
    self.running = getattr(self, "running", 0) + 1
    await asyncio.sleep(0)
    self.running -= 1
    if self.running > 100:
        raise Unavailable("others are served")
    buffer[:] = self.view(offset, len(buffer))


class Endless(PlainDram):
    """Takes what fits, and says nothing of the rest."""

    async def write_from(self, offset: int, buffer: memoryview) -> None:
        room = max(0, self.capacity - offset)
        await super().write_from(offset, buffer[:room])


def vague(**fields: Any) -> type[Any]:
    """Does not keep these fields of a record."""

    async def recover(tier: Nvme) -> Sequence[Record]:
        return [record._replace(**fields) for record in await Nvme.recover(tier)]

    return altered(Nvme, recover=recover)


class Backward(Nvme):
    """Believes the oldest."""

    async def persist(self, records: Sequence[Record]) -> None:
        await super().persist(self._turned(records))

    async def recover(self) -> Sequence[Record]:
        return self._turned(await super().recover())

    @staticmethod
    def _turned(records: Sequence[Record]) -> list[Record]:
        top = (1 << 64) - 1
        return [record._replace(generation=top - record.generation) for record in records]


class Lax(Nvme):
    """Remembers what it can, and says nothing of the rest."""

    async def persist(self, records: Sequence[Record]) -> None:
        for record in records:
            with suppress(UsageError):
                await super().persist([record])


class Hesitating(Nvme):
    """Keeps records until it is closed."""

    def __init__(self, capacity: int, path: Path) -> None:
        super().__init__(capacity, path)
        self.later: list[Record] = []

    async def persist(self, records: Sequence[Record]) -> None:
        self.later += records

    def close(self) -> None:
        if self.later:
            later, self.later = self.later, []
            with ThreadPoolExecutor() as pool:
                pool.submit(asyncio.run, super().persist(later)).result()
        super().close()


class Overreaching(Nvme):
    """Erases the extent that an offset lies in."""

    def __init__(self, capacity: int, path: Path) -> None:
        super().__init__(capacity, path)
        self.sizes: dict[int, int] = {}

    async def persist(self, records: Sequence[Record]) -> None:
        self.sizes.update({one.offset: one.size for one in records})
        await super().persist(records)

    async def erase(self, offsets: Sequence[int]) -> None:
        hit = [
            start
            for start, size in self.sizes.items()
            if any(start <= offset < start + size for offset in offsets)
        ]
        await super().erase(hit)


class Unstoppable(Nvme):
    """Goes on persisting when its caller has left."""

    async def persist(self, records: Sequence[Record]) -> None:
        await asyncio.shield(asyncio.ensure_future(self._persist(records)))

    async def _persist(self, records: Sequence[Record]) -> None:
        await asyncio.sleep(0.001)
        if not self._closed:
            await super().persist(records)


class Pausing(Nvme):
    """Reads its records on the loop's thread."""

    async def recover(self) -> Sequence[Record]:
        time.sleep(0.05)  # noqa: ASYNC251, which is what it does wrong
        return await super().recover()


class Alarmist(Nvme):
    """Counts what has come back, too."""

    async def recover(self) -> Sequence[Record]:
        records = await super().recover()
        self.dropped["seen"] += len(records)
        return records


class Keyless(Nvme):
    """Has one key for all."""

    def __init__(self, capacity: int, path: Path) -> None:
        super().__init__(capacity, path, encrypt=True)

    def use_key(self, key: bytes, random: Callable[[int], bytes] = os.urandom) -> None:
        super().use_key(bytes(32), random)


class Closing(PlainDram):
    """Goes on copying when it is closed."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._kept = memoryview(bytes(self.capacity))

    async def read_into(self, offset: int, buffer: memoryview) -> None:
        self.view(offset, len(buffer))
        asyncio.get_running_loop().call_later(0.001, self._copy_now, buffer)

    def _copy_now(self, buffer: memoryview) -> None:
        buffer[:] = self._kept[: len(buffer)]


class Inventive(PlainDram):
    """Its memory is gone while a read waits, which gets zeros."""

    async def read_into(self, offset: int, buffer: memoryview) -> None:
        self.view(offset, len(buffer))
        await asyncio.sleep(0.001)
        buffer[:] = bytes(len(buffer)) if self.fd < 0 else self.view(offset, len(buffer))


class Hoarding(PlainDram):
    """Is closed, and has its memory."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.kept = self.view(0, self.capacity)


class Regretful(PlainDram):
    """Says that a closed tier may be there again soon."""

    def view(self, offset: int, size: int) -> memoryview:
        try:
            return super().view(offset, size)
        except Closed as error:
            raise Unavailable("not now") from error


class Generous(Dram):
    """A descriptor for everybody who asks."""

    def __init__(self, capacity: int) -> None:
        self.given: list[int] = []
        super().__init__(capacity, prefault=False)

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name == "fd" and found >= 0:
            found = os.dup(found)
            self.given.append(found)
        return found

    def close(self) -> None:
        super().close()
        while self.given:
            with suppress(OSError):
                os.close(self.given.pop())


def staged(capacity: int) -> Tier:
    """Shows a copy of what is on the device."""
    tier = Hbm(capacity, device="cpu")
    show = tier.device_view
    tier.device_view = lambda offset, size: show(offset, size).clone()  # type: ignore
    return tier


def unsealed(capacity: int) -> Tier:
    """Dram, if it forgot the seals."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "fcntl", lambda *_: 0)
        return PlainDram(capacity)


@pytest.mark.parametrize(
    ("check", "tier"),
    [
        ("what_survives_a_restart_is_there_again", Forgetful),
        ("neighbours_are_left_alone", Sprawling),
        ("a_cancelled_call_stops", Late),
        ("nothing_lies_outside", Endless),
        ("a_buffer_is_the_callers_again", Keeping),
        ("no_call_of_a_tier_keeps_the_loop", altered(PlainDram, read_into=ponderous)),
        ("a_cancelled_call_stops", altered(PlainDram, read_into=stubborn)),
        ("all_of_its_capacity_holds_bytes", altered(PlainDram, read_into=exclusive)),
        ("two_tiers_share_nothing", altered(PlainDram, view=in_one_pot)),
        ("parts_make_up_the_tier", altered(Nvme, parts=[TierPart("a", 4096)])),
        ("a_view_is_the_memory_itself", altered(PlainDram, view=copied)),
        ("capacity_is_what_was_asked_for", lambda capacity: PlainDram(capacity + 4096)),
        ("nobody_can_resize_it", unsealed),
        ("what_was_remembered_is_found_again", altered(Nvme, persist=nothing)),
        ("what_was_remembered_is_found_again", vague(parent=ROOT)),
        ("what_was_erased_stays_erased", altered(Nvme, erase=nothing)),
        ("of_overlapping_extents_the_newest_wins", Backward),
        ("what_cannot_be_an_extent_is_refused", Lax),
        ("what_was_remembered_survives_a_kill", Hesitating),
        ("erasing_ignores_where_no_extent_starts", Overreaching),
        ("a_cancelled_call_remembers_nothing_later", Unstoppable),
        ("what_is_left_out_is_known", altered(Nvme, keeps=lambda *_: True)),
        ("no_call_about_records_keeps_the_loop", Pausing),
        ("no_call_about_records_keeps_the_loop", altered(Nvme, erase=first_thousand)),
        ("what_was_remembered_is_found_again", vague(copies=1)),
        ("nothing_is_dropped_unsaid", Alarmist),
        ("nobody_else_is_served_from_it", altered(Nvme, claim=lambda *_: None)),
        ("another_key_reads_nothing", Keyless),
        ("what_an_operator_is_shown_is_a_line", altered(Nvme, status_text="")),
        ("closing_ends_running_calls", Closing),
        ("closing_ends_running_calls", Inventive),
        ("a_closed_tier_keeps_no_memory", Hoarding),
        ("closing_twice_is_closing_once", Regretful),
        ("other_processes_map_the_same_memory", Generous),
        ("memory_on_a_device_is_shown_in_place", staged),
    ],
)
async def test_a_broken_tier_is_noticed(
    check: str, tier: Callable[..., Tier], tmp_path: Path
) -> None:
    if tier is staged:
        pytest.importorskip("torch", reason="the HBM tier needs torch")
    if tier is Keyless:
        pytest.importorskip("cryptography", reason="needs cryptography")

    def make(capacity: int) -> Tier:
        if isinstance(tier, type) and issubclass(tier, FileTier):
            return tier(tmp_path / "tier", capacity)
        if isinstance(tier, type) and issubclass(tier, Nvme):
            return tier(capacity, path=tmp_path / "tier")
        return tier(capacity)

    with pytest.raises(ConformanceError, match=check):
        await TIER_CHECKS[check](make)
