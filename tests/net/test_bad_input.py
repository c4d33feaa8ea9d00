"""Bad bytes give one clear error and close that link; nobody else notices (G11).

One line per input. After each of them, another client still reads what it wrote, and the books are
clean (the `watched` pool). What servers and masters send to clients is in `test_bad_peers.py`;
wrong calls and commands are in `test_bad_calls.py`, buffers and keys in `test_pool.py`, settings
in `test_config.py`, bytes chosen by a machine in `wire/test_fuzz.py`.

Not applicable, because there is no such thing here (yet): TLS and tokens; quotas; tiers with
files. A client of another user cannot be played without one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from kvpool import Pool, ReadStatus, WriteStatus, dev
from kvpool.checksum import block_seeds, checksum
from kvpool.net.control_network import TcpNetwork
from kvpool.net.requests import cluster_id, encode_envelope
from kvpool.protocols import Link, Peer, ReserveRequest
from kvpool.runtime import resident_bytes
from kvpool.server import clients
from kvpool.testing.invariants import check_invariants
from kvpool.wire.frames import PROTOCOL_VERSION, encode_frame
from kvpool_transports.streams import server as serving
from kvpool_transports.streams import stream as streams
from tests.conftest import (
    CHAIN,
    NAMESPACE,
    check_books,
    eventually,
    has_noticed_nothing,
    key,
    keys,
    values,
    witness_of,
)
from tests.support import messages as wire
from tests.support.raw_peers import (
    HELLO,
    KEYS,
    REGISTER,
    TOKEN,
    ask,
    control_peer,
    frame,
    payload,
    raw,
    read,
    reserve,
    write,
)
from tests.support.turns import others

BOTH = pytest.mark.parametrize("scheme", ["tcp", "shm"])
#: Of tests that change nothing in the pool: `shared` is the same one for each of them.
SHARED = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_pool() -> AsyncIterator[tuple[dev.Dev, Pool]]:
    serving = dev.serve("16MiB", listen=("shm://", "tcp://127.0.0.1:0"))
    async with serving as running, witness_of(running) as witness:
        yield running, witness


@pytest_asyncio.fixture(loop_scope="module")
async def shared(one_pool: tuple[dev.Dev, Pool]) -> AsyncIterator[dev.Dev]:
    """As `watched`: after each test the witness must not have noticed anything."""
    running, witness = one_pool
    (server,) = running.servers
    yield running
    await has_noticed_nothing(witness)
    await eventually(lambda: (server.store.held.pins, server.store.held.reservations) == (0, 0))
    check_books(running)


# --- frames ------------------------------------------------------------------------------


def header(type: int, body: int, payload: int = 0, version: int = PROTOCOL_VERSION) -> bytes:
    """Of a frame with so many bytes, which need not follow."""
    return struct.pack("<2sBBIQ", b"kv", version, type, body, payload)


FRAMES = {
    "http": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "BadFrame"),
    "a TLS ClientHello": (bytes.fromhex("16030100dc010000d80303") + bytes(200), "BadFrame"),
    "zeros": (bytes(4096), "BadFrame"),
    "the other plane": (encode_envelope(44, cluster_id("default"), 1, b"\x80"), "BadFrame"),
    "another version": (header(2, 0, version=99), "VersionMismatch"),
    "body 2**32 - 1": (header(2, 2**32 - 1), "BadFrame"),
    "body 2**31 - 1": (header(2, 2**31 - 1), "BadFrame"),
    "body over the limit": (header(2, (1 << 20) + 1), "BadFrame"),
    "payload 2**64 - 1": (header(6, 0, 2**64 - 1), "BadFrame"),
    "a payload with hello": (frame(wire.Hello("default", "raw"), b"bytes"), "BadFrame"),
    "a payload with a request": (HELLO + frame(read(key("a")), b"bytes"), "BadFrame"),
    "a payload first": (payload(0), "BadMessage"),
    "a payload by itself": (HELLO + payload(0), "BadMessage"),
    "a request before hello": (frame(read(key("a"))), "BadMessage"),
    "hello twice": (HELLO + HELLO, "BadMessage"),
    "hello to another cluster": (frame(wire.Hello("other", "raw")), "VersionMismatch"),
    "an error for a hello": (frame(wire.Error("x", "y")), "BadMessage"),
    "an error for a request": (HELLO + frame(wire.Error("x", "y")), "BadMessage"),
    "an answer to nothing": (HELLO + frame(wire.Data(b"", [], [])), "BadMessage"),
    "a request for a master": (HELLO + frame(wire.Members()), "BadMessage"),
    "a type nobody knows": (HELLO + encode_frame(200, b"\x80"), "BadMessage"),
    "no body": (HELLO + encode_frame(9, b""), "BadMessage"),
    "a good request, then junk": (HELLO + frame(read(key("a"))) + b"junk" * 9, "BadFrame"),
    "unpin without a pin": (HELLO + frame(wire.Unpin()), "BadMessage"),
    "seal without a reservation": (HELLO + frame(wire.Seal([1], [1], True, 0)), "BadMessage"),
}


@SHARED
@BOTH
@pytest.mark.parametrize("name", FRAMES)
async def test_frames(shared: dev.Dev, name: str, scheme: str) -> None:
    sent, error = FRAMES[name]
    async with raw(shared, scheme) as peer:
        await peer.send(sent)
        assert await peer.refusal() == error


@BOTH
async def test_a_frame_cut_anywhere_is_no_request(watched: dev.Dev, scheme: str) -> None:
    (server,) = watched.servers
    whole = frame(reserve(key("cut")))
    for end in range(1, len(whole)):
        async with raw(watched, scheme) as peer:
            await peer.send(HELLO + whole[:end])
    await eventually(lambda: server.stats(0).counters["connections"] == 1)
    assert server.store.index.stored == len(CHAIN)


@BOTH
async def test_a_byte_at_a_time_is_still_a_request(watched: dev.Dev, scheme: str) -> None:
    (server,) = watched.servers
    async with raw(watched, scheme) as peer:
        for byte in HELLO + frame(reserve(key("slow"))):
            await peer.send(bytes([byte]))
            await asyncio.sleep(0)
        await eventually(lambda: server.store.held.reservations == 1)


async def test_a_reset_in_the_middle_of_the_bytes(watched: dev.Dev) -> None:
    (server,) = watched.servers
    async with raw(watched) as peer:
        await peer.send(HELLO + frame(reserve(key("reset"), size=1 << 20)) + payload(1 << 20)[:999])
        await eventually(lambda: server.store.held.reservations == 1)
        linger = struct.pack("ii", 1, 0)
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    await eventually(lambda: server.store.held.reservations == 0)
    check_invariants(server.store)


SLOW = {
    "silence": b"",
    "half a hello": HELLO[:20],
    "half a request": HELLO + frame(read(key("a")))[:20],
    "a request and half of another": HELLO + frame(read(key("a"))) + b"k",
    "bytes that do not come": HELLO + frame(reserve(key("a"), wait_s=0)) + payload(64)[:20],
    "a seal that does not come": HELLO + frame(reserve(key("a"), wait_s=0)) + payload(64),
}


@pytest.mark.parametrize("name", SLOW)
async def test_waiting_ends(watched: dev.Dev, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, limit in ((streams, "FRAME_S"), (serving, "HELLO_S"), (serving, "GRACE_S")):
        monkeypatch.setattr(module, limit, 0.05)
    async with raw(watched) as peer:
        await peer.send(SLOW[name])
        assert await peer.refusal() == "DeadlineExceeded"


@BOTH
async def test_many_requests_at_once_let_others_in(watched: dev.Dev, scheme: str) -> None:
    """A peer that sends ahead is served at its turn; the loop is everybody's."""
    asked = 500
    async with raw(watched, scheme) as peer:
        await peer.ask(wire.Hello("default", "raw"), wire.Welcome)
        await peer.send(frame(read(key("a"))) * asked)
        async with others() as turns:
            answer = frame(wire.Data(b"\1", [], []))
            await peer.exactly(asked * len(answer))
    assert turns.count >= asked


