"""A client whose matches, reads and writes are spans: what `connect` makes with KVPOOL_OTEL=1."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvpool import tracing
from kvpool.client.buffers import BufferLike
from kvpool.client.pool import Pool
from kvpool.tracing import count_results
from kvpool.types import Match, Namespace, ReadResult, WriteStatus

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


def pool_class() -> Callable[..., Pool]:
    """`TracedPool`; `Pool` where the environment says no, or OpenTelemetry is not installed."""
    tracer = tracing.tracer()
    return Pool if tracer is None else functools.partial(TracedPool, tracer=tracer)


class TracedPool(Pool):
    """A `Pool` that begins a span for each match, read and write, in the caller's context.

    A miss is no error of a span: it is counted in its attributes, by reason. An exception is one.
    Attributes hold no keys and no names of sessions.
    """

    def __init__(self, *arguments: Any, tracer: Tracer, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._tracer = tracer

    async def match(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        *,
        session: str = "",
        timeout: float | None = None,
    ) -> Match:
        with self._tracer.start_as_current_span("kvpool.match") as span:
            match = await super().match(namespace, chain, session=session, timeout=timeout)
            if span.is_recording():
                span.set_attribute("kvpool.namespace", namespace.name)
                span.set_attribute("kvpool.blocks", len(chain))
                span.set_attribute("kvpool.found", match.length)
                span.set_attribute("kvpool.stopped", match.stopped.name.lower())
            return match

    async def read(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        buffers: Sequence[BufferLike],
        *,
        part: int = 0,
        match: Match | None = None,
        timeout: float | None = None,
    ) -> list[ReadResult]:
        with self._tracer.start_as_current_span("kvpool.read") as span:
            results = await super().read(
                namespace, digests, buffers, part=part, match=match, timeout=timeout
            )
            if span.is_recording():
                span.set_attribute("kvpool.namespace", namespace.name)
                span.set_attribute("kvpool.part", part)
                span.set_attribute("kvpool.blocks", len(digests))
                span.set_attribute(
                    "kvpool.bytes", sum([one.size for one in results if one.status.hit])
                )
                count_results(span, (one.status.name.lower() for one in results))
            return results

    async def write(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        buffers: Sequence[BufferLike],
        **options: Any,
    ) -> list[WriteStatus]:
        with self._tracer.start_as_current_span("kvpool.write") as span:
            statuses = await super().write(namespace, digests, buffers, **options)
            if span.is_recording():
                span.set_attribute("kvpool.namespace", namespace.name)
                span.set_attribute("kvpool.part", options.get("part", 0))
                span.set_attribute("kvpool.copies", options.get("copies", 1))
                span.set_attribute("kvpool.blocks", len(digests))
                count_results(span, (one.name.lower() for one in statuses))
            return statuses
