"""What a transport does with bytes: they arrive complete and in place, or a status has the reason.

After every check no pin, reservation, connection or task is left, every invariant holds, no byte
was written into released memory, and no exception stayed uncaught.
"""

from __future__ import annotations

import asyncio

from kvpool import removals
from kvpool.checksum import block_seeds, checksum
from kvpool.errors import Overloaded
from kvpool.protocols import Peer, ReserveRequest, WriteOptions
from kvpool.testing.harness import (
    CAPACITY,
    LARGE,
    NAMESPACE,
    PROMPT_S,
    Stage,
    TransportCheck,
    blank,
    blocks,
    content,
    describe,
    digest,
    in_pieces,
)
from kvpool.types import (
    BATCH_BLOCKS_MAX,
    ROOT,
    Namespace,
    ReadResult,
    ReadStatus,
    SessionHint,
    WriteBlock,
    WriteStatus,
)

# --- bytes -----------------------------------------------------------------------------------


@TransportCheck
async def blocks_of_many_sizes_come_back(stage: Stage) -> None:
    """What was written is read: one byte, odd sizes, several MiB."""
    channel = await stage.connect()
    sizes = (1, 2, 511, 4095, 4096, 4097, 65_537, 300_001, 1 << 20, (3 << 20) + 5, 8 << 20)
    data = {digest(size): content(digest(size), size) for size in sizes}
    await stage.stored(channel, data)
    await stage.holds(channel, data)
    for key, value in data.items():
        await stage.holds(channel, {key: value})


@TransportCheck
async def a_full_batch_comes_back(stage: Stage) -> None:
    """BATCH_BLOCKS_MAX blocks in one call, both ways."""
    channel = await stage.connect()
    keys = [digest(f"batch/{number}") for number in range(BATCH_BLOCKS_MAX)]
    data = {key: content(key, 100 + number % 7) for number, key in enumerate(keys)}
    await stage.stored(channel, data)
    await stage.holds(channel, data)


@TransportCheck
async def keys_of_every_length_work(stage: Stage) -> None:
    """Digests have 16 to 32 bytes, the same in one batch."""
    channel = await stage.connect()
    for size in (16, 17, 20, 31, 32):
        data = {digest(f"{size}/{number}")[:size]: bytes([size]) * 100 for number in range(3)}
        await stage.stored(channel, data)
        await stage.holds(channel, data)


@TransportCheck
async def parts_and_namespaces_do_not_meet(stage: Stage) -> None:
    """One digest is another block in each part and in each namespace."""
    channel = await stage.connect()
    one, two = Namespace("conformance/two parts", parts=2), Namespace("conformance/two parts")
    places = [(one, 0), (one, 1), (two, 0), (NAMESPACE, 0)]
    key = digest("shared")
    for number, (namespace, part) in enumerate(places):
        await stage.stored(channel, {key: bytes([number]) * 99}, namespace=namespace, part=part)
    for number, (namespace, part) in enumerate(places):
        await stage.holds(channel, {key: bytes([number]) * 99}, namespace=namespace, part=part)
    (result,) = await stage.read(channel, [key], [blank(99)], namespace=Namespace("elsewhere"))
    stage.expect(
        result.status is ReadStatus.NEVER_WRITTEN, "NEVER_WRITTEN elsewhere", describe(result)
    )


@TransportCheck
async def results_are_in_the_callers_order(stage: Stage) -> None:
    """Hits and every kind of miss in one batch: each status where its block was asked for."""
    channel = await stage.connect()
    data = blocks("here", 3, 1000)
    first, second, third = data
    gone, coming, never = digest("gone"), digest("coming"), digest("never")
    await stage.stored(channel, {**data, gone: bytes(100)})
    await removals.remove(channel, NAMESPACE, [gone], deadline=stage.within())
    writer = stage.recorder.connect(Peer("another writer"))
    await writer.reserve(
        ReserveRequest(NAMESPACE, 0, [coming], [ROOT], [100]), deadline=stage.within()
    )
    keys = [never, third, gone, first, coming, second]
    buffers = [blank(1000) for _ in keys[:-1]] + [blank(999)]
    results = await stage.read(channel, keys, buffers)
    writer.close()
    statuses = [
        ReadStatus.NEVER_WRITTEN,
        ReadStatus.HIT,
        ReadStatus.REMOVED,
        ReadStatus.HIT,
        ReadStatus.BEING_WRITTEN,
        ReadStatus.BUFFER_TOO_SMALL,
    ]
    stage.expect([r.status for r in results] == statuses, f"{statuses}", describe(results))
    stage.expect(
        buffers == [blank(1000), data[third], blank(1000), data[first], blank(1000), blank(999)],
        "each block in its own buffer, and the buffers of misses untouched",
    )


