"""Spans of OpenTelemetry's own SDK: what they say, what they do not, and none where nobody asks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

import kvpool
from kvpool import dev, tracing
from kvpool.cli.settings import load
from kvpool.client.opening import _pool_class
from kvpool.client.pool import Pool

pytest.importorskip("opentelemetry.sdk", reason="pip install 'kvpool[otel]'")
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

NAMESPACE = kvpool.Namespace("model=traced")
CHAIN = [bytes([n]) * 16 for n in range(4)]


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """A process has one provider, for ever."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
async def pool(
    pool_dev: dev.Dev, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pool]:
    monkeypatch.setenv("KVPOOL_OTEL", "1")
    async with await kvpool.connect(pool_dev.address) as opened:
        exporter.clear()
        yield opened


def attributes(span: ReadableSpan) -> dict[str, object]:
    return {name.removeprefix("kvpool."): value for name, value in (span.attributes or {}).items()}


async def test_matches_reads_and_writes_are_spans_with_counts_and_reasons(
    pool: Pool, exporter: InMemorySpanExporter
) -> None:
    missing = bytes([9]) * 16
    with trace.get_tracer("program").start_as_current_span("answer") as answer:
        await pool.write(NAMESPACE, CHAIN, [bytes(64)] * 4, session="private")
        found = await pool.match(NAMESPACE, [*CHAIN, missing], session="private")
        await pool.read(NAMESPACE, CHAIN, [bytearray(64) for _ in CHAIN], match=found)
        await pool.read(NAMESPACE, [missing], [bytearray(64)])
    write, match, read, miss, _ = spans = exporter.get_finished_spans()
    assert [one.name for one in spans[:4]] == [
        "kvpool.write",
        "kvpool.match",
        "kvpool.read",
        "kvpool.read",
    ]
    of_pool = {"namespace": "model=traced"}
    part = {**of_pool, "part": 0}
    assert attributes(write) == {**part, "blocks": 4, "copies": 1, "results.stored": 4}
    ended = {"blocks": 5, "found": 4, "stopped": "never_written"}
    assert attributes(match) == {**of_pool, **ended}
    assert attributes(read) == {**part, "blocks": 4, "bytes": 256, "results.hit": 4}
    assert attributes(miss) == {**part, "blocks": 1, "bytes": 0, "results.never_written": 1}
    for span in spans[:4]:
        assert span.parent is not None
        assert span.parent.span_id == answer.get_span_context().span_id, "in the caller's trace"
        assert span.status.status_code is StatusCode.UNSET, "a miss is no error"
        assert "private" not in json.dumps(attributes(span))


async def test_a_wrong_argument_is_an_error_of_the_span(
    pool: Pool, exporter: InMemorySpanExporter
) -> None:
    with pytest.raises(kvpool.BadKey):
        await pool.match(NAMESPACE, [])
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert [event.name for event in span.events] == ["exception"]


async def test_a_pool_without_masters_is_a_miss_with_its_reason(
    pool: Pool, pool_dev: dev.Dev, exporter: InMemorySpanExporter
) -> None:
    await pool_dev.master.close()
    await pool.match(NAMESPACE, CHAIN, timeout=0.5)
    (span,) = exporter.get_finished_spans()
    assert attributes(span)["stopped"] == "no_master"


@pytest.mark.parametrize("value", ["", "0", "no", "False"])
def test_nothing_is_traced_unless_it_is_asked_for(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVPOOL_OTEL", raising=False)
    assert _pool_class() is Pool
    monkeypatch.setenv("KVPOOL_OTEL", value)
    assert _pool_class() is Pool
    assert tracing.tracer() is None


def test_the_switch_is_no_setting_of_the_configuration() -> None:
    assert load(None, {"KVPOOL_OTEL": "1"}) == load(None, {})
