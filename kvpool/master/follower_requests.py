"""What those who follow a master's map ask it: pages of all of it, and what has changed since."""

from __future__ import annotations

from typing import Final

from kvpool.master.client_requests import ClientRequests
from kvpool.master.extension import Handlers
from kvpool.master.state.change_ring import ChangeRing, message_size_of
from kvpool.master.state.changes import PAGE_SIZE, LoggedChange
from kvpool.master.state.directory import Directory
from kvpool.master.state.snapshot import MapCursor, server_page, snapshot
from kvpool.protocols import Caller
from kvpool.wire.changes import Changes, ChangesReply, MapChange, Snapshot

#: Of one answer about what has changed, and copies of a part of a snapshot: a millisecond or two.
_CHANGES_BLOCKS: Final = 2048
_SNAPSHOT_BLOCKS: Final = 512


class FollowerRequests:
    """From now on the changes of `directory` are kept, if they are not yet, as this `stream`."""

    def __init__(self, directory: Directory, clients: ClientRequests, stream: int) -> None:
        kept = directory.servers.changes
        self.log = kept if isinstance(kept, ChangeRing) else ChangeRing()
        directory.servers.changes = self.log
        self._directory = directory
        self._stream = stream

    @property
    def handlers(self) -> Handlers:
        return {Changes: self.changes, Snapshot: self.snapshot}

    def changes(self, m: Changes, caller: Caller) -> ChangesReply:
        log = self.log
        found = log.since(m.after, _CHANGES_BLOCKS) if m.stream == self._stream else None
        if found is None:
            return ChangesReply(self._stream, log.last, [], False, True)
        changes, last = found
        listed = [_map_change(one) for one in changes]
        return ChangesReply(self._stream, last, listed, last < log.last)

    def snapshot(self, m: Snapshot, caller: Caller) -> ChangesReply:
        """All servers come first, in pages, and then their blocks."""
        changes: list[LoggedChange] = []
        at: MapCursor | None = MapCursor(m.namespace, m.parts, m.piece)
        more = False
        if not (m.parts or m.piece):
            changes, more = server_page(self._directory.servers, m.namespace)
            at = MapCursor(changes[-1].server) if more else MapCursor()
        if at is not None and not more:
            left = PAGE_SIZE - sum(map(message_size_of, changes))
            blocks = max(1, _SNAPSHOT_BLOCKS - len(changes))  # a server takes as long as a block
            part, at = snapshot(self._directory, at, blocks, left, self._stream)
            changes += part
        last, listed = self.log.last, [_map_change(one) for one in changes]
        following = (at is not None, False, *(at or MapCursor()))
        return ChangesReply(self._stream, last, listed, *following)


def _map_change(one: LoggedChange) -> MapChange:
    space = one.namespace
    named = ("", 0) if space is None else (space.name, space.parts)
    keys = (one.digest_size, one.digests)
    return MapChange(one.kind, one.server, *named, one.part, one.tier, *keys, one.host)