@TransportCheck
async def a_larger_buffer_keeps_its_rest(stage: Stage) -> None:
    """`size` bytes of the buffer are the block, the rest is untouched."""
    channel = await stage.connect()
    data = {**blocks("small", 2, 777), **blocks("large", 2, LARGE)}
    await stage.stored(channel, data)
    buffers = [blank(len(value) + 333) for value in data.values()]
    results = await stage.read(channel, list(data), buffers)
    sizes = [len(value) for value in data.values()]
    stage.expect(
        [r.size for r in results] == sizes, f"the blocks' sizes {sizes}", describe(results)
    )
    wanted = [value + blank(333) for value in data.values()]
    stage.expect(buffers == wanted, "the bytes behind each block to be untouched")


@TransportCheck
async def bytes_are_taken_while_they_are_pinned(stage: Stage) -> None:
    """After an unpin the server may use the memory for another block at any moment."""
    channel = await stage.connect()
    data = {**blocks("small", 3, 5000), **blocks("large", 5, LARGE)}
    await stage.stored(channel, data)
    stage.recorder.burn_after_reading = True
    await stage.holds(channel, data)


@TransportCheck
async def blocks_are_sealed_when_their_bytes_are_there(stage: Stage) -> None:
    """A seal carries the checksums of bytes that are in place; the recorder looks at each."""
    channel = await stage.connect()
    data = {**blocks("small", 5, 5000), **blocks("large", 5, LARGE)}
    await stage.stored(channel, data)
    stage.expect(not stage.recorder.faults, "no early seal", stage.recorder.faults)
    for key, value in data.items():
        stage.expect(stage.memory_of(key) == value, "the block's bytes in the pool's memory")


@TransportCheck
async def the_server_receives_the_callers_arguments(stage: Stage) -> None:
    """Parents, sizes, part, tag, visibility, deadline and the client's name arrive as given."""
    channel = await stage.connect(client="the caller")
    namespace = Namespace("conformance/Überlänge", parts=3)
    keys = [digest(f"chain/{number}") for number in range(3)]
    parents = [ROOT, *keys[:-1]]
    chain = [
        WriteBlock(key, parent, (memoryview(bytes([7]) * (50 + number)),), 50 + number)
        for number, (key, parent) in enumerate(zip(keys, parents, strict=True))
    ]
    recorder = stage.recorder
    session_hint = SessionHint("agent 7/Überlänge", 2.5)
    for at_once_max in (0, BATCH_BLOCKS_MAX):
        recorder.at_once_max, deadline = at_once_max, stage.within()
        options = WriteOptions(namespace, 2, False, session_hint, 2)
        await channel.write(options, chain, deadline=deadline)
        stage.expect(len(recorder.asked) == 1, "one `reserve`", recorder.asked)
        asked, server_deadline = recorder.asked.pop()
        wanted = ReserveRequest(
            namespace, 2, keys, parents, [50, 51, 52], session_hint, copies=[2] * 3
        )
        stage.expect(asked == wanted, f"{wanted}", describe(asked))
        late_s = server_deadline - deadline if server_deadline is not None else 0.0
        stage.expect(-PROMPT_S < late_s < PROMPT_S, "the caller's deadline", f"{late_s:+g} s off")
        stage.expect(recorder.visible == [False], "visible=False", recorder.visible)
        recorder.visible.clear()
        stage.store.remove(namespace, keys)
    names = {peer.name for peer in stage.recorder.peers}
    stage.expect(names == {"the caller"}, "the client's name as its peer's name", names)


# --- pieces ----------------------------------------------------------------------------------


