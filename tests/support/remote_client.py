"""A client in a process of its own, which reads its commands as lines of JSON.

python -m tests.support.remote_client MASTER SCHEMES
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from typing import Any

from kvpool import ClientConfig, Pool, admin, connect
from tests.conftest import NAMESPACE, buffers, keys, value


async def write(pool: Pool, server: str, name: str, count: int, size: int) -> dict[str, Any]:
    statuses = [
        await admin(pool).write_to(server, NAMESPACE, digest, value(digest, size))
        for digest in keys(name, count)
    ]
    return {"statuses": sorted({status.name for status in statuses})}


async def read(pool: Pool, name: str, count: int, size: int, timeout: float) -> dict[str, Any]:
    """Every byte of a hit is compared; `wrong` counts blocks that are not what was written."""
    chain, got = keys(name, count), buffers(count, size)
    began = time.monotonic()
    print(json.dumps({"reading": name}), flush=True)
    results = await pool.read(NAMESPACE, chain, got, timeout=timeout)
    took_s = time.monotonic() - began
    wrong = sum(
        result.status.hit and buffer != value(digest, size)
        for digest, buffer, result in zip(chain, got, results, strict=True)
    )
    seen = [bytes(buffer) for buffer in got]
    await asyncio.sleep(0.2)
    return {
        "hits": sum(result.status.hit for result in results),
        "statuses": sorted({result.status.name for result in results}),
        "wrong": wrong,
        "late": sum(map(bytes.__ne__, seen, map(bytes, got))),
        "took_s": took_s,
    }


async def main() -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ImportError):  # ucx comes where it stands, also without a fabric
        from kvpool_transports.ucx import UcxTransport

        UcxTransport.has_fabric = True  # type: ignore[assignment, method-assign]
    config = ClientConfig(masters=[sys.argv[1]], transports=sys.argv[2].split(","))
    async with await connect(config=config) as pool:
        print(json.dumps({"connected": True}), flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            order: dict[str, Any] = json.loads(line)
            what = order.pop("do")
            answer = await {"write": write, "read": read}[what](pool, **order)
            print(json.dumps({**answer, "counters": dict(pool.counters)}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
