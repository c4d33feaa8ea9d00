"""A newer release of the same protocol may say more: figures and answers, in both directions.

What an older peer must not misunderstand is refused with a field that it does not know: requests,
the handshake, and where the bytes of blocks lie.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import msgspec
import pytest

from kvpool import Pool, WriteStatus, admin, connect
from kvpool.errors import BadMessage
from kvpool.tools.subprocesses import Child, process_of
from tests.conftest import NAMESPACE, buffers, eventually, keys, values
from tests.support import messages
from tests.support.newer_release import MORE, with_more
from tests.wire.samples import KEYS, SAMPLES, STATS, TOKEN

#: What a process says of itself, and what it answers. All others are refused with more in them.
SAY_MORE = {
    *(messages.Welcome, messages.StatusReply, messages.Proposed),
    *(messages.Drained, messages.HoldingsReply, messages.RemovedAll, messages.Error),
    *(messages.Registered, messages.Heartbeat, messages.HeartbeatReply, messages.Announced),
    *(messages.FindReply, messages.PlaceReply, messages.MembersReply),
    *(messages.SessionExplained, messages.Explained, messages.NamespacesReply),
    *(messages.DemandsReply, messages.ChangesReply),
}
EVERY = pytest.mark.parametrize("sample", SAMPLES, ids=lambda m: type(m).__name__)


@EVERY
def test_only_answers_and_reports_may_have_a_field_that_is_not_known(
    sample: messages.Message,
) -> None:
    number, body = messages.encode(sample)
    more = msgspec.msgpack.encode(msgspec.msgpack.decode(body) | MORE)
    if type(sample) in SAY_MORE:
        assert messages.decode(type(sample), number, with_more(body)) == sample
        return
    with pytest.raises(BadMessage, match="unknown field `later`"):
        messages.decode(type(sample), number, more)


def test_a_stretch_of_changes_says_all_that_there_is() -> None:
    """A master that passed over a field of a change would list another block, or none."""
    change = messages.BlockChanges(**KEYS, part=0, tier=0, status=0)
    number, body = messages.encode(messages.Announce("s", 1, TOKEN, 2, [change]))
    more = msgspec.msgpack.decode(body)
    more["changes"][0] |= MORE
    with pytest.raises(BadMessage, match="unknown field"):
        messages.decode(messages.Announce, number, msgspec.msgpack.encode(more))


@pytest.mark.parametrize(
    "more", [b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
)
def test_what_is_passed_over_is_read_to_its_end(more: bytes) -> None:
    """However deep it is nested, and whatever length it claims to have."""
    number, body = messages.encode(messages.Heartbeat("s", 1, TOKEN, STATS))
    fields = msgspec.msgpack.decode(body)
    hostile = bytes([0x80 + len(fields) + 1]) + body[1:] + b"\xa5later" + more
    with pytest.raises(BadMessage):
        messages.decode(messages.Heartbeat, number, hostile)


def newer(*command: str) -> AbstractAsyncContextManager[Child]:
    return process_of("tests.support.newer_release", "kvpool", *command)


def older(*command: str) -> AbstractAsyncContextManager[Child]:
    return process_of("kvpool", *command)


async def word(child: Child, says: str) -> str:
    """The last word of the line in which it says so."""
    while says not in (line := await child.line()):
        pass
    return line.split()[-1]


@pytest.mark.parametrize(("master_of", "server_of"), [(newer, older), (older, newer)])
async def test_a_pool_works_in_the_middle_of_an_upgrade(
    master_of: Callable[..., AbstractAsyncContextManager[Child]],
    server_of: Callable[..., AbstractAsyncContextManager[Child]],
) -> None:
    """The client is of the older release: what it asks is answered, and what it knows is shown."""
    async with master_of("master", "--bind", "127.0.0.1:0") as master:
        address = await word(master, "master at")
        serve = ("server", "--capacity", "16MiB", "--listen", "tcp://127.0.0.1:0")
        async with (
            server_of(*serve, "--masters", address) as server,
            await connect(address) as pool,
        ):
            await word(server, "server ")
            chain = keys("upgrade", 3)
            written = await pool.write(NAMESPACE, chain, values(chain))
            assert written == [WriteStatus.STORED] * 3
            assert (await pool.match(NAMESPACE, chain)).length == 3
            got = buffers(3)
            assert all(one.status.hit for one in await pool.read(NAMESPACE, chain, got))
            assert got == values(chain)
            assert await admin(pool).namespaces() == [(NAMESPACE, 3)]
            (found,) = await admin(pool).explain(NAMESPACE, chain[:1])
            assert found.status.hit
            assert (await admin(pool).demand()).found_blocks == 3
            # Heartbeats bring figures: of the server, its tiers, its clients and its consumers.
            await figures(pool)


async def figures(pool: Pool) -> None:
    async def blocks_are_known() -> bool:
        return [one.stats.blocks for one in await pool.members()] == [3]

    await eventually(blocks_are_known, 20)
    (member,) = await pool.members()
    assert member.alive
    assert [one.name for one in member.stats.usage] == ["dram"]
    assert {one.by for one in member.stats.consumers} >= {"namespace"}
