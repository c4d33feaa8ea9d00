"""What probes and scrapers see: figures that are true, and a page that nothing disturbs."""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from types import SimpleNamespace

import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families as parsed

from kvpool import dev
from kvpool.errors import ConfigError
from kvpool.net import http_server
from kvpool.net.http_server import Page, PageInSteps, Pages, PageView, Routes, pages
from kvpool.ops import metrics
from kvpool.types import Figure
from tests.conftest import NAMESPACE, eventually, keys, values
from tests.support.turns import others

BIG = 256 << 10


async def ask(address: str, path: str = "/metrics", method: str = "GET") -> tuple[int, str]:
    """Status and body."""
    return _split(await raw(address, f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()))


async def raw(address: str, request: bytes) -> bytes:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=BIG)
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def _split(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


async def figures(address: str) -> dict[str, float]:
    """Every sample, as `name` or `name tier`."""
    _, text = await ask(address)
    return {
        " ".join(filter(None, (sample.name, sample.labels.get("tier")))): sample.value
        for family in parsed(text)
        for sample in family.samples
    }


@asynccontextmanager
async def serving(routes: Routes, address: str = "127.0.0.1:0", **how: bool) -> AsyncIterator[str]:
    """The address of these pages."""
    async with pages(routes, address, **how) as made:
        assert made is not None
        yield made.address


PLAIN = Page(HTTPStatus.OK, b"")


def test_so_many_views_may_come_at_once_and_so_many_each_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A view costs far more than its request, and other sites' scripts may ask, too."""
    now = 1000.0
    loop = SimpleNamespace(time=lambda: now)
    monkeypatch.setattr(http_server.asyncio, "get_running_loop", lambda: loop)
    served = Pages({"/view": PageView(lambda fields, near: PLAIN), "/": lambda: PLAIN})

    def views(peer: str) -> int:
        """How many of 150 are made for a peer now."""
        asked = ("/view", "localhost", "127.0.0.1", peer)
        found = [served._page(*asked).status for _ in range(150)]
        assert found == sorted(found)
        return found.count(HTTPStatus.OK)

    assert views("192.0.2.1") == http_server._VIEWS_MAX / 2
    assert views("192.0.2.1") == 0
    assert views("192.0.2.2") > 20, "one peer takes nothing from another"
    now += 1.0
    assert views("192.0.2.1") == 0
    now += 1.0
    assert views("192.0.2.1") == http_server._VIEWS_MAX / 2
    assert sum(views(f"192.0.2.{number}") for number in range(2, 90)) == http_server._VIEWS_MAX / 2
    assert served._page("/", "localhost", "127.0.0.1").status == HTTPStatus.OK
    assert served._page("/", "a.test", "127.0.0.1").status == HTTPStatus.OK
    assert served._page("/view", "a.test", "127.0.0.1").status == HTTPStatus.FORBIDDEN


async def test_a_page_that_cannot_be_made_is_an_error_of_its_own() -> None:
    def broken() -> Page:
        raise ValueError("a bug")

    def half() -> Iterator[bytes]:
        yield b"half"
        broken()

    whole = Page(HTTPStatus.OK, b"good\n")
    routes: Routes = {"/broken": broken, "/half": PageInSteps(half, ""), "/whole": lambda: whole}
    async with serving(routes) as address:
        for path in ("/broken", "/half"):
            assert await ask(address, path) == (500, "see the log\n")
        assert await ask(address, "/whole") == (200, "good\n")
        status, text = await ask(address, "/other")
        assert (status, "/broken, /half, /whole" in text) == (404, True)


def test_who_goes_before_its_answer_leaves_no_error_in_the_log() -> None:
    """uvloop's transports raise then, where asyncio's keep quiet."""
    errors: list[object] = []

    async def play() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: errors.append(what))

        def long() -> Iterator[bytes]:
            client.close()
            yield from [b"x"] * 100

        async with pages({"/": lambda: PLAIN, "/long": PageInSteps(long, "")}, "127.0.0.1:0") as on:
            assert on is not None
            for path in (b"/", b"/long"):
                client = socket.create_connection(("127.0.0.1", int(on.address.split(":")[1])))
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sendall(b"GET " + path + b" HTTP/1.1\r\n\r\n")
                if path == b"/":
                    client.close()
                assert (await ask(on.address, "/"))[0] == 200  # it came later
                await eventually(lambda: not on._requests)

    uvloop.run(play())
    assert not errors


