"""Any bytes either parse or raise PeerError, and whoever sends them ends only its own link (G11).

About 7,000 examples, the same in every run. `tests/fuzz/` searches further, guided by coverage.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from itertools import pairwise
from pkgutil import iter_modules
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpool import wire
from kvpool.config import MasterConfig
from kvpool.errors import BadMessage, KvpoolError, PeerError, Unavailable
from kvpool.master.service import Master
from kvpool.net import requests
from kvpool.protocols import ReadOptions
from kvpool.testing.invariants import check_invariants
from kvpool.types import Namespace, ReadBlock
from kvpool.wire import frames
from kvpool_transports.streams.pool import StreamPool
from kvpool_transports.streams.requests import StreamChannel
from kvpool_transports.streams.stream import Stream
from tests.support import messages
from tests.wire import offline
from tests.wire.samples import DIGESTS, KEYS, SAMPLES

EVERY = pytest.mark.parametrize("sample", SAMPLES, ids=lambda m: type(m).__name__)


def fuzz(examples: int) -> settings:
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None)


# --- strategies --------------------------------------------------------------------------


def values(type: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    """Whatever a decoder for this type accepts, with its own bounds; collections are short."""
    match type:
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.IntType(ge=ge, le=le, lt=lt):
            assert ge is not None
            return st.integers(ge, le if le is not None else (lt or 2**64) - 1)
        case msgspec.inspect.FloatType(ge=ge, le=le):
            return st.floats(ge, le)
        case msgspec.inspect.StrType(min_length=least, max_length=most):
            return st.text(
                "añ\0\u202e/.\U0001f600", min_size=least or 0, max_size=min(most or 9, 9)
            )
        case msgspec.inspect.BytesType(min_length=least, max_length=most):
            return st.binary(min_size=least or 0, max_size=min(most or 64, 64))
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.UnionType(types=types):
            return st.one_of(*map(values, types))
        case msgspec.inspect.ListType(item_type=item):
            return st.lists(values(item), max_size=3)
        case msgspec.inspect.VarTupleType(item_type=item):
            return st.lists(values(item), max_size=3).map(tuple)
        case msgspec.inspect.TupleType(item_types=items):
            return st.tuples(*map(values, items))
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=3)
        case msgspec.inspect.StructType(cls=made, fields=fields):
            return st.builds(made, **{field.name: values(field.type) for field in fields})
    raise AssertionError(f"no strategy for {type}")


class Mutation(NamedTuple):
    """One change of some bytes; `where` is in 256ths of them."""

    kind: str
    where: int
    length: int
    piece: bytes

    def __call__(self, data: bytes) -> bytes:
        at = self.where * len(data) >> 8
        head, tail = data[:at], data[at:]
        match self.kind:
            case "flip":
                return head + bytes(byte ^ 1 << self.length % 8 for byte in tail[:1]) + tail[1:]
            case "cut":
                return head
            case "drop":
                return head + tail[self.length :]
            case "splice":
                return data[: self.length] + tail[: self.length] + data[self.length :]
            case "insert":
                return head + self.piece + tail
            case _:
                return head + self.piece + tail[len(self.piece) :]


#: Lengths and types that mean much to msgpack and to a header.
TELLING = st.sampled_from([b"\xdd\xff\xff\xff\xff", b"\xc1", b"\xc3", b"\xff" * 8, bytes(8), b"kv"])
MUTATIONS = st.builds(
    Mutation,
    st.sampled_from(["flip", "cut", "drop", "splice", "insert", "overwrite"]),
    st.integers(0, 255),
    st.integers(0, 40),
    TELLING | st.binary(max_size=20),
)


def mutated(data: bytes, changes: list[Mutation]) -> bytes:
    for change in changes:
        data = change(data)
    return data


# --- messages ----------------------------------------------------------------------------


def test_every_message_has_a_sample_and_a_number_of_its_own() -> None:
    assert {type(sample) for sample in SAMPLES} == set(messages.TYPES)
    files = {one.name for one in iter_modules(wire.__path__)} - {"access", "frames"}
    assert {kind.__module__.rpartition(".")[2] for kind in messages.TYPES} >= files
    numbers = [*messages.TYPES.values(), messages.PAYLOAD]
    assert len(set(numbers)) == len(numbers)


@EVERY
def test_hostile_bodies(sample: messages.Message) -> None:
    empty = b"" if msgspec.structs.fields(type(sample)) else b"\xc0"
    nested = b"\x91" * 100_000, b"\x81\xa1x" * 50_000
    longer = [kind + b"\xff\xff\xff\xff" for kind in (b"\xdf", b"\xdd", b"\xc6")]
    no_text = b"\xa4\xff\xfe\xfd\xfc", b"\x81\xa9namespace\xa2\xff\xff"
    for body in (empty, *nested, *longer, *no_text):
        with pytest.raises(BadMessage):
            messages.decode(type(sample), messages.TYPES[type(sample)], body)


@pytest.mark.parametrize("kind", messages.TYPES, ids=lambda kind: kind.__name__)
def test_a_message_does_not_change_and_what_it_leaves_out_is_empty(
    kind: type[messages.Message],
) -> None:
    """It may be kept, shared and compared; and a peer that lacks a field says nothing by it."""
    sample = next(sample for sample in SAMPLES if type(sample) is kind)
    for field in msgspec.structs.fields(kind):
        with pytest.raises(AttributeError):
            setattr(sample, field.name, getattr(sample, field.name))
        if not field.required:
            assert not msgspec.structs.asdict(kind(**required(sample)))[field.name]


def required(sample: messages.Message) -> dict[str, Any]:
    """The fields that a message must have."""
    fields = msgspec.structs.fields(type(sample))
    return {field.name: getattr(sample, field.name) for field in fields if field.required}


def parses_or_is_refused(parse: Callable[[], object]) -> None:
    try:
        parse()
    except PeerError:
        pass


@EVERY
@fuzz(20)
@given(data=st.data())
def test_round_trip(sample: messages.Message, data: st.DataObject) -> None:
    """What is encoded within the bounds is decoded to the same, for every type."""
    made = data.draw(st.just(sample) | values(msgspec.inspect.type_info(type(sample))))
    number, body = messages.encode(made)
    assert messages.decode(type(sample), number, body) == made
    assert messages.message_type(number) is type(sample)
    with pytest.raises(BadMessage, match="expected"):
        messages.decode(type(sample), 250, body)


@EVERY
@fuzz(40)
@given(changes=st.lists(MUTATIONS, min_size=1, max_size=4))
def test_mutated_messages(sample: messages.Message, changes: list[Mutation]) -> None:
    number, body = messages.encode(sample)
    body = mutated(body, changes)

    def parse() -> None:
        message = messages.decode(type(sample), number, body)
        assert isinstance(message, type(sample))
        if isinstance(message, messages.Keys):
            messages.unpack_batch(message)

    parses_or_is_refused(parse)


@fuzz(1000)
@given(st.binary(max_size=200))
def test_any_bytes_as_every_message(body: bytes) -> None:
    for type, number in messages.TYPES.items():
        parses_or_is_refused(lambda type=type, number=number: messages.decode(type, number, body))


@fuzz(300)
@given(st.integers(0, 255), st.binary(max_size=100), st.integers(0, 2**40))
def test_frames_round_trip(type: int, body: bytes, payload: int) -> None:
    encoded = frames.encode_frame(type, body, payload)
    assert frames.decode_header(encoded) == (type, len(body), payload)
    envelope = requests.encode_envelope(type, 7, payload, body)
    assert requests.decode_envelope(envelope, 7) == (type, payload, body)


@fuzz(1000)
@given(st.binary(min_size=0, max_size=64), st.lists(MUTATIONS, max_size=2))
@example(b"GET / HTTP/1.1\r\n", [])
def test_any_header_parses_or_is_refused(header: bytes, changes: list[Mutation]) -> None:
    envelope = mutated(requests.encode_envelope(40, 7, 1, header), changes)
    frame = mutated(frames.encode_frame(9, header), changes)
    for message in (header, envelope):
        parses_or_is_refused(lambda message=message: requests.decode_envelope(message, 7))
        requests.envelope_id(message)
    for start in (header, frame):
        if len(start) >= frames.HEADER_SIZE:
            parses_or_is_refused(lambda start=start: frames.decode_header(start))


# --- a server and what clients send it ---------------------------------------------------


def frame(message: messages.Message) -> bytes:
    return frames.encode_frame(*messages.encode(message))


HELLO = frame(messages.Hello("default", "fuzz"))
ONE = {**KEYS, "digests": DIGESTS[:32]}


def written(sizes: list[int], ids: list[int], checksums: list[int], wait_s: float) -> bytes:
    """A write as tcp does it. A server gives its first reservation the number 2."""
    names = {**KEYS, "digests": DIGESTS[: 32 * len(sizes)]}
    parents = bytes(32 * len(sizes))
    reserve = messages.Reserve(**names, part=0, parents=parents, sizes=sizes, wait_s=wait_s)
    payload = frames.encode_frame(messages.PAYLOAD, b"", sum(sizes)) + bytes(sum(sizes))
    return frame(reserve) + payload + frame(messages.Seal(ids, checksums, True, wait_s))


def written_at_once(sizes: list[int], checksums: list[int], more: int) -> bytes:
    """A small write, with more or fewer bytes than it says."""
    names = {**KEYS, "digests": DIGESTS[: 32 * len(sizes)]}
    parents = bytes(32 * len(sizes))
    write = messages.Reserve(
        **names, part=0, parents=parents, sizes=sizes, checksums=checksums, visible=True, wait_s=0.5
    )
    size = max(0, sum(sizes) + more)
    return frames.encode_frame(*messages.encode(write), size) + bytes(size)


REQUESTS = st.one_of(
    st.sampled_from([frame(m) for m in SAMPLES if messages.TYPES[type(m)] < 32]),
    st.just(written([64], [2], [7], 0.5)),
    st.builds(
        written,
        st.lists(st.sampled_from([1, 64, 4096, 40_000]), min_size=1, max_size=2),
        st.lists(st.integers(1, 5), max_size=2),
        st.lists(st.integers(0, 2**64 - 1), max_size=2),
        st.sampled_from([0.0, 0.5, 1e9]),
    ),
    st.builds(
        written_at_once,
        st.lists(st.sampled_from([1, 64, 4096, 40_000]), min_size=1, max_size=2),
        st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=2),
        st.sampled_from([-40_000, -1, 0, 0, 0, 0, 1]),
    ),
    st.just(frame(messages.Read(**ONE, part=0, buffer_sizes=[1 << 20]))),
    st.just(frame(messages.Remove(**ONE, part=0, corrupt=True))),
)


class Errors(logging.Handler):
    """A session logs what it did not expect; here that is a failure."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.unexpected: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.unexpected.append(record)


