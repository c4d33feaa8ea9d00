"""Who shares, who routes, and how much memory there is: what a sceptic asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.fleet.cases import Case, with_memory
from benchmarks.fleet.options import FleetOptions, Scope
from kvpool.errors import ConfigError


def one(base: FleetOptions) -> list[Case]:
    """The fleet that was asked for."""
    return [Case(f"{base.gpus} GPUs, {base.scope.value}, {base.router}", base)]


def memory(base: FleetOptions) -> list[Case]:
    """A pool, and each engine's host memory with session affinity, by memory in working sets."""
    return _by_memory(
        base,
        (0.25, 0.5, 0.75, 1.0, 1.5),
        ((Scope.LOCAL, "sticky"), (Scope.POOL, "least-loaded")),
    )


def grid(base: FleetOptions) -> list[Case]:
    """Who shares and who routes, by memory in working sets of the sessions that live at a time."""
    without = [
        Case(f"none, {router}", replace(base, scope=Scope.NONE, router=router))
        for router in ("round-robin", "sticky", "precise")
    ]
    ways = [(Scope.LOCAL, router) for router in ("sticky", "spill", "precise")]
    ways += [
        (Scope.POOL, router) for router in ("round-robin", "least-loaded", "sticky", "precise")
    ]
    return without + _by_memory(base, (0.25, 0.5, 0.75, 1.0, 1.5, 4.0), ways)


def _by_memory(
    base: FleetOptions, shares: Sequence[float], ways: Sequence[tuple[Scope, str]]
) -> list[Case]:
    cases = []
    for share in shares:
        for scope, router in ways:
            series = f"{scope.value}, {router}"
            options = replace(with_memory(base, share), scope=scope, router=router)
            cases.append(Case(f"{share:g} ws, {series}", options, series=series, x=share))
    return cases


def fan_out(base: FleetOptions) -> list[Case]:
    """Agents with sixteen children each, which read the agent's context at once; then with engines
    that read their own host's server directly, and contexts that are brought to all hosts."""
    base = replace(base, load="fan-out")
    cases = [
        Case(f"{scope.value}, {router}", replace(base, scope=scope, router=router))
        for scope, router in (
            (Scope.NONE, "sticky"),
            (Scope.LOCAL, "sticky"),
            (Scope.LOCAL, "precise"),
            (Scope.POOL, "round-robin"),
            (Scope.POOL, "least-loaded"),
            (Scope.POOL, "precise"),
        )
    ]
    pool = replace(base, router="least-loaded")
    direct = replace(pool, direct=True)
    return [
        *cases,
        Case("pool, least-loaded, spread", replace(pool, spread=True)),
        Case("pool, least-loaded, own host read directly", direct),
        Case("the same, spread", replace(direct, spread=True)),
    ]


def thousand(base: FleetOptions) -> list[Case]:
    """A thousand GPUs, in coarse blocks."""
    options = with_memory(replace(base, block=2048), 1.1)
    return [
        Case("pool, least-loaded", replace(options, router="least-loaded")),
        Case("local, sticky", replace(options, scope=Scope.LOCAL, router="sticky")),
    ]


def loads(base: FleetOptions) -> list[Case]:
    """Other loads than that of the published case."""
    names = ("codex", "front-loaded", "pipeline", "reasoning")
    return [case for load in names for case in _three_ways(load, replace(base, load=load))]


def mixed(base: FleetOptions) -> list[Case]:
    """The same GPUs as engines that prefill and others that decode, and as engines that do both."""
    ways = ("split", "mixed")
    return [case for way in ways for case in _three_ways(way, replace(base, engines=way))]


def _three_ways(name: str, base: FleetOptions) -> list[Case]:
    """To keep what was computed: in device memory alone, in each host's memory, in a pool."""
    return [
        Case(f"{name}: {scope.value}, {router}", replace(base, scope=scope, router=router))
        for scope, router in (
            (Scope.NONE, "sticky"),
            (Scope.LOCAL, "sticky"),
            (Scope.POOL, "least-loaded"),
        )
    ]


def trace(base: FleetOptions) -> list[Case]:
    """A recorded trace at several times its speed. It names no sessions, so nothing is sticky."""
    if base.trace is None:
        raise ConfigError("table trace: name the file with --trace")
    cases = []
    for times in (2, 4, 6, 8):
        for scope, router in (
            (Scope.NONE, "precise"),
            (Scope.LOCAL, "precise"),
            (Scope.POOL, "least-loaded"),
            (Scope.POOL, "precise"),
        ):
            rate = times * base.trace_rate
            options = replace(base, trace_rate=rate, scope=scope, router=router)
            series = f"{scope.value}, {router}"
            cases.append(Case(f"{rate:g}x, {series}", options, series=series, x=rate))
    return cases