# --- messages ----------------------------------------------------------------------------

DEEP = b"\x91" * 100_000
#: Fields that replace those of a good Reserve or Write.
MESSAGES: dict[str, dict[str, Any]] = {
    "no keys": {"digests": b"", "parents": b"", "sizes": []},
    "1,025 keys": {"digests": bytes(32 * 1025), "parents": bytes(32 * 1025), "sizes": [1] * 1024},
    "6,000 keys": {"digests": bytes(16 * 6_000), "digest_size": 16},
    "a key twice": {"digests": key("a") * 2, "parents": bytes(64), "sizes": [1, 1]},
    "a key of 15 bytes": {"digests": bytes(15), "digest_size": 15},
    "a key of 33 bytes": {"digests": bytes(33), "digest_size": 33},
    "half a key": {"digests": bytes(40)},
    "a parent that is its child": {"parents": key("a")},
    "half a parent": {"parents": bytes(16)},
    "two parents": {"parents": bytes(64)},
    "two sizes": {"sizes": [1, 1]},
    "no size": {"sizes": []},
    "an empty block": {"sizes": [0]},
    "a negative block": {"sizes": [-1]},
    "a block of 2**33 bytes": {"sizes": [1 << 33]},
    "a block of 2**63 bytes": {"sizes": [1 << 63]},
    "part 1 of 1": {"part": 1},
    "part -1": {"part": -1},
    "part 2**16": {"part": 1 << 16},
    "a bool for a part": {"part": True},
    "a float for a part": {"part": 0.5},
    "no parts": {"parts": 0},
    "257 parts": {"parts": 257},
    "no namespace": {"namespace": ""},
    "a long namespace": {"namespace": "n" * 513},
    "NUL in a namespace": {"namespace": "a\0b"},
    "right to left in a namespace": {"namespace": "a\u202eb"},
    "bytes for a namespace": {"namespace": b"n"},
    "text for keys": {"digests": "k" * 32},
    "NaN seconds": {"wait_s": float("nan")},
    "infinite seconds": {"wait_s": float("inf")},
    "negative seconds": {"wait_s": -1.0},
    "129 characters of a session": {"session": "s" * 129},
    "NUL in a session": {"session": "a\0b"},
    "a number for a session": {"session": 7},
    "no session that resumes": {"resume_s": 1.0},
    "a session that resumes in the past": {"session": "s", "resume_s": -1.0},
    "a session that resumes at NaN": {"session": "s", "resume_s": float("nan")},
    "a session that never resumes": {"session": "s", "resume_s": float("inf")},
    "a field nobody knows": {"more": 1},
    "a deep field nobody knows": {"more": msgspec.Raw(DEEP + b"\xc0")},
    "a deep field": {"sizes": msgspec.Raw(DEEP + b"\xc0")},
    "lengths that lie": {"sizes": msgspec.Raw(b"\xdd\xff\xff\xff\xff")},
    "no UTF-8": {"namespace": msgspec.Raw(b"\xa2\xff\xfe")},
    "an extension type": {"part": msgspec.Raw(b"\xd4\x01\x00")},
}