@pytest.fixture(scope="module")
def loop() -> Iterator[offline.Loop]:
    made = offline.Loop()
    yield made
    made.close()


@pytest.fixture(scope="module")
def errors() -> Iterator[Errors]:
    handler = Errors()
    logger = logging.getLogger("kvpool")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@fuzz(700)
@given(
    requests=st.lists(REQUESTS, max_size=4),
    changes=st.lists(MUTATIONS, max_size=3),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    mapped=st.booleans(),
)
def test_a_server_and_what_a_client_sends(
    loop: offline.Loop,
    errors: Errors,
    requests: list[bytes],
    changes: list[Mutation],
    cuts: list[float],
    mapped: bool,
) -> None:
    sent = mutated(HELLO + b"".join(requests), changes)
    ends = [0, *sorted(int(cut * len(sent)) for cut in cuts), len(sent)]
    chunks = [sent[first:last] for first, last in pairwise(ends)]

    async def life() -> None:
        server = offline.server()
        answered = await offline.converse(server, chunks, mapped=mapped)
        store = server.store
        assert (store.held.pins, store.held.reservations, store.held.quarantined) == (0, 0, 0)
        check_invariants(store)
        assert server.stats(0).counters["connections"] == 0
        assert answered[:2] in (b"", b"kv")
        await server.close()

    loop.run_until_complete(life())
    assert not errors.unexpected


