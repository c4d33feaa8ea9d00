"""The frame reader gives the same frames however their bytes arrive, or raises PeerError."""

from __future__ import annotations

import itertools
import random
import struct
import weakref
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpool.errors import BadFrame, BadMessage, InvariantViolated, PeerError, VersionMismatch
from kvpool.net import requests
from kvpool.wire import frames, messages
from kvpool.wire.frames import (
    READ_AHEAD,
    SMALL,
    STEP,
    TRANSITIONS,
    FrameReader,
    PayloadReceiver,
    ReaderEvent,
    ReaderState,
    no_payload,
)
from tests.wire.samples import SAMPLES

FUZZ = settings(max_examples=400, derandomize=True, deadline=None, database=None)


class Received:
    """What came of some bytes: frames with their payloads, until the first error."""

    def __init__(self, count: int) -> None:
        self.reader = FrameReader()
        self.frames: list[tuple[frames.Frame, bytes]] = []
        self.error: PeerError | None = None
        self._left = count
        self._memory = bytearray()

    def target(self, frame: frames.Frame) -> PayloadReceiver:
        """One block in pieces of 10 bytes."""
        if frame.payload_size > 1 << 22:
            raise BadMessage("more than was asked for")
        self._memory = bytearray(frame.payload_size)
        view = memoryview(self._memory)
        pieces = [view[start : start + 10] for start in range(0, len(view), 10)]
        return PayloadReceiver([pieces] if pieces else [])

    def ask(self) -> None:
        """Take frames as long as they are complete."""
        while self._left and self.error is None and self.reader.state is ReaderState.IDLE:
            self._left -= 1
            self._step(lambda: self.reader.ask(self.target))

    def feed(self, data: bytes) -> None:
        """Bytes arrive, as many at a time as the reader has room for."""
        left = memoryview(data)
        while left and not self.reader.full:
            room = self.reader.memory
            count = min(len(room), len(left))
            assert count
            room[:count] = left[:count]
            left = left[count:]
            if self._step(lambda count=count: self.reader.received(count)):
                self.ask()

    def _step(self, step: Callable[[], frames.Frame | None]) -> bool:
        try:
            frame = step()
        except PeerError as error:
            self.error = error
            assert self.reader.state is ReaderState.CLOSED
            return False
        if frame is None:
            return False
        self.frames.append((frame, bytes(self._memory)))
        self._memory = bytearray()
        return True


def received(chunks: Iterable[bytes], count: int, *, ask_first: bool = True) -> Received:
    """The outcome of chunks that arrive one after the other."""
    outcome = Received(count)
    if ask_first:
        outcome.ask()
    for chunk in chunks:
        outcome.feed(chunk)
    outcome.ask()
    return outcome


def encoded(message: messages.Message, payload: bytes = b"") -> bytes:
    return frames.encode_frame(*messages.encode(message), len(payload)) + payload


def expected(message: messages.Message, payload: bytes = b"") -> tuple[frames.Frame, bytes]:
    return frames.Frame(*messages.encode(message), len(payload)), payload


def arrive(reader: FrameReader, data: bytes) -> frames.Frame | None:
    """All at once, where the reader has room for it."""
    reader.memory[: len(data)] = data
    return reader.received(len(data))


def filling(*blocks: bytearray) -> FrameReader:
    """A reader for these blocks that has the head of their frame."""
    reader = FrameReader()
    reader.ask(lambda frame: PayloadReceiver([(memoryview(block),) for block in blocks]))
    head = frames.encode_frame(messages.PAYLOAD, b"", sum(map(len, blocks)))
    assert arrive(reader, head) is None
    return reader


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda m: type(m).__name__)
def test_every_message_however_it_is_cut(sample: messages.Message) -> None:
    """Byte by byte, and in two halves at every split, with a payload, before and after `ask`."""
    payload = bytes(range(37))
    data = encoded(sample, payload)
    wanted = [expected(sample, payload)]
    one_by_one = [data[n : n + 1] for n in range(len(data))]
    for ask_first in (True, False):
        assert received(one_by_one, 1, ask_first=ask_first).frames == wanted
        for split in range(len(data) + 1):
            halves = [data[:split], data[split:]]
            assert received(halves, 1, ask_first=ask_first).frames == wanted


@FUZZ
@given(
    blocks=st.lists(
        st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any), min_size=1, max_size=4
    ),
    steps=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    is_hashed=st.booleans(),
)
@example([[0, 3, 0, 0, 2], [0, 1], [4, 0]], [12], True)
def test_a_block_in_any_pieces(blocks: list[list[int]], steps: list[int], is_hashed: bool) -> None:
    """Empty pieces, too: a caller's layer may have no bytes. Each block has its own checksum."""
    memory = [[bytearray(size) for size in block] for block in blocks]
    size = sum(map(sum, blocks))
    payload = memoryview(bytes(range(1, size + 1)))
    seeds = list(range(7, 7 + len(blocks))) if is_hashed else None
    receiver = PayloadReceiver([[memoryview(piece) for piece in one] for one in memory], seeds)
    arrived = 0
    for step in itertools.cycle(steps):
        assert receiver.missing == size - arrived
        if not receiver.missing:
            break
        assert receiver.memory  # or a socket would receive nothing, which means its end
        count = min(step, len(receiver.memory))
        receiver.memory[:count] = payload[arrived : arrived + count]
        receiver.received(count)
        arrived += count
    found = [b"".join(pieces) for pieces in memory]
    assert b"".join(found) == payload
    assert receiver.checksums == [
        xxhash.xxh3_64_intdigest(data, seed=seed)
        for data, seed in zip(found, seeds or (), strict=False)
    ]


