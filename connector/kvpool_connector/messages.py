"""What the connector's halves tell each other: plain values, pickled by the engine between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvpool.types import Match, Namespace, WriteStatus


class Blocks(NamedTuple):
    """Blocks of one KV cache group, in the order of their chain. `group` counts from 0.

    With `match`, which covers exactly these digests, no master is asked where they are. `parents`
    are for writing only.
    """

    group: int
    digests: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    parents: tuple[bytes, ...] = ()
    match: Match | None = None


class Load(NamedTuple):
    """Fill these blocks for a request that waits; give up after `timeout_s`."""

    request_id: str
    blocks: tuple[Blocks, ...]
    timeout_s: float


class Save(NamedTuple):
    """Store these blocks, which stay as they are until every rank has acknowledged `job`."""

    job: int
    blocks: tuple[Blocks, ...]
    session: str = ""
    resume_in_s: float | None = None


class Probe(NamedTuple):
    """Read these blocks into memory of no meaning, to see how long it takes."""

    blocks: tuple[Blocks, ...]
    timeout_s: float


@dataclass(slots=True)
class Work:
    """What one step asks of every rank. The namespaces are one for each group."""

    step: int
    namespaces: tuple[Namespace, ...] = ()
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    probe: Probe | None = None
    #: The engine computes nothing in this step.
    idle: bool = False


class Hello(NamedTuple):
    """What a rank says of itself until it is given namespaces: how its blocks are made."""

    rank: int
    packing: str
    #: Of a block of each group.
    block_bytes: tuple[int, ...]


class Loaded(NamedTuple):
    """A load has ended: what came, and why the rest did not. `complete` is false after a miss."""

    request_id: str
    size: int
    complete: bool


class Saved(NamedTuple):
    """A save has ended; `refused` are the blocks that the pool does not have, and why."""

    job: int
    size: int
    refused: tuple[tuple[int, bytes, WriteStatus], ...]


class Probed(NamedTuple):
    """So many bytes came in so long."""

    size: int
    seconds: float


@dataclass(slots=True)
class Report:
    """What one or several ranks have to say after a step."""

    step: int
    hellos: list[Hello] = field(default_factory=list)
    loaded: list[Loaded] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    probed: list[Probed] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """Take in what another rank reports of the same step."""
        self.hellos += other.hellos
        self.loaded += other.loaded
        self.saved += other.saved
        self.probed += other.probed