# --- a client and what servers send it ---------------------------------------------------


@fuzz(500)
@given(
    statuses=st.binary(min_size=2, max_size=2) | st.just(b"\0\0"),
    sizes=st.lists(st.integers(0, 100), max_size=3) | st.just([64, 64]),
    changes=st.lists(MUTATIONS, max_size=2),
)
def test_a_client_and_what_a_server_sends(
    loop: offline.Loop, statuses: bytes, sizes: list[int], changes: list[Mutation]
) -> None:
    """A read ends with one result for each block, or with an error of ours; never with more."""
    data = messages.Data(statuses, sizes, [0] * len(sizes))
    answer = frames.encode_frame(*messages.encode(data), sum(sizes)) + bytes(sum(sizes))
    blocks = [ReadBlock(DIGESTS[at : at + 32], (memoryview(bytearray(64)),), 64) for at in (0, 32)]

    async def read() -> None:
        stream = Stream()
        wire = offline.Wire(stream)

        async def dial(deadline: float) -> Stream:
            return stream

        channel = StreamChannel("tcp://x:1", StreamPool(dial))
        reading = asyncio.create_task(
            channel.read(ReadOptions(Namespace("n"), 0), blocks, deadline=loop.time() + 1)
        )
        await asyncio.sleep(0)
        await wire.deliver(mutated(answer, changes))
        try:
            assert len(await reading) == len(blocks)
        except (PeerError, Unavailable):
            assert stream.lost
        channel.abort()
        await asyncio.sleep(0)

    loop.run_until_complete(read())


# --- a master and what both send it ------------------------------------------------------

REQUESTED = {32, 34, 36, 37, 38, 40, 42, 44, 46}  # the types that a master answers
TOLD = [sample for sample in SAMPLES if messages.TYPES[type(sample)] in REQUESTED]
ASKED = st.one_of(
    st.sampled_from(TOLD),
    st.sampled_from(TOLD).flatmap(lambda m: values(msgspec.inspect.type_info(type(m)))),
)


@fuzz(400)
@given(asked=st.lists(st.tuples(ASKED, st.lists(MUTATIONS, max_size=2)), max_size=8))
def test_a_master_and_what_it_is_asked(
    loop: offline.Loop, asked: list[tuple[messages.Message, list[Mutation]]]
) -> None:
    async def ask() -> None:
        master = Master(MasterConfig(), offline.NoNetwork())
        for message, changes in asked:
            number, body = messages.encode(message)
            try:
                master.handle(number, mutated(body, changes))
            except KvpoolError:
                pass
            check_invariants(master.directory)

    loop.run_until_complete(ask())
