"""What the scheduler half tells the pool without waiting for an answer.

Called by the engine's thread, sent in the pool's (`pool_thread.py`). One that is lost costs hits,
never correctness: it is logged, and not sent again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvpool import KvpoolError, Namespace, Pool, admin
from kvpool_connector.plan.request_lookups import PrefetchRequest
from kvpool_connector.records.values import RequestHints
from kvpool_connector.scheduler.sharing_watch import others_of_this_model
from kvpool_engines.pool_thread import PoolThread

#: Servers keep a waiting prompt's blocks for 120 s after its arrival, which is repeated in time.
_ARRIVE_EVERY_S: Final = 60.0


@dataclass
class PoolMessages:
    """Of one engine: hints about sessions, prefetches, and prompts that still wait."""

    _thread: PoolThread
    _counters: MutableMapping[str, float]
    _log_line: Callable[[str], None]
    _log_warning: Callable[[str], None]
    #: Requests of sessions that have no blocks yet: when to repeat that they wait, in order.
    _arrivals: dict[str, tuple[float, str]] = field(default_factory=dict)

    def request_waits(self, request_id: str, session: str, now: float) -> None:
        """Its lookup has told the pool that this session's prompt waits: that is to be repeated."""
        self._arrivals[request_id] = (now + _ARRIVE_EVERY_S, session)

    def request_begins(self, request_id: str) -> None:
        """It has blocks, or has ended."""
        self._arrivals.pop(request_id, None)

    def repeat_arrivals(self, now: float) -> None:
        """Prompts that wait for long: servers would take them for lost. (design: session-hints)"""
        while self._arrivals:
            request_id, (due, session) = next(iter(self._arrivals.items()))
            if now < due:
                return
            del self._arrivals[request_id]
            self.request_waits(request_id, session, now)
            self._counters["arrivals_repeated"] += 1
            self._repeat_arrival(session)

    def _repeat_arrival(self, session: str) -> None:
        self._tell("an arrival was not repeated", lambda pool: pool.session(session).arrived())

    def prefetch(self, namespace: Namespace, request: PrefetchRequest) -> None:
        """A prompt that waits is going to load these. (design: promotion)"""
        self._tell(
            "a prefetch was not sent",
            lambda pool: pool.prefetch(namespace, request.digests(), match=request.match),
        )

    def request_ended(self, hints: RequestHints) -> None:
        """With it its conversation may have ended, or go on in a known time."""
        lost, name, resume_in_s = "a session hint was not sent", hints.session, hints.resume_in_s
        if name and hints.ends:
            self._tell(lost, lambda pool: pool.session(name).end())
        elif name and resume_in_s is not None:
            self._tell(lost, lambda pool: pool.session(name).hint(resume_in=resume_in_s))

    def compare_names(self, own: Sequence[Namespace]) -> None:
        """Warn of engines of this model that share nothing with this one."""

        async def compare(pool: Pool) -> None:
            if others := others_of_this_model(own, await admin(pool).namespaces()):
                self._log_warning(
                    "other engines of this model share nothing with this one: "
                    f"{'; '.join(others)}; kvpool doctor --engine URL for both says why"
                )

        self._tell("other engines' names were not compared", compare)

    def _tell(self, lost: str, tell: Callable[[Pool], Awaitable[object]]) -> None:
        """`lost`: what to log with the error."""

        async def send() -> None:
            pool = self._thread.pool
            try:
                if pool is not None:
                    await tell(pool)
            except KvpoolError as error:
                self._log_line(f"{lost}: {error}")

        self._thread.start(send)
