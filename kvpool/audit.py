"""Who removed blocks, and who asked for what is not theirs: one log line, with a count.

One line a minute for each caller and kind of request, as for handshakes that fail: a tenant that
asks a thousand times a second must not fill the disk of an operator (design: tenants). Nothing is
left out of the counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvpool import logs
from kvpool.shares import Shares

log = logs.get("kvpool.audit")

#: One line in this time for each caller and kind of request.
LOG_EVERY_S: Final = 60.0
#: Callers and kinds that are remembered, of each tenant its share; its others share one line.
CALLERS_MAX: Final = 1024


@dataclass(slots=True)
class _Line:
    """What one caller has done, as far as no line has reported it."""

    fields: dict[str, Any]
    report_at: float
    count: int = 0
    blocks: int = 0


class AuditLog:
    """The audit of one process. `now` is loop time; call `flush` now and then."""

    def __init__(self) -> None:
        #: By event, tenant, address and request; of a tenant that has its share the last two are
        #: empty: so nobody hides what others do, or what he does himself, in a flood.
        self._lines: dict[tuple[str, ...], _Line] = {}
        self._callers = Shares(CALLERS_MAX)

    def __len__(self) -> int:
        return len(self._lines)

    def refused(
        self, now: float, *, tenant: str, client: str, address: str, request: str, why: str
    ) -> None:
        """A request was refused because it is about what is not the caller's."""
        self._add("a tenant was refused", now, tenant, client, address, request, why=why)

    def removed(
        self, now: float, *, tenant: str, client: str, address: str, blocks: int, request: str
    ) -> None:
        """Blocks were removed by a caller; `tenant` is empty for operators."""
        self._add("blocks were removed", now, tenant, client, address, request, blocks=blocks)

    def flush(self, now: float) -> None:
        """Write the lines that are due, and forget callers that have done nothing since."""
        for key, line in list(self._lines.items()):
            if now >= line.report_at:
                if line.count:
                    self._write(key[0], line, now)
                else:
                    del self._lines[key]
                    if key[3]:
                        self._callers.give_back(key[1])

    def _add(
        self,
        event: str,
        now: float,
        tenant: str,
        client: str,
        address: str,
        request: str,
        *,
        blocks: int = 0,
        why: str = "",
    ) -> None:
        # Without the name of the client: it chooses that itself, as often as it likes.
        key = (event, tenant, address, request)
        fields: dict[str, Any] = {
            "tenant": tenant or "-",
            "client": client,
            "address": address,
            "request": request,
        }
        if key not in self._lines and not self._callers.take(tenant):
            key = (event, tenant, "", "")
            fields |= {"client": "", "address": "", "request": "others"}
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(fields, now)
        line.fields = {**fields, "why": why} if why else fields
        line.count += 1
        line.blocks += blocks
        if now >= line.report_at:
            self._write(event, line, now)

    def _write(self, event: str, line: _Line, now: float) -> None:
        fields = {**line.fields, "count": line.count}
        if "why" in line.fields:
            log.warning(event, **fields)
        else:
            log.info(event, **fields, blocks=line.blocks)
        line.count = line.blocks = 0
        line.report_at = now + LOG_EVERY_S