@SHARED
@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize(("good", "size"), [(reserve(key("a")), 0), (write(key("a")), 64)])
async def test_messages(shared: dev.Dev, good: wire.Message, size: int, name: str) -> None:
    """Of a write that comes with its bytes, nothing is reserved, and none of them is awaited."""
    fields = msgspec.structs.asdict(good) | MESSAGES[name]
    number = wire.TYPES[type(good)]
    async with raw(shared) as peer:
        await peer.send(HELLO + encode_frame(number, msgspec.msgpack.encode(fields), size))
        assert await peer.refusal() == "BadMessage"


OF_ANOTHER_PART: tuple[wire.Message, ...] = (
    wire.Read(**KEYS, part=1, buffer_sizes=[64]),
    wire.Remove(**KEYS, part=1),
    wire.Remove(**KEYS, part=1, corrupt=True),
    wire.Propose(**KEYS, part=1, receiver="r"),
    wire.Fetch(**KEYS, part=1, source="r", wait_s=0.1),
    wire.Prefetch(**KEYS, part=1),
)


@SHARED
@pytest.mark.parametrize("request_", OF_ANOTHER_PART, ids=lambda one: type(one).__name__)
async def test_no_request_is_for_a_part_that_its_namespace_does_not_have(
    shared: dev.Dev, request_: wire.Message
) -> None:
    async with raw(shared) as peer:
        await peer.send(HELLO + frame(request_))
        assert await peer.refusal() == "BadMessage"


