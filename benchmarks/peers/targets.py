"""The targets of kvpool beside Mooncake, as ratios of medians of one run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

Parts: TypeAlias = dict[str, dict[str, dict[str, dict[str, Any]]]]

_SIZES = ("128 KiB", "1 MiB", "2 MiB", "4 MiB", "16 MiB")


class Verdict(NamedTuple):
    """One target and its result."""

    what: str
    target: str
    measured: str
    met: bool


class _Target(NamedTuple):
    """A ratio of ours to theirs. `least`: whether it must be at least or at most the bound."""

    part: str
    what: str
    figure: str
    ours: str
    bound: float
    least: bool


_TARGETS = (
    *(_Target("reads", f"{size} x 64", "read", "kvpool", 2.0, True) for size in _SIZES),
    *(_Target("reads", f"{size} x 64", "write", "kvpool", 3.0, True) for size in _SIZES),
    *(_Target("reads", f"{size} x 64", "read", "kvpool-tcp", 1.0, True) for size in _SIZES),
    *(_Target("reads", f"{size} x 64", "read_cpu", "kvpool", 1.0, False) for size in _SIZES),
    _Target("match", "640 keys", "p50", "kvpool", 1.0, False),
    _Target("singles", "128 KiB", "read_p50", "kvpool", 1.5, False),
)


def judge(parts: Parts) -> list[Verdict]:
    """Those targets for which there are figures."""
    return [*_ratios(parts), *_failures(parts)]


def _ratios(parts: Parts) -> Iterator[Verdict]:
    for target in _TARGETS:
        systems = parts.get(target.part, {}).get(target.what, {})
        ours = systems.get(target.ours, {}).get(target.figure)
        theirs = systems.get("mooncake", {}).get(target.figure)
        if ours is None or not theirs:
            continue
        ratio = ours / theirs
        met = ratio >= target.bound if target.least else ratio <= target.bound
        yield Verdict(
            f"{target.ours}: {target.what}, {target.figure}",
            f"{'>=' if target.least else '<='} {target.bound:g}x mooncake",
            f"{ratio:.2f}x",
            met,
        )


def _failures(parts: Parts) -> Iterator[Verdict]:
    failures = parts.get("failures", {})
    for what, figure, target, bound in (
        ("owner killed", "failed_reads", "0", 0.0),
        ("owner frozen", "failed_reads", "0", 0.0),
        ("owner killed", "longest_read", "<= 0.5 s", 0.5),
        ("owner frozen", "longest_read", "<= 0.5 s", 0.5),
        ("overwrite under readers", "torn", "0", 0.0),
        ("client killed in mid-write", "leaked", "0", 0.0),
    ):
        ours = failures.get(what, {}).get("kvpool", {}).get(figure)
        if ours is not None:
            yield Verdict(f"kvpool: {what}, {figure}", target, f"{ours:g}", ours <= bound)
    visible = failures.get("master restarted", {}).get("kvpool", {}).get("visible")
    if visible is not None:
        yield Verdict("kvpool: master restarted, visible", "100 %", f"{visible:.0%}", visible >= 1)
