"""A study as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from benchmarks.fleet.cases import FleetStudy, Published
from benchmarks.fleet.constants import DENSE_70B, Constants
from benchmarks.fleet.results import AfterIncident, FleetResult


def table(study: FleetStudy) -> Table:
    """Each case in one row; where there are published figures, the deviation in brackets."""
    shown = Table(title=f"{study.name}: {study.title}", title_justify="left")
    shown.add_column("case")
    for name in ("tokens/s/GPU", "hits", "TTFT P50", "P90", "end to end P50", "waited P50"):
        shown.add_column(name, justify="right")
    published_any = any(case.published != Published() for case, _ in study.rows)
    admits = any(case.options.admit for case, _ in study.rows)
    if admits:
        shown.add_column("a session waits P50, P99", justify="right")
    incidents = any(result.after is not None for _, result in study.rows)
    if published_any:
        shown.add_column("published")
    disks = any(case.options.disk_tokens for case, _ in study.rows)
    if disks:
        shown.add_column("from disk", justify="right")
        shown.add_column("to disk", justify="right")
    if incidents:
        shown.add_column("hits before, in the worst minute, back after")
    for case, result in study.rows:
        published = case.published
        gpus = case.options.gpus
        shown.add_row(
            case.name,
            f"{result.tokens_s_per_gpu:,.0f}" + _deviation(result.tokens_s, published.tokens_s),
            f"{result.hit_rate:.1%}",
            f"{result.first_token.p50:.2f} s"
            + _deviation(result.first_token.p50, published.first_token_s),
            f"{result.first_token.p90:.2f} s",
            f"{result.end_to_end.p50:.1f} s"
            + _deviation(result.end_to_end.p50, published.end_to_end_s),
            f"{result.waited.p50:.2f} s",
            *([_session_waited(result)] if admits else []),
            *([_published(published, gpus, case.calibrated)] if published_any else []),
            *(_disk_bytes(result) if disks else []),
            *([_after(result.after)] if incidents else []),
        )
    return shown


def _disk_bytes(result: FleetResult) -> list[str]:
    return [f"{size / 1e12:.2f} TB" for size in (result.disk_read_bytes, result.disk_written_bytes)]


def _session_waited(result: FleetResult) -> str:
    return f"{result.session_waited.p50:,.0f}, {result.session_waited.p99:,.0f} s"


def _after(after: AfterIncident | None) -> str:
    if after is None:
        return ""
    back = "never" if after.back_s is None else f"{after.back_s:.0f} s"
    return f"{after.before:.1%}, {after.worst:.1%}, {back}"


def constants_table(constants: Constants) -> Table:
    """Every number of the model with its source."""
    shown = Table(title="constants", title_justify="left")
    for name in ("name", "value", "unit", "kind", "source"):
        shown.add_column(name, justify="right" if name == "value" else "left")
    for name, value, unit, kind, source in _constant_rows(constants):
        shown.add_row(name, f"{value:.6g}", unit, kind, source)
    return shown


def _constant_rows(constants: Constants) -> list[tuple[str, float, str, str, str]]:
    """Name, value, unit, kind and source of each, then of those that another model has."""
    rows = constants.rows()
    units = {name: unit for name, _, unit, _, _ in rows}
    return rows + [
        (f"{one.name}, of links-70b", one.value, units[one.name], one.kind.value, one.source)
        for one in DENSE_70B
    ]


def as_dict(studies: list[FleetStudy], constants: Constants) -> dict[str, Any]:
    """The same, for programs."""
    return {
        "constants": [
            dict(zip(("name", "value", "unit", "kind", "source"), row, strict=True))
            for row in _constant_rows(constants)
        ],
        "studies": [
            {
                "name": study.name,
                "title": study.title,
                "rows": [
                    {
                        "case": case.name,
                        "published": asdict(case.published),
                        "calibrated": case.calibrated,
                        **asdict(result),
                    }
                    for case, result in study.rows
                ],
            }
            for study in studies
        ],
    }


def ratios(without: FleetResult, pooled: FleetResult) -> str:
    """The headline in one line."""
    return (
        f"{pooled.tokens_s / without.tokens_s:.1f}x the throughput, first token at P50 "
        f"{without.first_token.p50 / pooled.first_token.p50:.0f}x sooner, end to end at P50 "
        f"{without.end_to_end.p50 / pooled.end_to_end.p50:.1f}x sooner, hits "
        f"{without.hit_rate:.1%} -> {pooled.hit_rate:.1%}"
    )


def _deviation(value: float, published: float | None) -> str:
    return "" if published is None else f" ({value / published - 1:+.1%})"


def _published(published: Published, gpus: int, calibrated: str) -> str:
    parts = []
    if published.tokens_s is not None:
        parts.append(f"{published.tokens_s / gpus:,.0f}")
    if published.hit_rate is not None:
        parts.append(f"{published.hit_rate:.1%}")
    if published.first_token_s is not None:
        parts.append(f"{published.first_token_s:.2f} s")
    if published.end_to_end_s is not None:
        parts.append(f"{published.end_to_end_s:.1f} s")
    text = ", ".join(parts)
    return f"{text}; {calibrated} is calibrated" if calibrated else text
