"""KV events about the pool's blocks: asks masters where they are, beside the engine's steps.

The state is `published_blocks.py`; this shell runs its questions in the pool's thread, and follows
what masters report of blocks that come and go.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, MutableMapping, Sequence
from functools import partial
from typing import Final

from kvpool import KvpoolError, Namespace
from kvpool.kv_events import EventForm, KVEvent, StoredEvent
from kvpool.types import Presence
from kvpool_engines.pool_thread import PoolThread
from kvpool_events.published_blocks import PublishedBlocks, Question

_TIMEOUT_S: Final = 2.0
#: Events that one step sends beside the engine's own: together they must stay below the 4,096 that
#: routers take.
_EVENTS_PER_STEP: Final = 1024


class EventFeed:
    """One engine's announcements of pool blocks. Called by the engine's thread only."""

    def __init__(
        self, form: EventForm, thread: PoolThread, counters: MutableMapping[str, float]
    ) -> None:
        self._thread = thread
        self._published = PublishedBlocks(form, counters)
        self._namespaces: Sequence[Namespace] = ()
        #: Filled by the pool's thread.
        self._answers: deque[tuple[int, list[Presence | None] | None]] = deque()
        self._answered = threading.Event()

    @property
    def waiting(self) -> bool:
        """Whether the engine should step once more, so that news go out."""
        return self._published.waiting or bool(self._answers)

    def add(self, stored: Iterable[tuple[int, bytes, StoredEvent]], now: float) -> None:
        """The pool has acknowledged these blocks: group, key, and the event without a place."""
        for group, digest, event in stored:
            self._published.add(group, digest, event, now)

    def wait(self, wait_s: float) -> None:
        """Wait for an answer, if the engine steps for nothing else."""
        if not self._answers:
            self._answered.wait(wait_s)

    def step(self, namespaces: Sequence[Namespace], now: float) -> None:
        """Take answers, and ask what is to be asked; returns at once.

        An engine that has no names now, or others, can use nothing of what it has announced.
        """
        self._answered.clear()
        if namespaces != self._namespaces:
            self._published.reset()
            self._namespaces = namespaces
        while self._answers:
            self._published.answer(*self._answers.popleft(), now)
        if not namespaces:
            return
        for question in self._published.questions(now):
            ask = partial(self._ask, question, namespaces[question.group])
            if not self._thread.start(ask):
                self._published.answer(question.serial, None, now)

    def take(self) -> list[KVEvent]:
        """Events for the engine's stream, in order; what is too much for one step comes later."""
        return self._published.take(_EVENTS_PER_STEP)

    async def _ask(self, question: Question, namespace: Namespace) -> None:
        """In the pool's thread."""
        pool = self._thread.pool
        found: list[Presence | None] | None = None
        try:
            if pool is not None:
                found = await pool.where(namespace, question.digests, timeout=_TIMEOUT_S)
        except KvpoolError:  # asked again
            pass
        finally:
            self._answers.append((question.serial, found))
            self._answered.set()