@TransportCheck
async def a_block_in_pieces_is_their_concatenation(stage: Stage) -> None:
    """Written in pieces of odd sizes and read whole; written whole and read into other pieces."""
    channel = await stage.connect()
    cuts = {
        9: (1, 7),
        4097: (4095, 1),
        65_537: (13, 17, 1, 32_768),
        LARGE: tuple(range(1, 1000, 13)),
        (2 << 20) + 1: (32 << 10,) * 63,
        (3 << 20) + 5: (1, 2 << 20),
    }
    data = {digest(size): content(digest(size), size) for size in cuts}
    pieces = {key: in_pieces(data[key], *cuts[len(data[key])]) for key in data}
    await stage.stored_in_pieces(channel, pieces)
    await stage.holds(channel, data)
    buffers = [blank(len(value)) for value in data.values()]
    memory = [
        in_pieces(buffer, *reversed(sizes))
        for buffer, sizes in zip(buffers, cuts.values(), strict=True)
    ]
    results = await stage.read_in_pieces(channel, list(data), memory)
    wanted = [ReadResult(ReadStatus.HIT, len(value)) for value in data.values()]
    stage.expect(results == wanted, "a HIT of the right size for every block", describe(results))
    stage.expect(buffers == list(data.values()), "the blocks' bytes, in the pieces' order")


@TransportCheck
async def pieces_may_meet_anywhere(stage: Stage) -> None:
    """At every offset of a small block, so also inside of what a header's size is."""
    channel = await stage.connect()
    data = blocks("two pieces", 47, 48)
    cut = {key: in_pieces(value, n) for n, (key, value) in enumerate(data.items(), start=1)}
    await stage.stored_in_pieces(channel, cut)
    buffers = [blank(48) for _ in data]
    memory = [in_pieces(buffer, 48 - n) for n, buffer in enumerate(buffers, start=1)]
    results = await stage.read_in_pieces(channel, list(data), memory)
    stage.expect(all(r.status.hit for r in results), "a HIT for every block", describe(results))
    wrong = [n for n, value in enumerate(data.values(), start=1) if buffers[n - 1] != value]
    stage.expect(not wrong, "the bytes that were written", f"wrong where cut after {wrong}")


@TransportCheck
async def a_small_block_leaves_the_other_pieces_alone(stage: Stage) -> None:
    """It ends inside of a piece, at the end of one, or in the first one."""
    channel = await stage.connect()
    for size, cuts in ((100, (60, 60, 80)), (120, (60, 60, 80)), (30, (60, 60)), (LARGE, (9, 7))):
        key = digest(f"smaller than its pieces/{size}")
        value = content(key, size)
        await stage.stored(channel, {key: value})
        buffer = blank(size + 100)
        (result,) = await stage.read_in_pieces(channel, [key], [in_pieces(buffer, *cuts)])
        stage.expect(result == ReadResult(ReadStatus.HIT, size), f"{size} bytes", describe(result))
        rest = buffer == value + blank(100)
        stage.expect(rest, "the block, and the bytes behind it untouched", f"wrong after {cuts}")


@TransportCheck
async def hits_and_misses_keep_their_own_pieces(stage: Stage) -> None:
    """A hit behind a miss goes into its own pieces, and those of the miss are untouched."""
    channel = await stage.connect()
    data = {**blocks("here", 2, 5000), **blocks("large and here", 1, LARGE)}
    first, second, large = data
    await stage.stored(channel, data)
    keys = [digest("never"), second, digest("not once"), large, first]
    sizes = [5000, 5000, LARGE, LARGE, 5000]
    buffers = [blank(size) for size in sizes]
    memory = [in_pieces(buffer, 3, 1001) for buffer in buffers]
    results = await stage.read_in_pieces(channel, keys, memory)
    hits = [result.status.hit for result in results]
    stage.expect(
        hits == [False, True, False, True, True], "three hits, two misses", describe(results)
    )
    wanted = [blank(5000), data[second], blank(LARGE), data[large], data[first]]
    stage.expect(buffers == wanted, "each block in its own pieces")


# --- one writer, no space --------------------------------------------------------------------


@TransportCheck
async def a_stored_block_is_not_written_again(stage: Stage) -> None:
    """The second writer gets ALREADY_STORED, the bytes of the first stay, other blocks are
    stored."""
    channel = await stage.connect()
    data = blocks("first", 3, 3000)
    middle = list(data)[1]
    await stage.stored(channel, {middle: data[middle]})
    statuses = await stage.write(channel, {**data, middle: bytes(3000)})
    wanted = [WriteStatus.STORED, WriteStatus.ALREADY_STORED, WriteStatus.STORED]
    stage.expect(statuses == wanted, f"{wanted}", describe(statuses))
    statuses = await stage.write(channel, data)
    wanted = [WriteStatus.ALREADY_STORED] * 3
    stage.expect(statuses == wanted, f"{wanted}", describe(statuses))
    await stage.holds(channel, data)