def test_a_target_is_filled_without_a_copy() -> None:
    """Once the head is there, the memory for the next bytes is the target itself."""
    block = bytearray(100)
    reader = filling(block)
    assert reader.state is ReaderState.PAYLOAD
    assert reader.memory.obj is block


@FUZZ
@given(
    samples=st.lists(st.tuples(st.sampled_from(SAMPLES), st.binary(max_size=300)), max_size=4),
    cuts=st.lists(st.floats(0, 1), max_size=6),
    ask_first=st.booleans(),
)
def test_frames_in_a_row(
    samples: list[tuple[messages.Message, bytes]], cuts: list[float], ask_first: bool
) -> None:
    data = b"".join(encoded(*sample) for sample in samples)
    ends = [0, *sorted(int(cut * len(data)) for cut in cuts), len(data)]
    chunks = [data[first:last] for first, last in pairwise(ends)]
    outcome = received(chunks, len(samples), ask_first=ask_first)
    assert outcome.error is None
    assert outcome.frames == [expected(*sample) for sample in samples]


@FUZZ
@given(data=st.binary(max_size=200), cut=st.floats(0, 1), whole=st.booleans())
@example(b"GET / HTTP/1.1\r\n\r\n", 0.5, False)
def test_garbage_is_refused_alike_however_it_is_cut(data: bytes, cut: float, whole: bool) -> None:
    if whole:
        data = encoded(SAMPLES[1]) + data
    split = int(cut * len(data))
    at_once = received([data], 3)
    cut_up = received([data[:split], *(data[n : n + 1] for n in range(split, len(data)))], 3)
    assert at_once.frames == cut_up.frames
    assert type(at_once.error) is type(cut_up.error)


@pytest.mark.parametrize(
    ("header", "error"),
    [
        (struct.pack("<2sBBIQ", b"kv", frames.PROTOCOL_VERSION, 1, 1 << 30, 0), BadFrame),
        (struct.pack("<2sBBIQ", b"kv", frames.PROTOCOL_VERSION, 1, 0, 2**63), BadFrame),
        (struct.pack("<2sBBIQ", b"kv", 99, 1, 0, 0), VersionMismatch),
        (struct.pack("<2sBBIQ", b"kM", frames.PROTOCOL_VERSION, 1, 0, 0), BadFrame),
        (struct.pack("<2sBBIQ", b"kv", frames.PROTOCOL_VERSION, 2, 0, 7), BadFrame),
    ],
    ids=["body too large", "payload too large", "version", "magic", "payload not expected"],
)
def test_a_bad_head_closes_the_reader(header: bytes, error: type[PeerError]) -> None:
    reader = FrameReader()
    reader.ask(no_payload)
    with pytest.raises(error):
        arrive(reader, header)
    assert reader.state is ReaderState.CLOSED
    assert not arrive(reader, b"more")