@pytest.fixture
async def of_master(pool_dev: dev.Dev) -> AsyncIterator[str]:
    async with serving(metrics.pages_of_master(pool_dev.master)) as address:
        yield address


@pytest.fixture
async def of_server(pool_dev: dev.Dev) -> AsyncIterator[str]:
    async with serving(metrics.pages_of_server(pool_dev.servers[0])) as address:
        yield address


async def test_figures_tell_what_happened(
    pool_dev: dev.Dev, of_master: str, of_server: str
) -> None:
    chain = keys("told", 8)
    async with pool_dev.pool() as pool:
        await pool.write(NAMESPACE, chain, values(chain))
        got = [bytearray(8192) for _ in chain]
        await pool.read(NAMESPACE, chain, got, match=await pool.match(NAMESPACE, chain))
    told = await figures(of_server)
    assert told["kvpool_server_up"] == 1
    assert told["kvpool_server_blocks"] == told["kvpool_server_written_blocks_total"] == 8
    assert told["kvpool_server_read_bytes_total"] == 8 * 8192
    assert told["kvpool_server_capacity_bytes"] == 16 << 20
    assert told["kvpool_tier_blocks dram"] == 8
    told = await figures(of_master)
    assert told["kvpool_master_blocks"] == 8
    assert told["kvpool_master_requests_total"] > 0
    assert told["kvpool_server_capacity_bytes"] == 16 << 20


async def test_asking_touches_nothing(pool_dev: dev.Dev, of_server: str) -> None:
    async def age() -> float:
        return (await figures(of_server))["kvpool_server_victim_age_seconds"]

    chain = keys("untouched", 1)
    async with pool_dev.pool() as pool:
        await pool.write(NAMESPACE, chain, values(chain))
    first = await age()
    await asyncio.sleep(0.05)
    assert await age() > first


async def test_ready_is_a_server_that_a_master_knows() -> None:
    async with dev.serve("1MiB") as running:
        server = running.servers[0]
        async with serving(metrics.pages_of_server(server)) as address:
            assert (await ask(address, "/ready"))[0] == 200
            await running.master.close()
            await eventually(lambda: not server.registered, within_s=15)
            status, why = await ask(address, "/ready")
            assert (status, why) == (503, "no master knows this server yet\n")
            assert (await ask(address, "/health"))[0] == 200


async def test_bad_requests_get_an_answer_or_none_and_disturb_nobody(of_server: str) -> None:
    assert (await ask(of_server, "/"))[0] == 404
    assert (await ask(of_server, "/metrics?name=x"))[0] == 200
    assert (await ask(of_server, method="POST"))[0] == 405
    assert await ask(of_server, method="HEAD") == (200, "")
    assert _split(await raw(of_server, b"\0\xff garbage\r\n\r\n"))[0] == 400
    assert await raw(of_server, b"GET /" + b"x" * BIG) == b""
    assert (await ask(of_server))[0] == 200


PROBE = b"GET /health HTTP/1.1\r\n\r\n"


