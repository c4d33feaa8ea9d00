"""python -m examples.router --engine http://127.0.0.1:8000 --engine ... --pool 127.0.0.1:7450

A teaching piece and a test bed; docs/fleet.md says which router to run in production.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence

import aiohttp
from aiohttp import web

from examples.router.core import POLICIES, Router
from examples.router.fleet import Address, Fleet
from examples.router.proxy import Proxy
from kvpool import KvpoolError, connect

_RESOLVE_S = 5.0


@contextlib.asynccontextmanager
async def serving(chosen: argparse.Namespace) -> AsyncIterator[str]:
    """A router that runs inside the `with`; its URL. Raises MasterLost and OSError."""
    router = Router(chosen.policy)
    async with contextlib.AsyncExitStack() as stack:
        pool = None
        if chosen.pool:
            pool = await stack.enter_async_context(await connect(*chosen.pool))
        # Bytes pass as they are: nothing is decompressed, no cookie is kept.
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
            )
        )
        fleet = Fleet(router, session, pool)
        stack.push_async_callback(fleet.close)
        following = asyncio.create_task(_follow(chosen, fleet))
        stack.callback(following.cancel)
        proxy = Proxy(router, fleet, session, pool, admit=chosen.admit)
        stack.push_async_callback(proxy.close)
        # Cancellation: a client that goes away ends its request in the engine.
        runner = web.AppRunner(proxy.app(), handler_cancellation=True, access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, chosen.host, chosen.port).start()
        yield "http://{}:{}".format(*runner.addresses[0][:2])


async def _follow(chosen: argparse.Namespace, fleet: Fleet) -> None:
    """Keep to the engines that were named, and those that DNS has."""
    fleet.set(chosen.engine)
    while chosen.dns:
        with contextlib.suppress(OSError, UnicodeError):  # those that were there stay
            async with asyncio.timeout(_RESOLVE_S):
                fleet.set(chosen.engine + await _resolved(chosen))
        await asyncio.sleep(_RESOLVE_S)


async def _resolved(chosen: argparse.Namespace) -> list[Address]:
    name, _, port = chosen.dns.rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
    hosts = [f"[{host}]" if ":" in host else host for host in {str(one[4][0]) for one in found}]
    streams = [f"tcp://{{}}:{port}" if port else "" for port in (chosen.events, chosen.replay)]
    return [
        Address(f"http://{host}:{port}", *(stream.format(host) for stream in streams))
        for host in sorted(hosts)
    ]


def address(text: str) -> Address:
    """URL[,events=tcp://...][,replay=tcp://...][,host=ID]"""
    url, *options = text.split(",")
    fields = dict(option.partition("=")[::2] for option in options)
    if not url.startswith(("http://", "https://")) or fields.keys() - {"events", "replay", "host"}:
        raise argparse.ArgumentTypeError(f"{text!r}: expected {address.__doc__}")
    return Address(url.rstrip("/"), **fields)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="examples.router")
    parser.add_argument("--engine", type=address, action="append", default=[], help=address.__doc__)
    parser.add_argument("--dns", default="", help="NAME:PORT, each of whose addresses is an engine")
    parser.add_argument("--events", type=int, help="port of KV events of engines behind --dns")
    parser.add_argument("--replay", type=int, help="port of their replay")
    parser.add_argument("--policy", choices=POLICIES, default="session")
    parser.add_argument("--pool", action="append", default=[], help="a master, HOST:PORT")
    parser.add_argument(
        "--admit", action="store_true", help="serve as many sessions as the pool has room for"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    chosen = parser.parse_args(arguments)
    if not chosen.engine and not chosen.dns.rpartition(":")[2].isdigit():
        parser.error("name engines, with --engine URL or --dns NAME:PORT")
    if chosen.admit and not chosen.pool:
        parser.error("--admit: name a pool, with --pool HOST:PORT")
    return chosen


async def main() -> None:
    try:
        async with serving(parse()) as url:
            print(f"the router listens on {url}", flush=True)
            await asyncio.Event().wait()
    except (KvpoolError, OSError) as error:
        raise SystemExit(f"the router cannot start: {error}") from None


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