def test_what_is_no_frame_is_shown() -> None:
    """A person reads in the log that a browser has connected."""
    with pytest.raises(BadFrame, match=r"starts with b'GET ', expected b'kv'$"):
        frames.decode_header(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(BadFrame, match=r"starts with b'GET ', expected b'kM'$"):
        requests.decode_envelope(b"GET / HTTP/1.1\r\n\r\n", 0)


def test_between_frames_the_reader_holds_no_memory_but_its_own() -> None:
    """An idle connection must not keep what its last caller has read; nor allocate per frame."""

    class Target(PayloadReceiver):
        pass

    reader, target = FrameReader(), Target([(memoryview(bytearray(10)),)])
    own, gone = reader.memory.obj, weakref.ref(target)
    targets = [target]
    del target
    reader.ask(lambda frame: targets.pop())
    assert arrive(reader, encoded(SAMPLES[0], bytes(10)))
    assert gone() is None
    assert reader.memory.obj is own
    assert reader.position == (0, 0)


def test_a_large_body_is_received_as_it_arrives() -> None:
    """Memory grows with what has come, not with what a header claims."""
    reader = FrameReader()
    reader.ask(no_payload)
    head = frames.encode_frame(2, bytes(frames.BODY_SIZE_MAX))[: frames.HEADER_SIZE]
    assert not arrive(reader, head)
    assert len(reader.memory) < READ_AHEAD
    missing, frame, seen = frames.BODY_SIZE_MAX, None, len(head)
    while frame is None:
        count = min(missing, len(reader.memory))
        assert count <= max(READ_AHEAD, seen)
        missing, seen = missing - count, seen + count
        frame = reader.received(count)
    assert len(frame.body) == frames.BODY_SIZE_MAX
    assert len(reader.memory) == READ_AHEAD


def test_what_nobody_asks_for_waits() -> None:
    reader = FrameReader()
    for _ in range(READ_AHEAD):
        reader.received(1)
    assert reader.full
    assert reader.state is ReaderState.IDLE
    with pytest.raises(BadFrame):
        reader.ask(no_payload)


def test_nothing_is_written_into_a_target_that_was_given_up() -> None:
    block = bytearray(100)
    reader = filling(block)
    arrive(reader, b"x")
    reader.close()
    room = reader.memory
    assert room.obj is not block
    room[:5] = b"later"
    assert not reader.received(5)
    assert block == b"x" + bytes(99)


def test_every_state_can_be_closed_and_only_the_table_moves_it() -> None:
    assert set(TRANSITIONS) == set(ReaderState)
    for state, steps in TRANSITIONS.items():
        assert steps[ReaderEvent.CLOSE] is ReaderState.CLOSED, state
    reader = FrameReader()
    reader.ask(no_payload)
    with pytest.raises(InvariantViolated):
        reader.ask(no_payload)


def test_a_frame_whose_payload_has_not_come_has_begun() -> None:
    """What has begun is timed: a peer that stops after the head does not hold the stream."""
    reader, block = FrameReader(), bytearray(10)
    reader.ask(lambda frame: PayloadReceiver([(memoryview(block),)]))
    head = frames.encode_frame(messages.PAYLOAD, b"", 10)
    assert not reader.begun
    for part in (head[:1], head[1:]):
        assert not arrive(reader, part)
        assert reader.begun
    assert not reader.received(9)
    assert reader.begun
    assert reader.received(1)
    assert not reader.begun


def test_every_piece_that_arrives_shows_that_the_server_is_there() -> None:
    """G6: a server that is slow but sends is not left for another one."""

    class Touches:
        count = 0

        def touch(self) -> None:
            self.count += 1

        def disarm(self) -> None:
            raise AssertionError("more is expected of the server")

    touches = Touches()
    receiver = PayloadReceiver([(memoryview(bytearray(10)),)] * 2, None, touches)
    for count in range(1, 21):
        receiver.received(1)
        assert touches.count == count


@FUZZ
@given(
    sizes=st.lists(st.sampled_from([1, 4096, SMALL - 1, SMALL, READ_AHEAD + 5]), min_size=1),
    first=st.integers(0, 5000),
    step=st.integers(1, 2 * READ_AHEAD),
)
@example([1] * 40, 0, 1)
@example([4096] * 40, 0, READ_AHEAD)
def test_small_pieces_are_filled_many_at_a_time(sizes: list[int], first: int, step: int) -> None:
    """Each byte in its place, with its checksum, and none of the next frame is received before."""
    step = max(step, sum(sizes) // 200)  # many steps show nothing that these do not
    blocks = [bytearray(size) for size in sizes]
    payload = random.Random(step).randbytes(sum(sizes))
    receiver = PayloadReceiver([(memoryview(block),) for block in blocks], [7] * len(blocks))
    reader = FrameReader()
    reader.ask(lambda frame: receiver)
    whole = frames.encode_frame(messages.PAYLOAD, b"", len(payload)) + payload
    data = memoryview(whole + b"kv, the next frame")
    at, calls, frame = 0, 0, None
    while frame is None:
        count = min(len(reader.memory), step, len(data) - at) if at else 16 + first % sum(sizes)
        assert count, "no room, or it waits for more than the frame has"
        reader.memory[:count] = data[at : at + count]
        at, calls = at + count, calls + 1
        frame = reader.received(count)
        assert reader.begun is (frame is None)
    assert at == len(whole)
    assert b"".join(blocks) == payload
    assert receiver.checksums == [xxhash.xxh3_64_intdigest(block, seed=7) for block in blocks]
    if step >= READ_AHEAD and max(sizes) < SMALL:
        assert calls <= 2 + len(payload) // READ_AHEAD


def test_large_memory_is_filled_in_place() -> None:
    """No copy of it: only what is in small pieces comes through the buffer."""
    small, large = bytearray(10), bytearray(2 * STEP)
    reader = filling(small, large)
    assert reader.memory.obj is not small
    reader.received(10)
    assert reader.memory.obj is large


@pytest.mark.parametrize("size", [0, 9, 11])
def test_a_payload_of_another_size_is_refused(size: int) -> None:
    """Before one byte of it: a shorter one would be waited for, a longer one read as a frame."""
    reader = FrameReader()
    reader.ask(lambda frame: PayloadReceiver([(memoryview(bytearray(10)),)]))
    with pytest.raises(BadFrame, match="expected 10"):
        arrive(reader, frames.encode_frame(messages.PAYLOAD, b"", size))
    assert reader.state is ReaderState.CLOSED


def test_the_rest_of_a_large_piece_is_filled_in_place() -> None:
    """However its bytes are cut: what is left of it is small, and its neighbours are not."""
    blocks = [bytearray(STEP), bytearray(STEP)]
    reader = filling(*blocks)
    reader.received(STEP - 10)
    assert reader.memory.obj is blocks[0]
    assert len(reader.memory) == 10
