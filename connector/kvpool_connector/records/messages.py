"""What the connector's halves send each other: plain values, pickled by the engine between them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from kvpool.types import Match, Namespace, WriteStatus
from kvpool_connector.records.promises import WaitLimits
from kvpool_connector.records.provenance import BlockWriter, Trust

#: Number and fingerprints, by rank, of a LoRA adapter.
AdapterKey: TypeAlias = tuple[int, tuple[str, ...]]


class GroupBlocks(NamedTuple):
    """Blocks of one KV cache group, in the order of their chain; all tuples are equally long.

    `group` counts from 0. With `match`, which covers exactly these digests, no master is asked
    where they are. `parents` are for writing only.
    """

    group: int
    digests: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    parents: tuple[bytes, ...] = ()
    match: Match | None = None


class LoadRequest(NamedTuple):
    """Fill these blocks for a request that waits; abort after `timeout_s`.

    With `wait_limits` some of them are promised, and may come while they are loaded: the time
    without a block to load does not count for the timeout. Blocks of the writers in `compared` are
    refused, as those of writers that are not trusted: the request computes and compares them.
    """

    request_id: str
    blocks: tuple[GroupBlocks, ...]
    timeout_s: float
    wait_limits: WaitLimits | None = None
    compared: frozenset[bytes] = frozenset()


class SaveRequest(NamedTuple):
    """Store these blocks, which stay as they are until every rank has acknowledged `job`.

    `adapters` are the LoRA adapters that they were computed with: a worker with others refuses.
    """

    job: int
    blocks: tuple[GroupBlocks, ...]
    session: str = ""
    resume_in_s: float | None = None
    adapters: frozenset[AdapterKey] = frozenset()


class ProbeRequest(NamedTuple):
    """Read these blocks into scratch memory, to measure how long it takes."""

    blocks: tuple[GroupBlocks, ...]
    timeout_s: float


class VerifyRequest(NamedTuple):
    """Compare some of these blocks, which the engine has computed, with those of the pool.

    They follow one another, and stay as they are until every rank has reported `job`. `adapters`
    are as those of a `SaveRequest`.
    """

    job: int
    blocks: tuple[GroupBlocks, ...]
    timeout_s: float
    adapters: frozenset[AdapterKey] = frozenset()


@dataclass(slots=True)
class StepWork:
    """What one step asks of every rank. `namespaces` has one for each group.

    `serials` are those of the `WorkerInfo` of every rank that the namespaces are made of. A worker
    whose info has a serial below `serial_min`, or whose weights may have been changed, describes
    its model anew, if `weights_wanted`: the engine computes, or is about to. Otherwise it may be
    asleep, or in the middle of an update.
    """

    step: int
    namespaces: tuple[Namespace, ...] = ()
    loads: list[LoadRequest] = field(default_factory=list)
    saves: list[SaveRequest] = field(default_factory=list)
    probe: ProbeRequest | None = None
    #: The engine computes nothing in this step.
    idle: bool = False
    serials: tuple[int, ...] = ()
    verify: VerifyRequest | None = None
    serial_min: int = 1
    weights_wanted: bool = True
    #: What stands behind the blocks that are saved (`provenance.py`).
    mark: bytes = b""
    #: Whose blocks are loaded; None: those of the step before.
    trust: Trust | None = None


class ModelInfo(NamedTuple):
    """The model as a worker has it in memory.

    `weights` is their fingerprint, without `hidden` tensors that cannot be read; for engines of any
    tensor parallel size it is one of the tensors that no rank has a part of. `packing` names
    what the kernels do with the inside of a block. `description` is what shapes KV, names and
    readable values. `unknown` says why there is nothing of all this. `adapters` is true if LoRA
    adapters can be told apart.
    """

    weights: str = ""
    hidden: int = 0
    packing: str = ""
    description: tuple[tuple[str, str], ...] = ()
    adapters: bool = True
    unknown: str = ""


class WorkerInfo(NamedTuple):
    """How the blocks of a rank are made. It sends this until `StepWork.serials` has its serial.

    `block_bytes` are those of a block of each group. `serial` counts from 1.
    """

    rank: int
    model: ModelInfo
    block_bytes: tuple[int, ...]
    serial: int


class AdapterInfo(NamedTuple):
    """The LoRA adapters that a rank has loaded: fingerprints by the engine's number for each."""

    rank: int
    fingerprints: Mapping[int, str]


class LoadResult(NamedTuple):
    """A load has ended: `size` bytes came in `seconds`. `complete` is false when a block did not.

    The seconds are the worker's: the engine learns of the end only after its step, which may take
    long for another request, and says nothing about the pool. Neither does the time of waiting for
    promised blocks: it is not among them, but in `waited_s`. `writers` have stored what came.
    Blocks of `refused` writers were there, and did not come.
    """

    request_id: str
    size: int
    complete: bool
    seconds: float
    waited_s: float = 0.0
    writers: frozenset[BlockWriter] = frozenset()
    refused: frozenset[bytes] = frozenset()

    def joined(self, other: LoadResult) -> LoadResult:
        """Of both ranks: what the slower one needed, and what both have met."""
        return LoadResult(
            self.request_id,
            max(self.size, other.size),
            self.complete and other.complete,
            max(self.seconds, other.seconds),
            max(self.waited_s, other.waited_s),
            self.writers | other.writers,
            self.refused | other.refused,
        )


class SaveResult(NamedTuple):
    """A save has ended, `age_s` before this was reported: `size` new bytes are stored.

    `refused` are the blocks that the pool does not have: group, digest and why.
    """

    job: int
    size: int
    refused: tuple[tuple[int, bytes, WriteStatus], ...]
    age_s: float = 0.0


class ProbeResult(NamedTuple):
    """`size` bytes came in `seconds`."""

    size: int
    seconds: float


class Mismatch(NamedTuple):
    """A block of the pool that is not what this engine computes.

    `difference` is that of the layer that differs most (`comparison.py`); rounding explains at most
    `tolerance`. `part` is the rank's part of the block, which `writer` has stored; an unknown one
    if what stands before it may be the reason.
    """

    rank: int
    part: int
    group: int
    digest: bytes
    layer: str
    difference: float
    tolerance: float
    writer: BlockWriter


class VerifyResult(NamedTuple):
    """So many blocks were compared. `difference` is the largest of any layer.

    `mismatch` is the first block of the chain with one that rounding does not explain; blocks of
    the `equal` writers before it have none. `problem` says why this engine's blocks can never be
    compared. `job` 0: these are not of a `VerifyRequest`, but were there when they were saved.
    """

    job: int
    compared: int
    difference: float = 0.0
    mismatch: Mismatch | None = None
    problem: str = ""
    equal: frozenset[bytes] = frozenset()


@dataclass(slots=True)
class WorkerReport:
    """What one or several ranks report after a step."""

    step: int
    worker_infos: list[WorkerInfo] = field(default_factory=list)
    loads: list[LoadResult] = field(default_factory=list)
    saves: list[SaveResult] = field(default_factory=list)
    probes: list[ProbeResult] = field(default_factory=list)
    adapters: list[AdapterInfo] = field(default_factory=list)
    verified: list[VerifyResult] = field(default_factory=list)

    @property
    def has_news(self) -> bool:
        return any(_NEWS(self))

    def merge(self, other: WorkerReport) -> None:
        """Add what another rank reports of the same step."""
        for own, of_other in zip(_NEWS(self), _NEWS(other), strict=True):
            own.extend(of_other)


_NEWS: Final = operator.attrgetter(*WorkerReport.__slots__[1:])  # all but the step
