"""Blocks that readers have asked for and that are not here: a master may be outdated.

They are told to masters after all changes, at most so many at a time: nobody waits for them, most
were never here, and whoever asks for such keys decides how many there are.
(design: announcements)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from kvpool.shares import Shares
from kvpool.tenant_names import tenant_of
from kvpool.types import Namespace

#: Namespace, part and digest.
MissedBlock: TypeAlias = tuple[Namespace, int, bytes]

#: That wait to be told.
MISSED_MAX: Final = 1024


class Missed:
    """Blocks that wait, each once, of each tenant its share. Pure."""

    def __init__(self, limit: int = MISSED_MAX) -> None:
        self.shares = Shares(limit)
        #: In the order in which they came.
        self.blocks: dict[MissedBlock, None] = {}

    def add(self, namespace: Namespace, part: int, digests: Sequence[bytes]) -> None:
        """Keep these, too. Those beyond the share of their tenant are dropped, and counted."""
        tenant, before = tenant_of(namespace.name), len(self.blocks)
        kept = digests[: self.shares.room(tenant)]
        self.blocks.update(dict.fromkeys([(namespace, part, digest) for digest in kept]))
        self.shares.take(tenant, len(self.blocks) - before)
        if len(kept) < len(digests):
            self.shares.refuse(tenant, len(digests) - len(kept))

    def take(self) -> list[MissedBlock]:
        """All that wait, oldest first; none is left."""
        blocks = list(self.blocks)
        self.blocks.clear()
        self.shares.clear()
        return blocks
