"""Why blocks are gone, as the log of a server's changes has it."""

from __future__ import annotations

from kvpool.server.state.entry import ChangeLog, Entry, Index
from kvpool.types import ROOT, Namespace, ReadStatus
from tests.conftest import keys

INDEXES = [Index(Namespace(name), 0, 0) for name in ("one", "other")]


def left(log: ChangeLog, number: int, digest: bytes) -> tuple[Namespace, ReadStatus]:
    """The block leaves: of one namespace or the other, for one reason or the other."""
    index = INDEXES[number // 3 % 2]
    reason = ReadStatus.EVICTED if number % 5 else ReadStatus.REMOVED
    log.append_departures([Entry(index, digest, ROOT, 0, 1, 1)], reason, 0)
    return index.namespace, reason


def test_the_reason_of_each_departure_is_known_from_then_on() -> None:
    log, chain = ChangeLog(), keys("gone", 600)
    gone = []
    for number, digest in enumerate(chain):
        namespace, reason = left(log, number, digest)
        gone.append((namespace, digest, reason))
        assert len(log._departed) < 256, "some wait to be recorded"
        if number % 500 in (7, 499):
            assert log.tombstones.reason(namespace, digest) is reason
    for namespace, digest, reason in gone:
        assert log.tombstones.reason(namespace, digest) is reason
    told = [(one.namespace, digest, one.status) for one in log.changes for digest in one.digests]
    assert told == gone
    log.tombstones.came_back_all(gone[-1][0], chain[-1:])
    assert log.tombstones.reason(gone[-1][0], chain[-1]) is ReadStatus.NEVER_WRITTEN
