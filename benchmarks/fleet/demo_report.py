"""The check on the model as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks.fleet.demo import FIRST_WITHIN, HITS_WITHIN, Prediction
from benchmarks.fleet.demo_results import Rates


def table(predictions: Sequence[Prediction]) -> Table:
    """Each row as it was measured, and as the model says."""
    shown = Table(title="make demo-fleet, measured and predicted", title_justify="left")
    for name in ("router", "pool"):
        shown.add_column(name)
    for name in ("hits", "predicted", "TTFT P50", "predicted", "took", "predicted", "rates"):
        shown.add_column(name, justify="right")
    for one in predictions:
        hits = one.predicted.hit_rate - one.row.hit_rate
        first = one.predicted.first_s / one.row.first_s - 1
        shown.add_row(
            one.row.router,
            one.row.mode,
            f"{one.row.hit_rate:.1%}",
            f"{one.predicted.hit_rate:.1%} ({100 * hits:+.1f}{_mark(one.hits_are_near)}; "
            f"{one.least.hit_rate:.1%} to {one.most.hit_rate:.1%})",
            f"{one.row.first_s:.2f} s",
            f"{one.predicted.first_s:.2f} s ({first:+.0%}{_mark(one.first_is_near)}; "
            f"{one.least.first_s:.2f} to {one.most.first_s:.2f})",
            f"{one.row.seconds:.1f} s",
            f"{one.predicted.seconds:.1f} s",
            _rates(one.rates),
        )
    return shown


def conclusion(predictions: Sequence[Prediction]) -> str:
    """How many rows are within the bounds."""
    hits = sum(one.hits_are_near for one in predictions)
    first = sum(one.first_is_near for one in predictions)
    return (
        f"hits within {100 * HITS_WITHIN:.0f} points in {hits} of {len(predictions)} rows, TTFT "
        f"P50 within {FIRST_WITHIN:.0%} in {first}; * is outside"
    )


def as_dict(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """The same, for programs."""
    return {
        "rows": [
            {
                "router": one.row.router,
                "mode": one.row.mode,
                "measured": {
                    "hit_rate": one.row.hit_rate,
                    "first_s": one.row.first_s,
                    "seconds": one.row.seconds,
                },
                "predicted": one.predicted._asdict(),
                "least": one.least._asdict(),
                "most": one.most._asdict(),
                "rates": one.rates._asdict(),
            }
            for one in predictions
        ]
    }


def _rates(rates: Rates) -> str:
    return (
        f"{1e6 * rates.token_s:.0f} us a token and {1e9 * rates.attention_s:.0f} ns for each "
        f"before it, {1e3 * rates.request_s:.0f} ms a prompt, {1e3 * rates.step_s:.0f} ms a step, "
        f"{rates.load_bytes_s / 1e6:,.0f} MB/s, {rates.cores:.1f} engines at a time, "
        f"{rates.late:.0%} late"
    )


def _mark(near: bool) -> str:
    return "" if near else " *"
