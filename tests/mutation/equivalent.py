"""Mistakes that make no difference, each with the reason: reports leave them out.

A mistake is named by its file and by the line before and after it, so that an entry holds when
lines move and ends when its line changes. A line that occurs several times follows the one above
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_LABEL: Final = "Members are compared with each other only: any other number means the same."
_EMPTY: Final = "The value is written before anybody reads it."
_MOMENT: Final = "Differs if a call ends at exactly that moment, and then either answer is right."
_ID: Final = "Ids only have to differ, and grow."
_CLOCK: Final = "A machine's clock shows more than a second when a pool runs."
_DIGITS: Final = "A line of the log has one digit more."
_NO_DESCRIPTOR: Final = "Every negative number means that there is no descriptor."

EQUIVALENT: Final[Mapping[tuple[str, str, str], str]] = {
    ("kvpool/server/cold/search.py", "self._search_at = 0.0", "self._search_at = 1.0"): _CLOCK,
    (
        "kvpool/server/state/tier_stores.py",
        "for number, entry in enumerate(ordered, 1):",
        "for number, entry in enumerate(ordered, 0):",
    ): "The steps end one block later, and there is one more.",
    ("kvpool/server/state/extent_state.py", "QUARANTINED = 4", "QUARANTINED = 5"): _LABEL,
    ("kvpool/server/state/extent_state.py", "LAST_UNPIN = 8", "LAST_UNPIN = 9"): _LABEL,
    (
        "kvpool/server/state/allocator.py",
        "return ((power - _STEPS_LOG2 + 1) << _STEPS_LOG2) + (",
        "return ((power - _STEPS_LOG2 + 2) << _STEPS_LOG2) + (",
    ): "Numbers of classes are compared with each other only; eight of them stay unused.",
    (
        "kvpool/server/state/tier_index.py",
        "return -1 if tier == self.front_tier else tier",
        "return -2 if tier == self.front_tier else tier",
    ): "Ranks are compared with each other only, and tiers count from 0.",
    (
        "kvpool/server/state/store.py",
        "entry = Entry(index, digest, parent, 0, size, id)",
        "entry = Entry(index, digest, parent, 1, size, id)",
    ): _EMPTY,
    (
        "kvpool/server/state/budget.py",
        "UNLIMITED: Final = 1 << 62",
        "UNLIMITED: Final = 1 << (62 * 1000)",
    ): "Both are more than any memory.",
    ("kvpool/server/state/entry.py", "tier: int = 0", "tier: int = 1"): (
        "Left out only for a block that has left: it is in no tier."
    ),
    (
        "kvpool/server/state/allocator.py",
        "if power <= _STEPS_LOG2:",
        "if power < _STEPS_LOG2:",
    ): "Eight to fifteen units give the same number either way.",
    (
        "kvpool/server/state/allocator.py",
        "if not 0 <= offset < self.capacity:",
        "if not 0 <= offset <= self.capacity:",
    ): "No free extent contains the end.",
    (
        "kvpool/server/state/tier_transfers.py",
        "if taken >= size_max: break",
        "continue",
    ): "Nothing more is taken either way.",
    (
        "kvpool/master/state/sweeper.py",
        "if len(piece) < before // 2:",
        "if len(piece) < before // 1:",
    ): "A piece is compacted more often, which costs one copy of it.",
    (
        "kvpool/server/state/allocator.py",
        "before = _class_of(whole // self.alignment)",
        "before = _class_of(whole * self.alignment)",
    ): "The rest of the extent is taken out of its class and put back, which costs a moment.",
    (
        "kvpool/master/state/placement.py",
        "load = offered / min(max(1, own.capacity), believed_max)",
        "load = offered / min(max(2, own.capacity), believed_max)",
    ): "No block fits into one byte, nor into two.",
    (
        "connector/kvpool_connector/plan/probing.py",
        "return probe.seconds * slow_load.load.size > slow_load.limit_s * probe.size > 0",
        "return probe.seconds * slow_load.load.size > slow_load.limit_s * probe.size > 1",
    ): "A probe that brings anything brings a block, which has kilobytes.",
    (
        "kvpool/client/spread.py",
        "plan.lost(call, NO_TIME if loop.time() >= deadline else SERVER_LOST)",
        "plan.lost(call, NO_TIME if loop.time() > deadline else SERVER_LOST)",
    ): _MOMENT,
    (
        "connector/kvpool_connector/scheduler/engine_report.py",
        "if description == self._described and now - self._described_at < _DESCRIBE_EVERY_S:",
        "if description == self._described and now - self._described_at <= _DESCRIBE_EVERY_S:",
    ): _MOMENT,
    ("kvpool/server/state/entry.py", "checksum: int = 0", "checksum: int = 1"): _EMPTY,
    (
        "kvpool/client/device_staging.py",
        "except DeadlineExceeded: continue",
        "break",
    ): "All rounds of a call have one deadline.",
    (
        "kvpool/client/servers.py",
        "return self._broken_until.get(path, 0.0) > now",
        "return self._broken_until.get(path, 1.0) > now",
    ): _CLOCK,
    (
        "kvpool/client/servers.py",
        "broken_until = self._broken_until.get(path, 0.0)",
        "broken_until = self._broken_until.get(path, 1.0)",
    ): _CLOCK,
    (
        "kvpool/server/tier_mover.py",
        "seconds=round(_now() - began, 2),",
        "seconds=round(_now() - began, 3),",
    ): _DIGITS,
    (
        "tiers/kvpool_tiers/nvme/namespaces.py",
        "self._generation += 1",
        "self._generation += 2",
    ): _ID,
    (
        "connector/kvpool_connector/plan/tracked_request.py",
        "offered: tuple[int, int, int] = (0, 0, 1)  # first and last token and ways, while OFFERED",
        "offered: tuple[int, int, int] = (1, 0, 1)  # first and last token and ways, while OFFERED",
    ): _EMPTY,
    (
        "connector/kvpool_connector/plan/tracked_request.py",
        "offered: tuple[int, int, int] = (0, 0, 1)  # first and last token and ways, while OFFERED",
        "offered: tuple[int, int, int] = (0, 1, 1)  # first and last token and ways, while OFFERED",
    ): _EMPTY,
    (
        "tiers/kvpool_tiers/nvme/file_disk.py",
        "self._fd = self._direct = -1",
        "self._fd = self._direct = -2",
    ): _NO_DESCRIPTOR,
    (
        "tiers/kvpool_tiers/nvme/file_disk.py",
        "if os.fstat(self._fd).st_size > size:",
        "if os.fstat(self._fd).st_size >= size:",
    ): "A file that is cut to the size that it has stays as it is.",
    (
        "tiers/kvpool_tiers/nvme/format.py",
        "groups, rest = divmod(max(size - _HEAD_SIZE, 0), group._group_size)",
        "groups, rest = divmod(max(size - _HEAD_SIZE, 1), group._group_size)",
    ): "A byte is less than the headers of a group: it has room for nothing.",
    (
        "kvpool/master/state/server_record.py",
        "kept: bool = False  # the next process of this server will have the same token",
        "kept: bool = True  # the next process of this server will have the same token",
    ): "The only caller passes it.",
    (
        "kvpool/server/outbox.py",
        "self.acknowledged = 0",
        "self.acknowledged = 1",
    ): _EMPTY,
    ("kvpool/server/announcer.py", "self._hints_heard = 0", "self._hints_heard = 1"): _EMPTY,
    (
        "kvpool/ops/pool_stream.py",
        "if copies.lost: break",
        "continue",
    ): "What is left is not told either way, and if the server comes back, its return is told.",
}