async def test_a_path_for_a_namespace_is_only_a_name(watched: dev.Dev) -> None:
    async with raw(watched) as peer:
        await peer.ask(wire.Hello("default", "../x"), wire.Welcome)
        named = msgspec.structs.replace(read(key("a")), namespace="../../etc/passwd")
        assert (await peer.ask(named, wire.Data)).statuses == bytes([ReadStatus.NEVER_WRITTEN])


# --- protocol ----------------------------------------------------------------------------


def seal(*ids: int, checksums: int | None = None) -> bytes:
    count = len(ids) if checksums is None else checksums
    return frame(wire.Seal(list(ids), [0] * count, True, 0.0))


#: What follows a Reserve of one block of 64 bytes, by its id and that of another connection's.
Wrong = Callable[[int, int], bytes]
WRITES: dict[str, tuple[Wrong, str]] = {
    "another's reservation": (lambda own, other: payload(64) + seal(other), "BadMessage"),
    "own and another's": (lambda own, other: payload(64) + seal(own, other), "BadMessage"),
    "one reservation twice": (lambda own, other: payload(64) + seal(own, own), "BadMessage"),
    "seal twice": (lambda own, other: payload(64) + seal(own) * 2, "BadMessage"),
    "seal after giving it back": (
        lambda own, other: payload(64) + seal() + seal(own),
        "BadMessage",
    ),
    "an id never given": (lambda own, other: payload(64) + seal(2**63 - 1), "BadMessage"),
    "a checksum missing": (lambda own, other: payload(64) + seal(own, checksums=0), "BadMessage"),
    "a checksum too many": (lambda own, other: payload(64) + seal(own, checksums=2), "BadMessage"),
    "no bytes": (lambda own, other: seal(own), "BadMessage"),
    "bytes missing": (lambda own, other: payload(63) + seal(own), "BadFrame"),
    "bytes past the end": (lambda own, other: payload(65) + seal(own), "BadFrame"),
    "bytes twice": (lambda own, other: payload(64) * 2 + seal(own), "BadFrame"),
    "bytes after the seal": (lambda own, other: payload(64) + seal(own) + payload(64), "BadFrame"),
    "a read in between": (lambda own, other: frame(read(CHAIN[0])), "BadMessage"),
    "another write in between": (lambda own, other: frame(reserve(key("x"))), "BadMessage"),
    "an error": (lambda own, other: payload(64) + frame(wire.Error("x", "y")), "BadMessage"),
}
MAPPED_WRITES: dict[str, tuple[Wrong, str]] = {
    "another's reservation": (lambda own, other: seal(other), "BadMessage"),
    "bytes over shm": (lambda own, other: payload(64) + seal(own), "BadFrame"),
    "a checksum missing": (lambda own, other: seal(own, checksums=0), "BadMessage"),
    "a read in between": (lambda own, other: frame(read(CHAIN[0])), "BadMessage"),
}


@SHARED
@pytest.mark.parametrize(
    ("scheme", "name"),
    [("tcp", name) for name in WRITES] + [("shm", name) for name in MAPPED_WRITES],
)
async def test_writes(shared: dev.Dev, scheme: str, name: str) -> None:
    wrong, error = (WRITES if scheme == "tcp" else MAPPED_WRITES)[name]
    (server,) = shared.servers
    quarantined = server.store.held.quarantined
    async with raw(shared, scheme) as peer, raw(shared) as other:
        ids = []
        for one, digest in ((peer, key(f"own {name}")), (other, key(f"other {scheme} {name}"))):
            await one.ask(wire.Hello("default", "raw"), wire.Welcome)
            ids += (await one.ask(reserve(digest), wire.Reserved)).ids
        await peer.send(wrong(*ids))
        assert await peer.refusal() == error
        await eventually(lambda: server.store.held.reservations == 1)  # the other one's own
        await other.send(payload(64))
        sealed = await other.ask(wire.Seal(ids[1:], [0], False, 0.0), wire.StatusReply)
        assert sealed.statuses == bytes([WriteStatus.STORED])
    # This process lives, and might still write into memory that it has mapped.
    assert server.store.held.quarantined - quarantined == (scheme == "shm")


