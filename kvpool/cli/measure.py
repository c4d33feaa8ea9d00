"""Commands that measure: replay, bench."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpool.cli.shared import Json, console, fail, parsed, run, stderr
from kvpool.errors import ConfigError, KvpoolError, Unavailable
from kvpool.ops import process
from kvpool.units import parse_size

if TYPE_CHECKING:
    from kvpool.tools.replay import ReplayOptions
    from kvpool.tools.traces import Request

Trace = Annotated[
    Path | None, typer.Argument(help="Recorded trace, also gzipped; - is stdin. See --format.")
]
TraceFormat = Annotated[
    str,
    typer.Option(
        "--format",
        help="Format of the trace: auto, mooncake, qwen-bailian, multi-turn or sharegpt.",
    ),
]
TimeUnit = Annotated[
    str | None, typer.Option(help="Of the trace's times: s or ms. Default: what the format says.")
]
Workload = Annotated[
    str, typer.Option(help="Generated if no trace is given: codex, fanout or answers.")
]
Servers = Annotated[
    list[str] | None,
    typer.Option(
        help="Number of block servers; with --dry several, e.g. 1,4,16. Default: 2, with --dry 1."
    ),
]
Clients = Annotated[int, typer.Option(min=1, max=64, help="Number of engine instances.")]
Capacity = Annotated[
    list[str] | None,
    typer.Option(
        help="Memory of all servers together, e.g. 1GiB or 5000blocks; "
        "with --dry also 0.5ws, a part of the mean working set."
    ),
]
BlockSize = Annotated[
    str | None,
    typer.Option(help="Bytes of each block, e.g. 64KiB. Default: depends on the workload."),
]
Sessions = Annotated[
    int, typer.Option(min=1, help="Sessions in all; of fanout and answers: groups.")
]
Concurrent = Annotated[int, typer.Option(min=1, help="Sessions, or groups, at the same time.")]
BlockTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="Tokens in a block. Default: what a trace's format says, 512 if generated."
    ),
]
InFlight = Annotated[
    int | None,
    typer.Option(help="Requests at a time. Default: 1 for a trace, else the number of clients."),
]
EngineTransports = Annotated[
    list[str] | None,
    typer.Option(help="Transports of the clients in turn, comma-separated. Default: shm,tcp."),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Play only the first requests, e.g. 1000.")]
Seed = Annotated[int, typer.Option(help="Seed of the generated workload and contents.")]
PolicyNames = Annotated[
    list[str] | None,
    typer.Option(
        help="Eviction policy; with --dry several. Default: lru. Those that learn from times, such "
        "as density, need --dry, which has the trace's."
    ),
]
ReplayTiers = Annotated[
    list[str] | None,
    typer.Option(
        help="Tier of each server instead of --capacity, fastest first, "
        "e.g. dram:1GiB or nvme:/data/{server}:9GiB."
    ),
]
Events = Annotated[
    list[str] | None,
    typer.Option(
        help="What happens after shares of the requests, such as 0.3:join,0.5:drain,0.7:kill. A "
        "server that is killed is started again, and requests wait meanwhile."
    ),
]
KillAt = Annotated[
    float | None,
    typer.Option(
        help="Kill all servers after this share of the requests and restart them, e.g. 0.5."
    ),
]
Dry = Annotated[
    bool,
    typer.Option(
        "--dry", help="Play on the store alone, without processes and bytes, and show the optimum."
    ),
]
Hints = Annotated[
    bool, typer.Option("--hints", help="With --dry: also play each policy with session hints.")
]
Picture = Annotated[
    Path | None,
    typer.Option(
        "--picture", "--plot", help="Write the result as SVG to this file, e.g. demo.svg."
    ),
]


def replay(
    trace: Trace = None,
    format: TraceFormat = "auto",
    time_unit: TimeUnit = None,
    workload: Workload = "codex",
    servers: Servers = None,
    clients: Clients = 4,
    capacity: Capacity = None,
    block_size: BlockSize = None,
    sessions: Sessions = 200,
    concurrent: Concurrent = 24,
    block_tokens: BlockTokens = None,
    in_flight: InFlight = None,
    transports: EngineTransports = None,
    limit: Limit = None,
    seed: Seed = 1,
    policy: PolicyNames = None,
    tier: ReplayTiers = None,
    kill_at: KillAt = None,
    events: Events = None,
    dry: Dry = False,
    hints: Hints = False,
    picture: Picture = None,
    as_json: Json = False,
) -> None:
    """Play a workload through a pool of real processes and check every byte.

    With --dry, --capacity, --policy and --servers take several values, comma-separated.
    Without it there are 2 servers, with it one.
    """
    from kvpool.tools import replay as replays

    _check(picture, block_size)
    counts, sizes, policies = (",".join(_several(one)) for one in (servers, capacity, policy))
    if dry:
        try:
            name, requests = replays.requests_of(
                trace, workload, sessions, concurrent, seed, block_tokens, format, time_unit
            )
            requests = requests[:limit]
            blocks = replays.capacities_in_blocks(sizes or "5000blocks", block_size, requests)
            pools = replays.server_counts(counts or "1", most=1024)
        except KvpoolError as error:
            fail(error)
        return _dry(name, requests, policies or "lru", blocks, pools, hints, seed, picture, as_json)
    try:
        options = replays.options(
            trace=trace,
            workload=workload,
            servers=_one_count(counts, sizes, policies, hints),
            clients=clients,
            capacity=sizes or None,
            block_size=block_size,
            sessions=sessions,
            concurrent=concurrent,
            in_flight=in_flight,
            transports=_several(transports) or ["shm", "tcp"],
            limit=limit,
            seed=seed,
            policy=policies or "lru",
            tiers=tier or (),
            kill_at=kill_at,
            events=",".join(events or ()),
            format=format,
            unit=time_unit,
            block_tokens=block_tokens,
        )
    except KvpoolError as error:
        fail(error)
    _play(options, picture, as_json)


def _several(given: list[str] | None) -> list[str]:
    """The values of an option that was given several times, each with one or several."""
    return [one.strip() for one in ",".join(given or ()).split(",") if one.strip()]


def _size_of_block(text: str) -> int:
    """Bytes. Ends the command where there are none."""
    try:
        if size := parsed("--block-size", parse_size, text):
            return size
    except ConfigError as error:
        fail(error)
    fail(ConfigError(f"--block-size {text!r}: a block has at least one byte, e.g. 2MiB"))


def _check(path: Path | None, block_size: str | None) -> None:
    """Ends the command before it plays for nothing."""
    if block_size is not None:
        _size_of_block(block_size)
    if path is None:
        return
    there = path if path.exists() else path.parent
    if not path.parent.is_dir() or path.is_dir() or not os.access(there, os.W_OK):
        fail(
            ConfigError(
                f"--picture {path}: expected a file in a directory that this user may write"
            )
        )


def _write_picture(path: Path, picture: str) -> None:
    """Whole, or an error, and then what was there before: part of a picture is none."""
    path = path.resolve()
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        whole.write_text(picture)
        whole.replace(path)
    except OSError as error:
        whole.unlink(missing_ok=True)
        fail(Unavailable(f"--picture {path}: {error.strerror}"))


def _one_count(servers: str, capacity: str, policy: str, hints: bool) -> int:
    """How many servers a run without --dry has. Raises ConfigError."""
    from kvpool.tools import replay as replays

    if hints:
        raise ConfigError("--hints needs --dry: only there the times of the trace are kept")
    counts = replays.server_counts(servers or "2", most=64)
    for option, given in ("servers", servers), ("capacity", capacity), ("policy", policy):
        if "," in given:
            raise ConfigError(f"several values of --{option} need --dry")
    return counts[0]


def _play(options: ReplayOptions, picture: Path | None, as_json: bool) -> None:
    from kvpool.tools import replay as replays

    report = run(replays.replay(options, stderr if as_json else console))
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        from kvpool.tools.replay_report import tables

        for table in tables(report):
            console.print(table)
    if picture is not None:
        from kvpool.tools.charts import draw

        _write_picture(picture, draw(report))
        if not as_json:
            console.print(f"picture: {picture.resolve()}", soft_wrap=True, markup=False)
    raise typer.Exit(0 if report.wrong_bytes == 0 else 1)


def _dry(
    name: str,
    requests: list[Request],
    policies: str,
    capacities: list[int],
    servers: list[int],
    hints: bool,
    seed: int,
    picture: Path | None,
    as_json: bool,
) -> None:
    from kvpool.tools import policy_study as dries

    try:
        options = dries.options(
            name=name,
            requests=requests,
            policies=policies,
            capacities=capacities,
            hints=hints,
            seed=seed,
            servers=servers,
        )
    except KvpoolError as error:
        fail(error)
    process.freeze_gc()  # a collection would visit millions of block ids
    done = dries.study(options, lambda line: stderr.print(line, highlight=False))
    if as_json:
        print(json.dumps(done.as_dict()))
    else:
        for table in dries.tables(done):
            console.print(table)
    if picture is not None:
        from kvpool.tools.charts import curves

        _write_picture(picture, curves(done))


def bench(
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds of each measurement; the median counts.")
    ] = 9,
    block_size: Annotated[str, typer.Option(help="Bytes of each block, e.g. 2MiB.")] = "2MiB",
    batch: Annotated[int, typer.Option(min=1, max=1024, help="Blocks in a batch.")] = 64,
    as_json: Json = False,
) -> None:
    """Measure reads, writes and matches as ratios to the limits of this machine."""
    from kvpool.tools import bench as benches

    size = _size_of_block(block_size)
    try:
        options = benches.BenchOptions(rounds, size, batch)
    except ConfigError as error:
        fail(ConfigError(f"--block-size {block_size!r}: {error}"))
    report = run(benches.bench(options, stderr))
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        console.print(benches.table(report.rows))
