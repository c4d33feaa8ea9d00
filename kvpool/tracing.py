"""OpenTelemetry spans, where KVPOOL_OTEL=1 asks for them (`pip install 'kvpool[otel]'`).

A client asks once, when it is opened, and the connector once, when it starts. Where the answer is
no, nothing else of this module runs. Spans go to the program's own tracer provider: exporters,
sampling and names of services are set there, for example with `opentelemetry-instrument` and the
variables OTEL_*.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Final

from kvpool import logs

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

log = logs.get("kvpool.tracing")

#: The variable of the environment that switches spans on.
VARIABLE: Final = "KVPOOL_OTEL"
_NO: Final = frozenset({"", "0", "no", "false"})


def tracer() -> Tracer | None:
    """Where spans are begun; None if there shall be none, or OpenTelemetry is not installed."""
    if os.environ.get(VARIABLE, "").lower() in _NO:
        return None
    try:
        from opentelemetry import trace
    except ImportError:
        log.warning("no spans: OpenTelemetry is missing", install="pip install 'kvpool[otel]'")
        return None
    return trace.get_tracer("kvpool")


def count_results(span: Span, results: Iterable[str]) -> None:
    """How often each result occurs, as attributes `kvpool.results.NAME` of the span."""
    for name, count in Counter(results).items():
        span.set_attribute(f"kvpool.results.{name}", count)


async def run(tracer: Tracer, name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run `work` in a span of its own, which `describe` can add to until it ends."""
    with tracer.start_as_current_span(name):
        await work()


def describe(**attributes: str | float) -> None:
    """Set attributes `kvpool.NAME` of the span that runs here."""
    from opentelemetry import trace

    span = trace.get_current_span()
    for name, value in attributes.items():
        span.set_attribute(f"kvpool.{name}", value)