#: A small write of two blocks, of 64 and 100 bytes, and the bytes behind it.
SIZES = [64, 100]
AT_ONCE: dict[str, tuple[dict[str, Any], int]] = {
    "a byte more than said": ({}, 165),
    "a byte less than said": ({}, 163),
    "no bytes": ({}, 0),
    "sizes that lie": ({"sizes": [100, 100]}, 164),
    "sizes of more than there is": ({"sizes": [1 << 32, 1 << 32]}, 164),
    "a checksum missing": ({"checksums": [0]}, 164),
    "a checksum too many": ({"checksums": [0] * 3}, 164),
    "more than one request may bring": ({"sizes": [64, 16 << 20]}, (16 << 20) + 64),
}


@SHARED
@BOTH
@pytest.mark.parametrize("name", AT_ONCE)
async def test_writes_in_one_request(shared: dev.Dev, name: str, scheme: str) -> None:
    (server,) = shared.servers
    before = server.store.index.stored, server.store.held.quarantined
    changed, size = AT_ONCE[name]
    message = msgspec.structs.replace(write(key("a"), key("b")), **{"sizes": SIZES} | changed)
    head = encode_frame(*wire.encode(message), size)
    async with raw(shared, scheme) as peer:
        await peer.send(HELLO + head + bytes(min(size, 1000)))
        assert await peer.refusal() == "BadMessage"
        await eventually(lambda: server.store.held.reservations == 0)
    # Nothing is quarantined: the client had no address.
    assert (server.store.index.stored, server.store.held.quarantined) == before


