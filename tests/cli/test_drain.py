"""Real processes: a server leaves, and readers do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from kvpool import Pool, logs
from kvpool.cli.leave import _as_json, _print
from kvpool.errors import ServerLost
from kvpool.operators import DrainReport, Left
from kvpool.types import MoveStatus
from tests.chaos.cluster import Node, ProcessCluster
from tests.conftest import NAMESPACE, buffers, eventually, patient, value
from tests.support.commands import kvpool, running_kvpool
from tests.support.processes import fill

BLOCK = 256 << 10


async def drain(cluster: ProcessCluster, *arguments: str) -> tuple[int, str]:
    """Run `kvpool drain`; its exit code and output."""
    masters = ",".join(cluster.masters_of("clients"))
    said = await running_kvpool("drain", *arguments, "--masters", masters)
    return said.code, said.all


async def read_all(pool: Pool, blocks: Sequence[bytes]) -> None:
    into = buffers(len(blocks), BLOCK)
    results = await pool.read(NAMESPACE, blocks, into, timeout=10)
    assert [result.status.name for result in results if not result.status.hit] == []
    assert into == [value(digest, BLOCK) for digest in blocks]


@asynccontextmanager
async def reader(cluster: ProcessCluster, blocks: Sequence[bytes]) -> AsyncIterator[list[int]]:
    """Reads all blocks again and again meanwhile, and fails if one read did."""
    rounds: list[int] = []
    async with cluster.client("tcp") as pool:

        async def read_for_ever() -> None:
            while True:
                await read_all(pool, blocks)
                rounds.append(len(blocks))
                await asyncio.sleep(0.02)  # the cores are for those who hand over, too

        reading = asyncio.create_task(read_for_ever())
        try:
            yield rounds
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading


def node(cluster: ProcessCluster, name: str) -> Node:
    return cluster.servers[name]


async def test_a_server_is_drained_while_clients_read_and_then_stopped() -> None:
    async with ProcessCluster(servers=3) as cluster, cluster.client() as pool:
        blocks = await fill(pool, "server-0", 60, BLOCK)
        async with reader(cluster, blocks) as rounds:
            code, output = await drain(cluster, "server-0", "--json")
            report = json.loads(output)
            assert (code, report["state"], report["left"]) == (0, "done", []), output
            assert report["moved_blocks"] == 60
            await node(cluster, "server-0").stop()
            before = len(rounds)
            await eventually(lambda: len(rounds) > before + 1, patient(5))  # without it
        await read_all(pool, blocks)


async def test_what_has_no_room_is_exit_1_and_a_table_and_it_may_stay() -> None:
    async with ProcessCluster(servers=2, capacity="16MiB") as cluster, cluster.client() as pool:
        blocks = await fill(pool, "server-0", 40, BLOCK)
        await fill(pool, "server-1", 40, BLOCK)
        code, output = await drain(cluster, "server-0", "--deadline", "2s")
        assert code == 1
        lines = [line.split() for line in output.splitlines()]
        assert lines[1] == ["namespace", "why", "blocks", "size"]
        assert lines[2][:3] == [NAMESPACE.name, "no", "room"], output
        assert "server-0 stays" in (await drain(cluster, "server-0", "--cancel"))[1]
        await read_all(pool, blocks)
        # A name that no server has is a usage error, and nobody leaves.
        for flags in ([], ["--cancel"]):
            code, output = await drain(cluster, "server-17", *flags)
            assert code == 2, output
            assert "no server has the name 'server-17': there are server-" in output
            assert "kvpool status" in output
        assert not any(one.stats.draining for one in await pool.members())


async def test_a_server_that_gets_sigterm_hands_over_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_SERVER_DRAIN_S", "30s")
    async with ProcessCluster(servers=2) as cluster, cluster.client() as pool:
        monkeypatch.delenv("KVPOOL_SERVER_DRAIN_S")
        blocks = await fill(pool, "server-0", 40, BLOCK)
        async with reader(cluster, blocks):
            seconds, code = await node(cluster, "server-0").stop(signal.SIGTERM)
            assert code == 0
            assert seconds < 30
        await read_all(pool, blocks)
        await node(cluster, "server-1").kill()  # it would hand over, too


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (MoveStatus.DONE, "nothing is left: [red]server can be stopped"),
        (None, "the drain was cancelled, and [red]server stays"),
        (MoveStatus.NOT_YET, "left 2 blocks, 1 KiB:"),
    ],
)
def test_names_are_printed_as_they_are(
    capsys: pytest.CaptureFixture[str], state: MoveStatus, says: str
) -> None:
    left = (Left("[b]model", "no room", 2, 1024),)
    _print("[red]server", DrainReport(state, 5, 2, 1024, 3, 2048, left))
    printed = capsys.readouterr().out
    assert says in printed
    assert printed.startswith("moved 3 blocks, 2 KiB; ")
    assert ("[b]model" in printed) is (state is MoveStatus.NOT_YET)


def test_json_has_a_word_for_each_state() -> None:
    states = (None, MoveStatus.IN_PROGRESS, MoveStatus.DONE, MoveStatus.NOT_YET)
    words = [json.loads(_as_json(DrainReport(state)))["state"] for state in states]
    assert words == ["off", "running", "done", "incomplete"]


def test_a_server_that_is_lost_is_one_line_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def lost(*_: object) -> None:
        logs.get("kvpool.client").warning("transport failed", server="s")
        raise ServerLost("server s: the peer did not answer in time")

    monkeypatch.setattr("kvpool.cli.leave.open_pool", lost)
    said = kvpool("drain", "s", "--masters", "127.0.0.1:9")
    advice = "`kvpool doctor` says what is wrong there"
    assert (said.code, said.out) == (1, "")
    assert said.err == f"error: server s: the peer did not answer in time; {advice}\n"
