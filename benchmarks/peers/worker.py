"""A client process: `python -m benchmarks.peers.worker` reads commands as lines of JSON.

Each answer is one line, too. All systems run this same file.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.peers import pool_kvpool, pool_lmcache, pool_mooncake, pool_redis, tasks, trials
from benchmarks.peers.client import Bench
from benchmarks.peers.contract import Client, Memory
from kvpool.ops import process

_CLIENTS: dict[str, Callable[[dict[str, Any]], Client]] = {
    "kvpool": pool_kvpool.KvpoolClient,
    "mooncake": pool_mooncake.MooncakeClient,
    "redis": pool_redis.RedisClient,
    "lmcache": pool_lmcache.LmcacheClient,
}

COMMANDS: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
    task.__name__: task
    for task in (
        tasks.round_trip,
        tasks.singles,
        tasks.match,
        tasks.fill,
        tasks.many,
        tasks.visible,
        tasks.pressure,
        tasks.replay,
        trials.read_for,
        trials.write_for_ever,
        trials.replace_for,
        trials.read_torn,
    )
}


async def serve(about: dict[str, Any]) -> None:
    """Run one command after the other until stdin ends."""
    memory = Memory(about["memory_fd"])
    client = _CLIENTS[about["system"]](about)
    bench = Bench(client, await client.open(memory), about["pids"])
    _answer({"ready": True})
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            try:
                _answer(await COMMANDS[command.pop("do")](bench, **command))
            except Exception as error:
                _answer({"error": f"{type(error).__name__}: {error}"})
    finally:
        await client.close()


def _answer(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    process.run(serve(json.loads(sys.argv[1])))
