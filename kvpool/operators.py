"""What an operator has servers do about what they hold, and what they report: drains, removals."""

from __future__ import annotations

from typing import NamedTuple

from kvpool.types import MoveStatus, Namespace


class DrainOrder(NamedTuple):
    """What a server is to do about its drain; with neither `begin` nor `cancel` it only reports.

    `within_s` is the time it has; with `back_in_s` it comes back so soon, with the file in which
    some of its blocks lie.
    """

    begin: bool = False
    cancel: bool = False
    within_s: float = 0.0
    back_in_s: float = 0.0


class Left(NamedTuple):
    """Blocks of one namespace that no other server took, for one reason."""

    namespace: str
    reason: str
    blocks: int
    bytes: int


class DrainReport(NamedTuple):
    """How far a drain is: of `total_blocks` so many were moved, and so many are left. Those that
    are neither were on other servers already, or have left the pool. `left` says why, the most
    bytes first. `state` is IN_PROGRESS, then DONE or NOT_YET; None: the server does not leave."""

    state: MoveStatus | None
    total_blocks: int = 0
    left_blocks: int = 0
    left_bytes: int = 0
    moved_blocks: int = 0
    moved_bytes: int = 0
    left: tuple[Left, ...] = ()


class RemovalCursor(NamedTuple):
    """How far a removal of a namespace has come on one server: of what its process `epoch` had
    written up to generation `upto`, the next step looks at this piece of this index."""

    epoch: int = 0
    upto: int = 0
    tier: int = 0
    part: int = 0
    piece: int = 0


class Holding(NamedTuple):
    """What one server has of a namespace: `blocks` of the tier that has most of them, and `bytes`
    in all of its tiers together."""

    namespace: Namespace
    blocks: int
    bytes: int


class HoldingsPage(NamedTuple):
    """A part of what a server has, by name: with `more`, ask again after the last one.

    `begin` is where a removal of what is there now begins.
    """

    begin: RemovalCursor
    held: tuple[Holding, ...]
    more: bool


class Removal(NamedTuple):
    """What one call has removed of a namespace, and where the next one goes on; None: all of what
    was to be removed is gone."""

    blocks: int
    bytes: int
    at: RemovalCursor | None