async def idle(address: str, count: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connections that ask for nothing, which the server has seen."""
    host, _, port = address.rpartition(":")
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(count)]
    assert _split(await raw(address, b"GET /nothing HTTP/1.1\r\n\r\n"))[0] == 404
    return opened


async def test_connections_are_bounded_and_a_probe_gets_in(
    of_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_HEAD_S", 60.0)
    silent = await idle(of_server, http_server._CONNECTIONS_MAX + 8)
    try:
        for _ in range(4):
            assert _split(await raw(of_server, PROBE))[0] == 200
        # The oldest have given way, and only they.
        async with asyncio.timeout(5):
            assert await silent[0][0].read() == b""
        assert not silent[-1][0].at_eof()
    finally:
        for _, writer in silent:
            writer.close()


async def test_who_has_most_connections_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one connection of another peer, which came first and takes its time."""
    monkeypatch.setattr(http_server, "_CONNECTIONS_MAX", 8)
    async with serving({"/health": lambda: PLAIN}, "[::]:0", insecure=True) as address:
        port = address.rpartition(":")[2]
        try:
            reader, writer = await asyncio.open_connection("::1", int(port))
        except OSError:
            pytest.skip("this host has no IPv6")
        writer.write(PROBE[:10])
        crowd = await idle(f"127.0.0.1:{port}", 20)
        writer.write(PROBE[10:])
        assert _split(await asyncio.wait_for(reader.read(), 5))[0] == 200
        for _, one in [*crowd, (reader, writer)]:
            one.close()


async def test_a_connection_without_a_request_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_HEAD_S", 0.05)
    async with serving({"/health": lambda: PLAIN}) as address:
        ((reader, writer),) = await idle(address, 1)
        async with asyncio.timeout(http_server._ANSWER_S - 1):
            assert await reader.read() == b""
        writer.close()


async def test_names_that_a_server_made_up_do_not_spoil_the_page(pool_dev: dev.Dev) -> None:
    strange = {"evicted_blocks_total": 1, "used_bytes": 2, 'x"} 1\nfake': 3, "fine": 4}
    pool_dev.servers[0]._context.counters.update(strange)
    async with serving(metrics.pages_of_server(pool_dev.servers[0])) as address:
        told = await figures(address)
    assert told["kvpool_server_fine_total"] == 4
    assert told["kvpool_server_used_bytes"] == 0
    assert not any("fake" in name for name in told)


async def test_a_taken_or_open_address_is_refused(of_server: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot serve HTTP at 127.0.0.1:\d+"):
        await Pages({}).start(of_server)
    with pytest.raises(ConfigError, match=r"'a\.\.b:1': expected host:port"):
        await Pages({}).start("a..b:1", insecure=True)
    with pytest.raises(ConfigError, match=r"cannot serve HTTP at é{60}:1: .*idna"):
        await Pages({}).start(f"{'é' * 60}:1", insecure=True)
    with pytest.raises(ConfigError, match="reachable from other machines"):
        await Pages({}).start("0.0.0.0:0")


async def test_a_closed_page_leaves_nothing(pool_dev: dev.Dev) -> None:
    async with serving(metrics.pages_of_master(pool_dev.master)) as address:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        before = asyncio.all_tasks()
    assert await reader.read() == b""  # nobody waits for a request any more
    writer.close()
    assert not {task for task in before if "Pages" in repr(task) and not task.done()}


async def test_the_command_serves_them() -> None:
    command = [sys.executable, "-m", "kvpool", "master", "--bind", "127.0.0.1:0", "--http"]
    refused = await asyncio.to_thread(
        subprocess.run, [*command, "nonsense"], capture_output=True, text=True, timeout=30
    )
    assert refused.returncode == 2
    assert "'nonsense': expected host:port" in refused.stderr
    running = await asyncio.create_subprocess_exec(
        *command, "127.0.0.1:0", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert running.stdout is not None
        line = ""
        while "http://" not in line:
            line = (await asyncio.wait_for(running.stdout.readline(), 30)).decode()
            assert line, "it ended"
        address = line.strip().rpartition("http://")[2]
        assert (await figures(address))["kvpool_master_blocks"] == 0
    finally:
        running.kill()
        await running.wait()


async def test_others_have_their_turn_while_a_long_page_is_made() -> None:
    async with others() as turns:

        def steps() -> Iterator[bytes]:
            before = turns.count
            for number in range(50):
                yield b"%d\n" % number
                assert turns.count > before + number

        routes = {"/long": PageInSteps(steps, "text/plain")}
        served = await Pages(routes)._whole_page("/long?x=1", "localhost", "127.0.0.1")
    assert served.status is HTTPStatus.OK
    assert served.body.split() == [b"%d" % number for number in range(50)]


@pytest.mark.parametrize("servers", [499, 500, 501, 1200])
def test_a_metric_in_pieces_is_one_metric_with_every_sample(servers: int) -> None:
    samples = [([f"s{number}"], 1.0) for number in range(servers)]
    pieces = list(metrics._text_of(metrics._family("server", Figure("up", "if it runs"), samples)))
    assert max(piece.count(b"{") for piece in pieces) <= metrics._SAMPLES
    text = b"".join(pieces).decode()
    (family,) = parsed(text)
    assert len({sample.labels["server"] for sample in family.samples}) == servers
    assert text.count("# HELP") == text.count("# TYPE") == 1
