"""When should a block go to the disk? `python -m kvpool.tools.tier_study [--trace FILE]`.

A workload is played in virtual time against the real tiered store, without processes and bytes: a
request reads the prefix that is here, waits for those blocks that lie on the disk, and writes the
rest. The disk moves one block after the other, so reads and writes wait for each other. A token is
128 KiB, as with a model of 8B; a block is 512 tokens in a trace, 2,048 in the generated workload.
Compared are the modes of `server.write_mode`, and writing back only what was read before. For each,
and each size of the memory (design: tiers):

    hits         of all blocks that are asked for, the share that is here
    memory       the share that is here in memory
    half time    hits in the tenth of the workload that follows its middle
    after kill   the same, if the server is killed with -9 at half time and recovers the disk
    written      blocks written to the disk, of those that clients have written
    read p50     milliseconds that a request waits for the disk, of those that need it; and p99
    write p99    milliseconds that a request waits for memory to write into; and the longest
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console
from rich.table import Table

from kvpool.protocols import ReserveRequest
from kvpool.protocols.persistent_tier import Record
from kvpool.server.state.entry import Entry
from kvpool.server.state.front_store import FrontStore
from kvpool.server.state.tier_stores import FileStore
from kvpool.server.state.tier_transfers import TierTransfer
from kvpool.server.state.tiered_store import TieredStore
from kvpool.tools import traces, workloads
from kvpool.tools.dry_pool import digest_of
from kvpool.tools.traces import Request
from kvpool.types import ROOT, Namespace, ReadStatus, SessionHint, WriteStatus

_NAMESPACE: Final = Namespace("tiers")
_OWNER: Final = 1
#: Every block has this size in the store, which does not look at bytes.
_SIZE: Final = 4096
_BLOCK_BYTES: Final = 64 << 20
_BLOCK_TOKENS: Final = 512
_WRITES_AT_ONCE: Final = 2
#: Blocks that a reader asks for at a time.
_READ_AHEAD: Final = 16
#: A writer that finds no memory for so long gives up.
_WRITE_S: Final = 2.5
#: A request waits for a block that is being promoted, or for any change.
Step = Generator[bytes | None, None, None]
SHARES: Final = (0.1, 0.25, 0.5, 1.0)


class Mode(NamedTuple):
    """One way to choose what is written to the disk."""

    name: str
    write_back: bool
    only_read: bool = False


MODES: Final = (
    Mode("write_through", False),
    Mode("write_back", True),
    Mode("write_back of what was read", True, only_read=True),
)


@dataclass(slots=True)
class Result:
    """What came of one play."""

    asked: int = 0
    hits: int = 0
    memory_hits: int = 0
    half_asked: int = 0
    half_hits: int = 0
    written: int = 0
    to_disk: int = 0
    refused: int = 0
    read_waits: list[float] = field(default_factory=list)
    write_waits: list[float] = field(default_factory=list)


class Play:
    """One server of `memory` and `disk` blocks, and one workload; a disk moves one block in
    `transfer_s` seconds."""

    def __init__(self, mode: Mode, memory: int, disk: int, transfer_s: float) -> None:
        self.result = Result()
        self.now = 0.0
        self._mode = mode
        self._blocks = (memory, disk)
        self._transfer_s = transfer_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._free_at = 0.0  # when the disk has done what it was given
        self._writes = 0
        self._life = 0
        self._waiting: deque[Step] = deque()  # for space, in order
        self._promoting: dict[bytes, list[Step]] = {}  # and who waits for it
        self._was_read: set[bytes] = set()
        self._busy: dict[int, deque[Request]] = {}  # sessions that wait, and their next requests
        self._window = (0.0, 0.0)
        self._hints = False
        self.stack = self._new_stack()

    def _new_stack(self) -> TieredStore:
        memory, *disks = (blocks * _SIZE for blocks in self._blocks if blocks)
        front = FrontStore(memory, alignment=_SIZE)
        stores = [front, *(FileStore(size, alignment=_SIZE) for size in disks)]
        stack = TieredStore(stores, write_back=self._mode.write_back)
        if self._mode.only_read:
            policy = stack.front.extents.policy
            is_over = policy.is_over

            def is_refused(entry: Entry) -> bool:
                return is_over(entry) or entry.digest not in self._was_read

            vars(policy)["is_over"] = is_refused
        return stack

    def run(self, requests: Sequence[Request], hints: bool, kill_at: float | None) -> Result:
        """Play all of it; with `kill_at` the server is killed at that time."""
        self._window = _window(requests)
        self._hints = hints
        for request in requests:
            self._at(request.time_s, lambda r=request: self._begin(r, hints))  # type: ignore[misc]
        if kill_at is not None:
            self._at(kill_at, self._kill)
        while self._events:
            self.now, _, act = heappop(self._events)
            act()
            self._pump()
        return self.result

    def _at(self, time: float, act: Callable[[], None]) -> None:
        self._number += 1
        heappush(self._events, (time, self._number, act))

    # --- the disk ------------------------------------------------------------------------------

    def _pump(self) -> None:
        """What `TierMover` does: give the disk its next writes."""
        stack = self.stack
        while self._writes < _WRITES_AT_ONCE and stack.backing_tier:
            copies = stack.transfers.next_writebacks(1, 1, self.now)
            self._writes += len(copies)
            self.result.to_disk += len(copies)
            for copy in copies:
                self._move(copy)
            if not copies:
                break
        stack.change_log.take()
        stack.erasures.take()

    def _move(self, copy: TierTransfer) -> None:
        self._free_at = max(self._free_at, self.now) + self._transfer_s
        life = self._life

        def done() -> None:
            if life == self._life:
                self._writes -= copy.target != 0
                self.stack.transfers.done(copy, good=True, now=self.now)
                for play in self._promoting.pop(copy.entry.digest, ()):
                    self._go_on(play)
                if copy.target or not self._promoting:
                    waiting, self._waiting = self._waiting, deque()
                    for play in waiting:
                        self._go_on(play)

        self._at(self._free_at, done)

    def _kill(self) -> None:
        records = (
            [
                Record(
                    _NAMESPACE, 0, e.digest, e.parent, e.offset, e.size, e.checksum, e.generation
                )
                for e in self.stack.backing.index.inventory()
            ]
            if self.stack.backing_tier
            else []
        )
        self._life += 1
        self._writes = 0
        self._waiting.clear()
        self._promoting.clear()
        late = [request for waiting in self._busy.values() for request in waiting]
        self._busy.clear()
        for request in late:
            self._at(self.now, lambda r=request: self._begin(r, self._hints))  # type: ignore[misc]
        self.stack = self._new_stack()
        for _ in self.stack.restore(records, self.now):
            pass

    # --- requests --------------------------------------------------------------------------------

    def _begin(self, request: Request, hints: bool) -> None:
        """A session asks again when it has its last answer."""
        if hints and request.session in self._busy:
            self._busy[request.session].append(request)
        else:
            self._busy[request.session] = deque()
            self._go_on(self._play(request, hints))

    def _go_on(self, play: Step) -> None:
        waits_for = next(play, self)
        if isinstance(waits_for, bytes):
            self._promoting[waits_for].append(play)
        elif waits_for is None:
            self._waiting.append(play)

    def _play(self, request: Request, hints: bool) -> Step:
        chain = [digest_of(id) for id in request.chain]
        arrived = self.now
        held, from_memory = yield from self._read(chain)
        result = self.result
        result.asked += len(chain)
        result.hits += held
        result.memory_hits += from_memory
        if self._window[0] <= arrived < self._window[1]:
            result.half_asked += len(chain)
            result.half_hits += held
        if from_memory < held:
            result.read_waits.append(self.now - arrived)
        begun = self.now
        hint = SessionHint(str(request.session)) if hints else None
        yield from self._write(100 + request.session, chain, held, hint)
        if held < len(chain):
            result.write_waits.append(self.now - begun)
        if hint is not None and request.resumes_s is None:
            self.stack.hint(hint.session, None, self.now)
        later = self._busy.pop(request.session, None)
        if later:
            following = later.popleft()
            self._busy[request.session] = later
            self._go_on(self._play(following, hints))

    def _read(self, chain: list[bytes]) -> Generator[bytes | None, None, tuple[int, int]]:
        """Read the prefix that is here: how many blocks, and how many of them from memory."""
        stack = self.stack
        length = next(
            (n for n, digest in enumerate(chain) if stack.peek(_NAMESPACE, 0, digest) is None),
            len(chain),
        )
        here = promoted = 0
        slow: set[bytes] = set()
        while here < length:
            ahead = chain[here : min(here + _READ_AHEAD, length)]
            pins = stack.pin(_OWNER, _NAMESPACE, 0, ahead, self.now, [_SIZE] * len(ahead))
            for pin in pins:
                if pin.status is ReadStatus.HIT:
                    stack.front.unpin(_OWNER, pin.id)
            got = next((n for n, p in enumerate(pins) if p.status is not ReadStatus.HIT), len(pins))
            self._was_read.update(ahead[:got])
            promoted += sum(digest in slow for digest in ahead[:got])
            here += got
            if got == len(pins):
                continue
            if pins[got].status is not ReadStatus.NOT_YET:
                break  # it was evicted meanwhile
            later = chain[here : min(here + _READ_AHEAD, length)]
            slow.update(d for d in later if stack.front.index.peek(_NAMESPACE, 0, d) is None)
            others = [digest for digest in later if digest not in self._promoting]
            for copy in stack.transfers.start_promotions(
                _NAMESPACE, 0, others, len(others) * _SIZE, self.now
            ):
                self._promoting[copy.entry.digest] = []
                self._move(copy)
            self._pump()
            yield later[0] if later[0] in self._promoting else None
        return here, here - promoted

    def _write(self, owner: int, chain: list[bytes], held: int, hint: SessionHint | None) -> Step:
        stack = self.stack
        give_up = self.now + _WRITE_S
        todo = chain[held : self._blocks[0] // 2 + held]
        self.result.written += len(todo)
        first = held
        while todo:
            parents = [chain[first - 1] if first else ROOT, *todo[:-1]]
            request = ReserveRequest(_NAMESPACE, 0, todo, parents, [_SIZE] * len(todo), hint)
            answers = stack.reserve(owner, request, self.now)
            done = 0
            for answer in answers:
                if answer.status is WriteStatus.RESERVED:
                    stack.seal(owner, answer.id, 0, self.now)
                elif answer.status is not WriteStatus.ALREADY_STORED:
                    break
                done += 1
            todo, first = todo[done:], first + done
            if todo:
                if self.now >= give_up:
                    self.result.refused += len(todo)
                    return
                self._pump()
                yield None


def _spread(requests: Sequence[Request]) -> list[Request]:
    """A trace gives all requests of some seconds the same time: spread them until the next ones."""
    groups = [list(group) for _, group in groupby(requests, key=lambda request: request.time_s)]
    spread: list[Request] = []
    for group, following in zip(groups, [*groups[1:], groups[-1]], strict=True):
        gap_s = (following[0].time_s - group[0].time_s) / len(group)
        spread += [one._replace(time_s=one.time_s + n * gap_s) for n, one in enumerate(group)]
    return spread


def _window(requests: Sequence[Request]) -> tuple[float, float]:
    """The tenth after half time, in seconds."""
    return requests[len(requests) // 2].time_s, requests[len(requests) * 6 // 10].time_s


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def _row(
    mode: Mode, requests: Sequence[Request], hints: bool, memory: int, disk: int, transfer_s: float
) -> list[str]:
    one = Play(mode, memory, disk, transfer_s).run(requests, hints, None)
    killed = Play(mode, memory, disk, transfer_s).run(requests, hints, _window(requests)[0])
    return [
        f"{one.hits / max(1, one.asked):.1%}",
        f"{one.memory_hits / max(1, one.asked):.1%}",
        f"{one.half_hits / max(1, one.half_asked):.1%}",
        f"{killed.half_hits / max(1, killed.half_asked):.1%}",
        f"{one.to_disk / max(1, one.written):.1%}",
        f"{quantile(one.read_waits, 0.5) * 1e3:.0f}, {quantile(one.read_waits, 0.99) * 1e3:.0f}",
        f"{quantile(one.write_waits, 0.99) * 1e3:.0f}, {max(one.write_waits, default=0) * 1e3:.0f}",
        f"{one.refused}",
    ]


def main() -> None:
    """Play one workload in every mode with every size of memory, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--format", default=traces.AUTO, help=f"of the trace: {traces.NAMES}")
    parser.add_argument("--sessions", type=int, default=100, help="of the codex workload")
    parser.add_argument("--working-set", type=int, help="blocks")
    parser.add_argument("--disk", type=float, default=4.0, help="of the working set")
    parser.add_argument("--disk-rate", type=float, default=10e9, help="bytes a second")
    parser.add_argument("--memory", type=float, nargs="*", default=list(SHARES))
    parser.add_argument("--limit", type=int)
    wanted = parser.parse_args()
    block_bytes = _BLOCK_BYTES
    if wanted.trace is not None:
        trace = traces.load(wanted.trace, wanted.format)
        name, requests = trace.name, trace.requests
        block_bytes = block_bytes * trace.block // _BLOCK_TOKENS
        working_set = wanted.working_set or 50_000
    else:
        name, requests = "codex", workloads.codex(wanted.sessions, 24, block=2048)
        working_set = wanted.working_set or 625
        block_bytes *= 4
    requests = _spread(requests[: wanted.limit])
    hints = wanted.trace is None
    transfer_s = block_bytes / wanted.disk_rate
    disk = int(wanted.disk * working_set)
    console = Console(width=140)
    table = Table(title=f"{name}, {working_set:,} blocks are the working set, {disk:,} on disk")
    columns = ("memory", "mode", "hits", "memory", "half time", "after kill", "written")
    for column in (*columns, "read p50, p99", "write p99, max", "refused"):
        table.add_column(column)
    for share in wanted.memory:
        memory = int(share * working_set)
        for mode in MODES:
            row = _row(mode, requests, hints, memory, disk, transfer_s)
            table.add_row(f"{share:g}", mode.name, *row)
            console.print(share, mode.name, *row)
    ample = Play(MODES[0], disk, 0, transfer_s).run(requests, hints, None)
    table.add_row(f"{wanted.disk:g}", "no disk", f"{ample.hits / max(1, ample.asked):.1%}")
    console.print(table)


if __name__ == "__main__":
    main()
