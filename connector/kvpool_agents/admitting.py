"""`vllm serve --middleware kvpool_agents.admitting.AdmittingMiddleware`: that of `sessions`, and
prompts of sessions wait in front of this engine until the pool has room for them.

Each engine counts its own sessions, and serves as large a part of them as fits. A prompt whose wait
is over passes: an engine has no other one to send it to. A fault in here lets the prompt pass.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from kvpool import KvpoolError, admin
from kvpool_agents.admission_gate import AdmissionGate, LineFull, Ticket
from kvpool_agents.client_requests import Spoken
from kvpool_agents.sessions import App, Middleware, Scope
from kvpool_engines.pool_thread import PoolThread

_ROOM_S: Final = 2.0


class AdmittingMiddleware(Middleware):
    """One tenant's: names of sessions are all that it tells clients apart by."""

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self._gate: AdmissionGate | None = None
        self._thread: PoolThread | None = None

    async def admit(self, scope: Scope, spoken: Spoken) -> Ticket | None:
        """Wait until this prompt may run."""
        if not spoken.session:
            return None
        if self._gate is None:
            self._gate = AdmissionGate(self._ask)
            self._thread = self.hints(scope).thread
        try:
            ticket = await self._gate.enter("", spoken.parent or spoken.session)
        except (TimeoutError, LineFull):
            self.count("wait_over")
            return None
        if ticket.waited_s >= 0.1:
            self.count("waited")
        return ticket

    def close(self) -> None:
        """Nobody is let in any more."""
        if self._gate is not None:
            self._gate.close()
        super().close()

    def _ask(self) -> None:
        gate, thread = self._gate, self._thread
        if gate is None or thread is None:
            return
        loop = asyncio.get_running_loop()

        async def ask() -> None:
            """In the pool's thread."""
            with contextlib.suppress(KvpoolError, RuntimeError):  # the loop was closed meanwhile
                if thread.pool is not None:
                    room = await admin(thread.pool).room(timeout=_ROOM_S)
                    loop.call_soon_threadsafe(gate.measured, room.share)

        thread.start(ask)