@TransportCheck
async def of_two_writers_one_gets_in_progress(stage: Stage) -> None:
    """IN_PROGRESS while another connection has the block reserved; free again when that ends."""
    channel = await stage.connect()
    data = blocks("contended", 3, 3000)
    middle = list(data)[1]
    other = stage.recorder.connect(Peer("another writer"))
    await other.reserve(
        ReserveRequest(NAMESPACE, 0, [middle], [ROOT], [3000]), deadline=stage.within()
    )
    statuses = await stage.write(channel, data)
    wanted = [WriteStatus.STORED, WriteStatus.IN_PROGRESS, WriteStatus.STORED]
    stage.expect(statuses == wanted, f"{wanted}", describe(statuses))
    other.close()
    await stage.stored(channel, {middle: data[middle]})
    await stage.holds(channel, data)


@TransportCheck
async def of_many_writers_one_wins(stage: Stage) -> None:
    """All write other bytes under one key at once; what is read is what the winner wrote."""
    channel, other = await stage.connect(), await stage.connect()
    key = digest("race")
    outcomes = await asyncio.gather(
        *(stage.write((channel, other)[n % 2], {key: bytes([n]) * LARGE}) for n in range(8))
    )
    statuses = [status for (status,) in outcomes]
    fine = {WriteStatus.STORED, WriteStatus.ALREADY_STORED, WriteStatus.IN_PROGRESS}
    stage.expect(
        statuses.count(WriteStatus.STORED) == 1 and set(statuses) <= fine,
        "one STORED, IN_PROGRESS or ALREADY_STORED for the others",
        describe(statuses),
    )
    await stage.holds(channel, {key: bytes([statuses.index(WriteStatus.STORED)]) * LARGE})


@TransportCheck
async def blocks_arrive_without_lent_memory(stage: Stage) -> None:
    """A server that lends no memory receives the bytes; what a stopped client had is free."""
    channel = await stage.connect()
    stage.recorder.lends = False
    data = blocks("carried", 3, LARGE)
    await stage.stored(channel, data)
    await stage.holds(channel, data)
    stage.recorder.lends = True
    await stage.stored(channel, {digest("lent"): bytes(LARGE)})


@TransportCheck
async def refused_blocks_of_a_small_write_leave_the_others_alone(stage: Stage) -> None:
    """Of a few bytes: those that are not stored go nowhere, at any place in the batch."""
    channel = await stage.connect()
    keys = [digest(f"small/{number}") for number in range(7)]
    data = {key: content(key, 500 + 77 * number) for number, key in enumerate(keys)}
    here, coming = keys[0], keys[3]
    await stage.stored(channel, {here: data[here]})
    other = stage.recorder.connect(Peer("another writer"))
    await other.reserve(
        ReserveRequest(NAMESPACE, 0, [coming], [ROOT], [len(data[coming])]),
        deadline=stage.within(),
    )
    statuses = await stage.write(channel, {**data, here: bytes(9)})
    wanted = [WriteStatus.STORED] * 7
    wanted[0], wanted[3] = WriteStatus.ALREADY_STORED, WriteStatus.IN_PROGRESS
    stage.expect(statuses == wanted, f"{wanted}", describe(statuses))
    other.close()
    await stage.holds(channel, {key: data[key] for key in keys if key != coming})
    await stage.stored(channel, {coming: data[coming]})  # and the connection is as good as before
    await stage.holds(channel, data)


@TransportCheck
async def what_a_server_cannot_take_at_once_is_stored(stage: Stage) -> None:
    """Where it would have to wait it takes none of the bytes, or some: then it is asked again."""
    channel = await stage.connect()
    for at_once_max in (0, 1, 2):
        stage.recorder.at_once_max = at_once_max
        data = blocks(f"later/{at_once_max}", 5, 3001)
        await stage.stored(channel, data)
        await stage.holds(channel, data)


@TransportCheck
async def no_space_is_a_status(stage: Stage) -> None:
    """A full server and a block larger than its segment are answers, not errors, and in time."""
    channel = await stage.connect()
    hog = stage.recorder.connect(Peer("hog"))
    await hog.reserve(
        ReserveRequest(NAMESPACE, 0, [digest("hog")], [ROOT], [CAPACITY - (1 << 20)]),
        deadline=stage.within(),
    )
    huge, fits, full = digest("huge"), digest("fits"), digest("full")
    statuses = await stage.write(channel, {huge: bytes(CAPACITY + 1), fits: bytes(1000)})
    wanted = [WriteStatus.TOO_LARGE, WriteStatus.STORED]
    stage.expect(statuses == wanted, f"{wanted}", describe(statuses))
    deadline = stage.within(0.4)
    statuses = await stage.write(channel, {full: bytes(2 << 20)}, within_s=0.4)
    stage.expect(stage.within(0) <= deadline, "an answer by the deadline")
    hog.close()
    stage.expect(statuses == [WriteStatus.NO_SPACE], "NO_SPACE", describe(statuses))
    await stage.stored(channel, {full: bytes(2 << 20)})


