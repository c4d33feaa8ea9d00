"""`kvpool remove` on a pool of real processes, and what it says to wrong input."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from kvpool import ClientConfig, Namespace, admin, connect
from tests.chaos.cluster import Node
from tests.conftest import keys
from tests.support.commands import kvpool, running_kvpool

LLAMA, QWEN = Namespace("vllm/2 model=llama dtype=bf16"), Namespace("vllm/2 model=qwen")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "nothing is chosen: give --namespace, --model or --tenant"),
        (["--namespace", ""], "expected 1 to 512 printable characters"),
        (["--model", "a b"], "--model 'a b': expected one word"),
        (["--tenant", "ACME"], "--tenant 'ACME': expected 1 to 32 lower-case letters"),
        (["--namespace", "a", "--deadline", "soon"], "'soon'"),
    ],
)
def test_wrong_input_is_one_clear_error(arguments: list[str], says: str) -> None:
    result = kvpool("remove", *arguments)
    assert result.code == 2
    assert says in " ".join(result.all.split())
    assert result.all.count("error:") == 1


async def kvpool_remove(masters: str, *arguments: str) -> tuple[int, str]:
    said = await running_kvpool("remove", "--masters", masters, *arguments)
    return said.code, said.all


async def test_a_model_goes_from_memory_and_file_and_a_kill_does_not_bring_it_back(
    tmp_path: Path,
) -> None:
    master = Node("m", "kvpool", "master", "--bind", "127.0.0.1:0", "--log-level", "error")
    await master.start()
    masters = master.first_line.split()[-1]
    tiers = ("--tier", "dram:4MiB", "--tier", f"nvme:{tmp_path}/file:16MiB")
    server = Node("s", "kvpool", "server", "--masters", masters, "--id", "s", *tiers)
    await server.start()
    try:
        async with await connect(config=ClientConfig(masters=[masters])) as pool:
            old, new = keys("old", 200), keys("new", 20)
            for name in (LLAMA, QWEN):
                for at in (0, 100):
                    await pool.write(name, old[at : at + 100], [b"x" * 8192] * 100, timeout=20)
            code, shown = await kvpool_remove(masters, "--model", "llama")
            assert code == 0
            assert [line.split()[-5:-2] for line in shown.splitlines()[1:2]] == [["1", "1", "200"]]
            assert "run it again with --yes" in shown
            assert sum(await pool.contains(LLAMA, old)) == 200
            (held,) = (await admin(pool).removals.held(lambda one: one == LLAMA, timeout=10)).found
            await server.kill()
            removing = asyncio.create_task(
                admin(pool).removals.remove([held], timeout=30, report=lambda *_: None)
            )
            await server.start()
            assert await removing == {}, "it goes on with what the file has brought back"
            assert sum(await pool.contains(LLAMA, old)) == 0
            await pool.write(LLAMA, new, [b"y" * 8192] * 20, timeout=20)
            await admin(pool).removals.remove([held], timeout=30, report=lambda *_: None)
            assert sum(await pool.contains(LLAMA, new)) == 20
            code, shown = await kvpool_remove(
                masters, "--namespace", LLAMA.name, "--model", "llama", "--yes", "--json"
            )
            told = json.loads(shown)
            assert (code, told["removed_blocks"], told["left"]) == (0, 20, {})
            await server.kill()
            code, shown = await kvpool_remove(masters, "--model", "x", "--yes", "--deadline", "1s")
            assert code == 1
            assert "server s may have some of it" in shown
            await server.start()
            assert sum(await pool.contains(QWEN, old)) == 200
            assert sum(await pool.contains(LLAMA, [*old, *new])) == 0
            code, shown = await kvpool_remove(masters, "--model", "x")
            assert (code, "there are vllm/2 model=qwen" in shown) == (0, True)
    finally:
        await server.close()
        await master.close()
