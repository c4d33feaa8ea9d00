"""Which blocks of the pool the engine has announced to routers, and how: pure.

A save that has ended does not say where the pool put the blocks, and a block may leave the pool at
any time. So nothing is announced before a master has said where it is, and masters are asked about
what is announced in turns.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, deque
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import msgspec

from kvpool.kv_events import (
    EventForm,
    EventHash,
    KVEvent,
    Residency,
    StoredEvent,
    announced,
    joined,
    removals,
    residency,
)
from kvpool.types import Presence

#: Blocks that are announced at a time; beyond it the oldest is taken back.
PUBLISHED_MAX: Final = 32_768
#: New blocks that wait for an answer about them; beyond it the oldest is never announced.
_NEW_MAX: Final = 8_192
#: Blocks of one question.
QUESTION_BLOCKS_MAX: Final = 1_024
#: A block of which masters know nothing yet is asked about again after this time, so often.
_AGAIN_S: Final = 0.5
_ATTEMPTS_MAX: Final = 3
#: Announced blocks are asked about again at this interval, `QUESTION_BLOCKS_MAX` of them at a time.
_CHECK_EVERY_S: Final = 1.0
#: An answer that has not come by then never comes.
_ANSWER_S: Final = 5.0

#: Number of the KV cache group, and the key in the pool.
BlockName: TypeAlias = tuple[int, bytes]
_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(StoredEvent).decode


class Question(NamedTuple):
    """Where are these blocks of one group? `serial` belongs into the answer."""

    serial: int
    group: int
    digests: tuple[bytes, ...]


@dataclass(slots=True)
class _New:
    """An announcement of one block that waits for a place."""

    event: bytes
    due_at: float
    attempts: int = 0


class _Published(NamedTuple):
    """An announcement as it was made, encoded: a list of tokens takes five times as much memory."""

    event: bytes
    where: Residency


class PublishedBlocks:
    """A block, named by its group and key, is in one of these states:

    | state     | routers   | next state                                                      |
    |-----------|-----------|-----------------------------------------------------------------|
    | absent    | know none | new, with `add`                                                 |
    | new       | know none | published, when an answer says where it is; absent, when three  |
    |           |           | answers do not                                                  |
    | published | know it   | published, elsewhere, or absent, when an answer says so; absent |
    |           |           | when too many are announced                                     |

    A published block is asked about in turns, the one that was asked about first comes first.

    `counters` counts blocks: `announced_blocks`, `unannounced_blocks`.
    """

    def __init__(self, form: EventForm, counters: MutableMapping[str, float]) -> None:
        self._form = form
        self._counters = counters
        self._new: OrderedDict[BlockName, _New] = OrderedDict()
        self._published: OrderedDict[BlockName, _Published] = OrderedDict()
        self._unasked: set[BlockName] = set()  # of the new ones
        self._check_at = 0.0
        self._asked: dict[int, tuple[Question, float]] = {}
        self._serial = 0
        self._events: deque[KVEvent] = deque()

    def __len__(self) -> int:
        return len(self._published)

    @property
    def waiting(self) -> bool:
        """Whether something is to be sent or asked now, or an answer is awaited.

        Blocks that are asked about again later are no reason for an idle engine to step.
        """
        return bool(self._events or self._asked or self._unasked)

    def add(self, group: int, digest: bytes, event: StoredEvent, now: float) -> None:
        """The pool has acknowledged this block; `event` is of it alone, and does not say where."""
        name = (group, digest)
        if name not in self._published and announced(self._form, event):
            self._new[name] = _New(_ENCODE(event), now)
            self._unasked.add(name)
            while len(self._new) > _NEW_MAX:
                self._unasked.discard(self._new.popitem(last=False)[0])

    def questions(self, now: float) -> list[Question]:
        """What to ask masters now: one question at a time."""
        for serial in [one for one, (_, until) in self._asked.items() if until <= now]:
            self._give_up(serial, now)
        if self._asked:
            return []
        names = [name for name, new in self._new.items() if new.due_at <= now]
        names = names[:QUESTION_BLOCKS_MAX]
        for name in names:
            self._new[name].due_at = math.inf  # until the answer
            self._unasked.discard(name)
        if now >= self._check_at:
            self._check_at = now + _CHECK_EVERY_S
            names += itertools.islice(self._published, QUESTION_BLOCKS_MAX - len(names))
        groups: dict[int, list[bytes]] = {}
        for group, digest in names:
            groups.setdefault(group, []).append(digest)
        questions = []
        for group, digests in groups.items():
            self._serial += 1
            question = Question(self._serial, group, tuple(digests))
            self._asked[self._serial] = question, now + _ANSWER_S
            questions.append(question)
        return questions

    def answer(self, serial: int, found: Sequence[Presence | None] | None, now: float) -> None:
        """Where the blocks of a question are; None: no master has answered."""
        if found is None:
            self._give_up(serial, now)
            return
        question, _ = self._asked.pop(serial, (None, 0.0))
        if question is None:  # reset meanwhile, or given up
            return
        removed: list[tuple[EventHash, int | None, Residency]] = []
        stored: list[StoredEvent] = []
        for digest, one in zip(question.digests, found, strict=True):
            name = (question.group, digest)
            where = residency(self._form, near=one.near, tier=one.tier) if one else None
            known = self._published.get(name)
            if known is not None and known.where == where:
                self._published.move_to_end(name)  # it was asked about last
                continue
            if known is not None:
                removed.append(self._take_back(name, known))
            event = known.event if known is not None else self._of_new(name, where, now)
            if event is not None and where is not None:
                self._published[name] = _Published(event, where)
                stored.append(msgspec.structs.replace(_DECODE(event), **where._asdict()))
        while len(self._published) > PUBLISHED_MAX:
            name = next(iter(self._published))
            removed.append(self._take_back(name, self._published[name]))
        self._counters["announced_blocks"] += len(stored)
        # In this order: a block that has moved is here again at the end.
        self._events.extend(removals(removed))
        self._events.extend(joined(stored))

    def take(self, count: int) -> list[KVEvent]:
        """At most so many of the events that have come up, in order."""
        return [self._events.popleft() for _ in range(min(count, len(self._events)))]

    def reset(self) -> None:
        """The engine shares under another name from now on: it can use none of these blocks."""
        self._new.clear()
        self._unasked.clear()
        self._asked.clear()
        known = list(self._published.items())
        self._events.extend(removals([self._take_back(name, one) for name, one in known]))

    # --- inside -----------------------------------------------------------------------------

    def _of_new(self, name: BlockName, where: Residency | None, now: float) -> bytes | None:
        """The announcement of a block that is there; else it is asked about again, or dropped."""
        new = self._new.get(name)
        if new is None:
            return None
        new.attempts += 1
        if where is not None or new.attempts >= _ATTEMPTS_MAX:
            del self._new[name]
        else:
            new.due_at = now + _AGAIN_S
        return new.event if where is not None else None

    def _take_back(
        self, name: BlockName, known: _Published
    ) -> tuple[EventHash, int | None, Residency]:
        del self._published[name]
        self._counters["unannounced_blocks"] += 1
        event = _DECODE(known.event)
        return event.block_hashes[0], event.group_idx, known.where

    def _give_up(self, serial: int, now: float) -> None:
        """No answer: ask again later. The turn of those that are announced comes anyhow."""
        question, _ = self._asked.pop(serial, (None, 0.0))
        if question is None:
            return
        for digest in question.digests:
            name = (question.group, digest)
            if new := self._new.get(name):
                new.due_at = now + _AGAIN_S