# --- checksums -------------------------------------------------------------------------------


@TransportCheck
async def damaged_blocks_are_corrupt(stage: Stage) -> None:
    """A flipped bit in the pool's memory is CORRUPT; without `verify` the bytes come as is."""
    channel = await stage.connect()
    for size in (1, 5000, LARGE):
        data = blocks(f"rot/{size}", 3, size)
        middle = list(data)[1]
        await stage.stored(channel, data)
        stage.memory_of(middle)[size // 2] ^= 1
        results = await stage.read(channel, list(data), [blank(size) for _ in data])
        statuses = [result.status for result in results]
        wanted = [ReadStatus.HIT, ReadStatus.CORRUPT, ReadStatus.HIT]
        stage.expect(statuses == wanted, f"{wanted} for blocks of {size} bytes", describe(statuses))
        buffers = [blank(size) for _ in data]
        results = await stage.read(channel, list(data), buffers, verify=False)
        stage.expect(
            all(r.status.hit for r in results), "a HIT without `verify`", describe(results)
        )
        stage.expect(buffers[1] == stage.memory_of(middle), "the bytes as they are, unverified")


@TransportCheck
async def bytes_of_another_key_are_corrupt(stage: Stage) -> None:
    """The checksum is seeded with the key: intact bytes of the wrong block are caught, too."""
    channel = await stage.connect()
    data = blocks("swap", 2, 5000)
    await stage.stored(channel, data)
    one, two = (stage.store.index.peek(NAMESPACE, 0, key) for key in data)
    assert one is not None
    assert two is not None

    def swap() -> None:
        one.offset, two.offset = two.offset, one.offset
        one.checksum, two.checksum = two.checksum, one.checksum

    swap()
    results = await stage.read(channel, list(data), [blank(5000), blank(5000)])
    swap()
    stage.expect(
        [r.status for r in results] == [ReadStatus.CORRUPT] * 2, "CORRUPT, twice", describe(results)
    )


@TransportCheck
async def a_checksum_covers_all_pieces(stage: Stage) -> None:
    """A bit that is flipped in any of them is CORRUPT."""
    channel = await stage.connect()
    for size in (48, LARGE):
        data = blocks(f"rot in a piece/{size}", 3, size)
        await stage.stored_in_pieces(channel, {k: in_pieces(v, 5, 11) for k, v in data.items()})
        for key, where in zip(data, (0, 10, size - 1), strict=True):
            stage.memory_of(key)[where] ^= 1
        memory = [in_pieces(blank(size), 7, 20) for _ in data]
        results = await stage.read_in_pieces(channel, list(data), memory)
        statuses = [result.status for result in results]
        wanted = [ReadStatus.CORRUPT] * 3
        stage.expect(statuses == wanted, f"{wanted} for blocks of {size} bytes", describe(statuses))


@TransportCheck
async def reported_corruption_is_verified(stage: Stage) -> None:
    """The server verifies a report: an intact block stays, a corrupt one can be written again."""
    channel = await stage.connect()
    data = blocks("report_corruption", 3, 5000)
    keys = list(data)
    await stage.stored(channel, data)
    stage.memory_of(keys[1])[4999] ^= 128
    asked = [*keys, digest("never")]
    dropped = await removals.report_corruption(
        channel, NAMESPACE, 0, asked, deadline=stage.within()
    )
    wanted = [False, True, False, False]
    stage.expect(dropped == wanted, f"{wanted}", describe(dropped))
    results = await stage.read(channel, keys, [blank(5000) for _ in keys])
    statuses = [result.status for result in results]
    reasons = [ReadStatus.HIT, ReadStatus.CORRUPT, ReadStatus.HIT]
    stage.expect(statuses == reasons, f"{reasons}", describe(statuses))
    await stage.stored(channel, {keys[1]: data[keys[1]]})
    await stage.holds(channel, data)


# --- remove; what a channel does not do ------------------------------------------------------


@TransportCheck
async def a_removal_may_mean_one_version(stage: Stage) -> None:
    """With checksums, only the blocks whose bytes have them are removed."""
    channel = await stage.connect()
    namespace = Namespace("conformance/versions", parts=2)
    meant, other = digest("meant"), digest("other")
    data = {meant: b"m" * 100, other: b"o" * 100}
    await stage.stored(channel, data, namespace=namespace, part=1)
    seeds = block_seeds(namespace, 1, [meant, other])
    checksums = [checksum(b"m" * 100, seeds[0]), checksum(b"m" * 100, seeds[1])]
    removed = await removals.remove(
        channel, namespace, [meant, other], part=1, checksums=checksums, deadline=stage.within()
    )
    stage.expect(removed == [True, False], "[True, False]", describe(removed))
    memory = [blank(100), blank(100)]
    results = await stage.read(channel, [meant, other], memory, namespace=namespace, part=1)
    statuses = [result.status for result in results]
    wanted = [ReadStatus.REMOVED, ReadStatus.HIT]
    stage.expect(statuses == wanted, f"{wanted}", describe(statuses))


@TransportCheck
async def removed_blocks_are_gone(stage: Stage) -> None:
    """Every part goes, or the one that is named; True where there was one."""
    channel = await stage.connect()
    namespace = Namespace("conformance/parts", parts=2)
    kept, gone, half = digest("kept"), digest("gone"), digest("half")
    for part in (0, 1):
        data = {kept: bytes(100), gone: bytes(100), half: bytes(100)}
        await stage.stored(channel, data, namespace=namespace, part=part)
    asked = [digest("never"), gone]
    removed = await removals.remove(channel, namespace, asked, deadline=stage.within())
    stage.expect(removed == [False, True], "[False, True]", describe(removed))
    removed = await removals.remove(channel, namespace, [half], part=1, deadline=stage.within())
    stage.expect(removed == [True], "[True]", describe(removed))
    for part in (0, 1):
        memory = [blank(100), blank(100), blank(100)]
        results = await stage.read(
            channel, [gone, kept, half], memory, namespace=namespace, part=part
        )
        statuses = [result.status for result in results]
        of_half = ReadStatus.REMOVED if part == 1 else ReadStatus.HIT
        wanted = [ReadStatus.REMOVED, ReadStatus.HIT, of_half]
        stage.expect(statuses == wanted, f"{wanted}", describe(statuses))


@TransportCheck
async def a_channel_never_caches(stage: Stage) -> None:
    """Each read asks the server: a block that another client has removed is a miss at once."""
    channel = await stage.connect()
    data = blocks("cached", 2, 5000)
    key, other = data
    await stage.stored(channel, data)
    await stage.holds(channel, data)
    stage.memory_of(other)[0] ^= 1
    stage.store.remove(NAMESPACE, [key])
    results = await stage.read(channel, [key, other], [blank(5000), blank(5000)])
    wanted = [ReadStatus.REMOVED, ReadStatus.CORRUPT]
    stage.expect([r.status for r in results] == wanted, f"{wanted}", describe(results))


@TransportCheck
async def a_transport_never_retries(stage: Stage) -> None:
    """A refusal in a call reaches the caller, after one attempt, and the channel goes on."""
    channel = await stage.connect()
    data = blocks("refused", 2, 100)
    stage.recorder.refuse_writes = Overloaded("not now")
    await stage.raises(Overloaded, stage.write(channel, data), "a write that is refused")
    attempts = len(stage.recorder.asked)
    stage.expect(attempts == 1, "one attempt", f"the server was asked {attempts} times")
    stage.recorder.refuse_writes = None
    await stage.stored(channel, data)


@TransportCheck
async def many_calls_at_once(stage: Stage) -> None:
    """A hundred calls on one channel, of every kind, none in another's way."""
    channel = await stage.connect()
    data = blocks("old", 50, 20_000)
    await stage.stored(channel, data)
    old, new = list(data), blocks("new", 40, 20_000)
    await asyncio.gather(
        *(stage.holds(channel, {key: data[key]}) for key in old[:40]),
        *(stage.stored(channel, {key: value}) for key, value in new.items()),
        *(removals.remove(channel, NAMESPACE, [key], deadline=stage.within()) for key in old[40:]),
        *(
            removals.report_corruption(channel, NAMESPACE, 0, [key], deadline=stage.within())
            for key in old[:10]
        ),
    )
    await stage.holds(channel, {**{key: data[key] for key in old[:40]}, **new})
    (result,) = await stage.read(channel, [old[45]], [blank(20_000)])
    stage.expect(result.status is ReadStatus.REMOVED, "REMOVED", describe(result))