@BOTH
async def test_bytes_of_a_write_that_stop_half_way(
    watched: dev.Dev, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sender is silent: it is cut off, and what it had is free."""
    (server,) = watched.servers
    monkeypatch.setattr(streams, "FRAME_S", 0.2)
    whole = frame(write(key("a"), key("b"), sizes=SIZES), bytes(164))
    async with raw(watched, scheme) as peer:
        await peer.send(HELLO + whole[:-10])
        await eventually(lambda: server.store.held.reservations == 2)
        assert await peer.refusal() == "DeadlineExceeded"
        await eventually(lambda: server.store.held.reservations == 0)
    assert server.store.held.quarantined == 0
    assert server.store.index.stored == len(CHAIN)


@BOTH
async def test_a_silent_writer_ends_when_others_wait_for_its_memory(
    watched: dev.Dev, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has more than half of what writers may reserve, and no byte of it comes any more."""
    (server,) = watched.servers
    monkeypatch.setattr(clients, "STALLED_S", 0.2)
    size = 12 << 20
    async with raw(watched, scheme) as peer, watched.pool() as pool:
        await peer.send(HELLO + encode_frame(*wire.encode(write(key("a"), size=size)), size))
        await eventually(lambda: server.store.held.reservations == 1)
        fresh = keys("others", 8)
        assert set(await pool.write(NAMESPACE, fresh, values(fresh, 1 << 20))) == {
            WriteStatus.STORED
        }
    assert server.stats(0).counters["cut_connections"] == 1


@BOTH
async def test_bytes_of_refused_blocks_are_thrown_away(watched: dev.Dev, scheme: str) -> None:
    """And the next request begins behind them; the others' bytes are where they belong."""
    sizes, digests = [64, 5000, 300_000, 64], (key("a"), CHAIN[1], CHAIN[2], key("b"))
    data = b"".join(bytes([number]) * size for number, size in enumerate(sizes, start=1))
    seeds = block_seeds(NAMESPACE, 0, digests)
    checksums = [checksum(bytes([n]) * size, seeds[n - 1]) for n, size in enumerate(sizes, start=1)]
    message = write(*digests, sizes=sizes, checksums=checksums)
    stored, here = WriteStatus.STORED, WriteStatus.ALREADY_STORED
    async with raw(watched, scheme) as peer:
        await peer.ask(wire.Hello("default", "raw"), wire.Welcome)
        await peer.send(frame(message, data))
        answer = await peer.ask(None, wire.StatusReply)
        assert answer.statuses == bytes([stored, here, here, stored])
        await peer.send(frame(message, data))  # a stream that is out of step would refuse it
        assert (await peer.ask(None, wire.StatusReply)).statuses == bytes([here] * 4)
    async with watched.pool() as pool:
        got = [bytearray(64), bytearray(64)]
        results = await pool.read(NAMESPACE, [key("a"), key("b")], got)
        assert all(result.status.hit for result in results)
        assert got == [b"\1" * 64, b"\4" * 64]


@BOTH
async def test_a_write_that_arrives_is_no_idle_connection(watched: dev.Dev, scheme: str) -> None:
    """A server that is full ends idle ones: not one whose bytes are coming."""
    (server,) = watched.servers
    whole = frame(write(key("a")), bytes(64))
    async with raw(watched, scheme) as peer:
        await peer.ask(wire.Hello("default", "raw"), wire.Welcome)
        links = {one: one.peer.link for one in server._context.clients.connections}
        idle = {one for one, link in links.items() if link and link.idle_since() is not None}
        await peer.send(whole[:-1])
        await eventually(lambda: server.store.held.reservations == 1)
        (busy,) = [c for c in idle if c.peer.link.idle_since() is None]  # type: ignore[union-attr]
        await peer.send(whole[-1:])
        assert (await peer.ask(None, wire.StatusReply)).statuses == bytes([WriteStatus.STORED])
        await eventually(lambda: busy.peer.link.idle_since() is not None)  # type: ignore[union-attr]


PINNED = {
    "unpin twice": frame(wire.Unpin()) * 2,
    "an unpin with bytes": frame(wire.Unpin(), b"bytes"),
    "a hello while pinned": HELLO,
}


@pytest.mark.parametrize("name", PINNED)
async def test_pins(watched: dev.Dev, name: str) -> None:
    (server,) = watched.servers
    async with raw(watched, "shm") as peer:
        await peer.ask(wire.Hello("default", "raw"), wire.Welcome)
        await peer.ask(read(*CHAIN), wire.Data)
        assert server.store.held.pins == 3
        await peer.send(PINNED[name])
        assert await peer.refusal() in ("BadMessage", "BadFrame")
        await eventually(lambda: server.store.held.pins == 0)


@pytest.mark.parametrize(
    ("sent", "held"),
    [
        (frame(read(CHAIN[0])), (1, 0)),
        (frame(reserve(key("a"))), (0, 1)),
        (frame(write(key("a")), bytes(64))[:-1], (0, 1)),
    ],
)
async def test_a_request_lets_go_of_what_the_one_before_it_held(
    watched: dev.Dev, sent: bytes, held: tuple[int, int]
) -> None:
    store = watched.servers[0].store
    async with raw(watched, "shm") as peer:
        await peer.ask(wire.Hello("default", "raw"), wire.Welcome)
        await peer.ask(read(*CHAIN), wire.Data)
        await peer.send(sent)
        await eventually(lambda: (store.held.pins, store.held.reservations) == held)


async def test_rooms_for_fewer_blocks_than_asked_for(watched: dev.Dev) -> None:
    async with raw(watched) as peer:
        await peer.send(HELLO + frame(msgspec.structs.replace(read(*CHAIN), buffer_sizes=[1])))
        assert await peer.refusal() == "BadMessage"


async def test_refused_writes_leave_no_waiters(watched: dev.Dev) -> None:
    (server,) = watched.servers
    loop = asyncio.get_running_loop()
    connection = server.connect(Peer("raw"))
    await connection.pin(NAMESPACE, 0, CHAIN, [1 << 20] * 3)
    room = server.store.allocator.free
    await connection.reserve(
        ReserveRequest(NAMESPACE, 0, [key("all")], [b""], [room]), deadline=loop.time()
    )
    for number in range(20):
        await connection.reserve(
            ReserveRequest(NAMESPACE, 0, [key(number)], [b""], [1 << 20]),
            deadline=loop.time() + 0.002,
        )
    assert not server._context._waiting_for_space
    connection.close()


# --- the control plane -------------------------------------------------------------------


CHANGE = msgspec.structs.asdict(wire.BlockChanges(**KEYS, part=0, tier=0, status=0))
FIND = msgspec.structs.asdict(wire.Find(**KEYS, prefix=False))
ANNOUNCE = {"server": "dev-0", "epoch": 1, "sequence": 1}
REQUESTS: dict[str, tuple[int, Any]] = {
    "an unknown type": (250, {}),
    "an answer": (41, {"runs": [], "misses": b""}),
    "a request for a server": (9, {}),
    "no body": (40, msgspec.Raw(b"")),
    "junk": (40, msgspec.Raw(b"\xc1\xc1")),
    "a deep body": (40, msgspec.Raw(DEEP)),
    "lengths that lie": (40, msgspec.Raw(b"\xdf\xff\xff\xff\xff")),
    "bytes after the body": (44, msgspec.Raw(b"\x80\x80")),
    "no keys": (40, FIND | {"digests": b""}),
    "half a key": (40, FIND | {"digests": bytes(40)}),
    "16,385 keys": (40, FIND | {"digests": bytes(16 * 16_385), "digest_size": 16}),
    "NUL in a namespace": (40, FIND | {"namespace": "a\0"}),
    "no parts": (40, FIND | {"parts": 0}),
    "a server without memory": (32, msgspec.structs.asdict(REGISTER) | {"capacity": 0}),
    "a server of 2**63 bytes": (32, msgspec.structs.asdict(REGISTER) | {"capacity": 2**63}),
    "escapes in a server's id": (32, msgspec.structs.asdict(REGISTER) | {"server": "\x1b[2J"}),
    "right to left in an address": (
        32,
        msgspec.structs.asdict(REGISTER) | {"addresses": ["\u202e"]},
    ),
    "65 addresses": (32, msgspec.structs.asdict(REGISTER) | {"addresses": ["x"] * 65}),
    "part 1 of 1": (37, ANNOUNCE | {"changes": [CHANGE | {"part": 1}]}),
    "a status nobody knows": (37, ANNOUNCE | {"changes": [CHANGE | {"status": 99}]}),
    "good changes, then a bad one": (37, ANNOUNCE | {"changes": [CHANGE, CHANGE | {"status": 99}]}),
    "1,025 changes": (37, ANNOUNCE | {"changes": [CHANGE | {"digests": key("a")}] * 1025}),
    "a sequence of 2**63": (37, ANNOUNCE | {"sequence": 2**63, "changes": []}),
    "no sequence": (37, {"server": "dev-0", "epoch": 1, "changes": []}),
}


@SHARED
@pytest.mark.parametrize("name", REQUESTS)
async def test_requests(shared: dev.Dev, name: str) -> None:
    number, body = REQUESTS[name]
    packed = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    deadline = asyncio.get_running_loop().time() + 2
    network = TcpNetwork()
    link = network.connect(shared.address)
    answer, refusal = await link.request(number, bytes(packed), deadline=deadline)
    network.close()
    assert answer == wire.TYPES[wire.Error]
    assert wire.decode(wire.Error, answer, refusal).code == "BadMessage"


GOOD = encode_envelope(44, cluster_id("default"), 1, b"\x80")
#: What a caller sends before a good request, and whether it is answered with an Error.
ENVELOPES: dict[str, tuple[list[bytes], bool]] = {
    "nothing": ([b""], False),
    "a header cut": ([GOOD[:15]], False),
    "junk": ([b"\xff" * 64], False),
    "http": ([b"GET / HTTP/1.1\r\n\r\n"], False),
    "the other plane": ([HELLO], False),
    "many of them": ([b"x"] * 100, False),
    "another version": ([GOOD[:2] + b"\x09" + GOOD[3:]], True),
    "another cluster": ([encode_envelope(44, cluster_id("other"), 1, b"\x80")], True),
}


@SHARED
@pytest.mark.parametrize("name", ENVELOPES)
async def test_envelopes(shared: dev.Dev, name: str) -> None:
    messages, answered = ENVELOPES[name]
    async with control_peer(shared.address) as peer:
        await peer.shake()
        peer.send(*messages, GOOD)
        answers = [(await peer.receive())[3] for _ in range(1 + answered)]
    assert answers == [1] * answered + [45]


NUMBERS = {
    "in order": [(1, True), (2, True), (3, True)],
    "a gap": [(1, True), (3, False), (2, True)],
    "backwards": [(1, True), (2, True), (1, True), (3, True)],
    "one twice": [(1, True), (1, True), (2, True)],
    "from the end": [(2**63 - 1, False), (1, True)],
}


@pytest.mark.parametrize("name", NUMBERS)
async def test_numbers_of_announcements(link: Link, name: str) -> None:
    """Applied before is acknowledged again, and not applied again; a gap is said."""
    await ask(link, REGISTER, wire.Registered)
    for sequence, applied in NUMBERS[name]:
        announce = wire.Announce("liar", 7, TOKEN, sequence, [])
        assert (await ask(link, announce, wire.Announced)).applied is applied


STRANGERS: dict[str, wire.Message] = {
    "an epoch that is over": wire.Announce("liar", 1, TOKEN, 1, []),
    "a server nobody knows": wire.Announce("nobody", 1, TOKEN, 1, []),
    "an inventory of another epoch": wire.Inventory("liar", 1, TOKEN, 1, 0, True, []),
    "an inventory of a number far ahead": wire.Inventory("liar", 7, TOKEN, 2**62, 0, True, []),
    "an inventory without its beginning": wire.Inventory("liar", 7, TOKEN, 9, 1, True, []),
    "an inventory of nobody": wire.Inventory("nobody", 1, TOKEN, 1, 0, True, []),
}


@pytest.mark.parametrize("name", STRANGERS)
async def test_news_of_strangers(link: Link, name: str) -> None:
    await ask(link, REGISTER, wire.Registered)
    assert not (await ask(link, STRANGERS[name], wire.Announced)).applied


async def test_an_id_that_is_taken(link: Link) -> None:
    twin = msgspec.structs.replace(REGISTER, server="dev-0")
    answer = await ask(link, twin, wire.Registered)
    assert not answer.accepted
    assert "another server has it, at inproc://" in answer.problem


# --- much of it --------------------------------------------------------------------------

TINY = frame(read(key("a")))


async def unread(running: dev.Dev) -> None:
    """A hundred thousand requests of a client that reads no answer."""
    async with raw(running) as peer:
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await peer.send(HELLO)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                for _ in range(1000):
                    await peer.send(TINY * 100)


async def refused(running: dev.Dev) -> None:
    """Five hundred links that end with an error."""
    for _ in range(500):
        async with raw(running) as peer:
            await peer.send(HELLO + bytes(64))
            assert await peer.refusal() == "BadFrame"


async def large_bodies(running: dev.Dev) -> None:
    """Fifty clients that send the largest body, and wait."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(50):
            peer = await stack.enter_async_context(raw(running))
            await peer.send(HELLO + TINY + header(9, 1 << 20))


async def unread_members(running: dev.Dev) -> None:
    """Requests to a master whose answers are never read."""
    async with control_peer(running.address) as peer:
        await peer.shake()
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        loop = asyncio.get_running_loop()
        began, sent = loop.time(), 0
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(30):
                # For a second, and on a busy machine until there is a flood.
                while sent < 100_000 and (sent <= 100 or loop.time() < began + 1):
                    peer.send(*[GOOD] * 100)
                    sent += 100
                    async with asyncio.timeout(1):
                        await peer.writer.drain()
        assert sent > 100


@pytest.mark.parametrize("flood", [unread, refused, large_bodies, unread_members])
async def test_memory_is_bounded(
    watched: dev.Dev, flood: Callable[[dev.Dev], Coroutine[Any, Any, None]]
) -> None:
    await refused(watched)  # what is loaded once is no growth
    before = resident_bytes()
    await flood(watched)
    assert resident_bytes() - before < 8 << 20
