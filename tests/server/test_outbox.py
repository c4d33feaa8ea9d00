"""What a master has yet to hear: the order of changes, and when its map can be compared."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from kvpool.fingerprint import MapFingerprint
from kvpool.server import outbox
from kvpool.server.outbox import Outbox
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.entry import Stretch
from kvpool.server.state.store import Store
from kvpool.types import ReadStatus
from tests.conftest import NAMESPACE, keys

HELD = MapFingerprint(3, 7)


def came(digests: list[bytes]) -> list[Stretch]:
    return [Stretch(NAMESPACE, 0, [digest], ReadStatus.HIT) for digest in digests]


@pytest.mark.parametrize("fits", [1, 3, 100])
def test_what_does_not_fit_goes_next_in_order(fits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that left and came again must not be applied in the other order."""
    monkeypatch.setattr(outbox.wire, "ANNOUNCED_BLOCKS_MAX", 10)
    monkeypatch.setattr(outbox, "_CHANGES_SIZE", 128 * fits)  # so many groups in a message
    monkeypatch.setattr(outbox, "loop_time", lambda: 0.0)
    one, chain = Outbox(Blocks([Store(1 << 20)])), iter(keys("chain", 64))
    one.begin()
    changes = []
    for number, size in enumerate((3, 25, 1, 1, 9, 10, 11, 4)):
        status = ReadStatus.EVICTED if number % 2 else ReadStatus.HIT
        digests = [digest[: 8 + number // 2] for digest in itertools.islice(chain, size)]
        changes.append(Stretch(NAMESPACE, 0, digests, status))
    assert one.add(changes, HELD)
    told = []
    while one.pending:
        groups, count = one.take()
        assert 0 < count <= 10
        for group in groups:
            size, packed = group.digest_size, group.digests
            told += [(packed[at : at + size], group.status) for at in range(0, len(packed), size)]
        one.acknowledge(one.acknowledged + count)
    assert told == [(digest, one.status) for one in changes for digest in one.digests]
    assert one.comparable() == HELD


async def test_a_caller_is_told_whether_another_server_has_what_it_waits_for() -> None:
    """Its own blocks alone, also of several messages; nothing of those that nobody has applied."""
    one, chain = Outbox(Blocks([Store(1 << 20)])), keys("chain", 8)
    one.begin()

    def waiting(count: int) -> asyncio.Future[bool]:
        one.add(came(chain[:count]), HELD)
        future = asyncio.get_running_loop().create_future()
        assert not one.is_flushed(future)
        return future

    first, second = waiting(2), waiting(1)
    one.acknowledge(1, alone=False)
    one.acknowledge(2, alone=True)
    assert first.result() is False
    one.acknowledge(3, alone=True)
    third, lost = waiting(2), waiting(1)
    assert not second.result()  # it waited before the first message was answered
    one.acknowledge(5, alone=True)
    one.release(6)
    assert (third.result(), lost.result()) == (True, False)
    one.begin()
    again = waiting(1)
    one.acknowledge(1, alone=True)
    assert again.result()


async def test_maps_are_compared_only_when_the_inventory_is_no_later_than_the_changes() -> None:
    one, chain = Outbox(Blocks([Store(1 << 20)])), keys("chain", 2)
    one.begin()
    assert one.add(came(chain[:1]), HELD)  # while the inventory is sent: it may have the block
    one.comparable_from = one.enqueued
    assert one.comparable() is None
    _, count = one.take()
    one.acknowledge(count)
    assert one.comparable() == HELD
    assert one.add(came(chain[1:]), None)
    one.acknowledge(one.enqueued)
    assert one.comparable() is None, "what was held then is not known"
