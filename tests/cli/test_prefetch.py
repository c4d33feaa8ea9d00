"""Real processes: blocks that lie in a server's file are in its memory when their reader comes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from kvpool import ClientConfig, MoveStatus, ReadStatus, connect
from kvpool.tools.subprocesses import servers_up
from tests.conftest import NAMESPACE, buffers, eventually, key, keys, values
from tests.support.commands import running_kvpool
from tests.support.programs import master_and_server

BLOCK = 64 << 10


@pytest.mark.timeout(120)
async def test_a_server_brings_up_what_will_be_read_and_counts_it(tmp_path: Path) -> None:
    tiers = ("--tier", "dram:4MiB", "--tier", f"nvme:{tmp_path}/tier:32MiB")
    beats = {"KVPOOL_SERVER_HEARTBEAT_S": "100ms"}
    async with master_and_server("--id", "one", *tiers, **beats) as (master, child):
        await servers_up(master, 1)
        config = ClientConfig(masters=[master], timeout_s=20)
        async with await connect(config=config) as pool:
            chain = keys("chain", 6)
            await pool.write(NAMESPACE, chain, values(chain, BLOCK))
            for number in range(4):
                filler = keys(f"filler {number}", 30)
                await pool.write(NAMESPACE, filler, values(filler, BLOCK))

            async def counters() -> dict[str, int]:
                (member,) = await pool.members()
                return member.stats.counters

            async def tier() -> set[str]:
                runs = (await pool.match(NAMESPACE, chain)).runs
                return {replica.tier for run in runs for replica in run.replicas}

            assert await tier() == {"nvme"}
            where = ("--namespace", NAMESPACE.name, "--masters", master)
            absent = key("not there").hex()
            said = await running_kvpool("prefetch", absent, *where)
            assert (said.code, said.out) == (
                1,
                "1 gone, of 1 blocks\ngone: `kvpool explain` says why\n",
            )
            statuses = await pool.prefetch(NAMESPACE, chain)
            assert statuses == [MoveStatus.IN_PROGRESS] * 6
            # What was written last stays for two seconds; then the master knows of each block.
            hexes = "\n".join(digest.hex() for digest in chain)
            said = await running_kvpool("prefetch", "-", *where, stdin=hexes)
            assert (said.code, said.out) == (0, "6 in memory, of 6 blocks\n"), said
            assert await tier() == {"dram"}
            into = buffers(6, BLOCK)
            results = await pool.read(NAMESPACE, chain, into)
            assert {result.status for result in results} == {ReadStatus.HIT}
            assert into == values(chain, BLOCK)

            async def all_are_used() -> bool:
                return (await counters())["prefetch_used_bytes"] == 6 * BLOCK

            await eventually(all_are_used, 10)
            assert (await counters())["prefetched_bytes"] == 6 * BLOCK
            assert (await counters())["prefetch_wasted_bytes"] == 0
            child.signal(signal.SIGKILL)
            below = [digest.hex() for digest in keys("filler 0", 30)]
            said = await running_kvpool("prefetch", *below, *where)
            lines = said.out.splitlines()
            assert said.code == 1
            assert lines[-1] == "lost: a server does not answer, `kvpool doctor` says which"
