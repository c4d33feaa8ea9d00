"""Nothing that reaches a tenant names another one: no reply, error, page or log line.

`zebra` has everything that has a name: namespaces, sessions, programs, clients, keys. `blue` asks
for all that can be asked for, and the names of `zebra` are looked for in all that comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from typer.testing import CliRunner

from kvpool import WriteStatus, admin
from kvpool.cli import log_lines
from kvpool.cli.app import app
from kvpool.client.pool import Pool
from kvpool.errors import BadMessage, InvariantViolated, KvpoolError
from kvpool.ops.client_metrics import PoolMetrics
from kvpool.types import Namespace, ServerStats
from kvpool.wire.access import TENANT_MAY, Access, names_of
from kvpool_transports.tcp import TcpTransport
from tests.conftest import buffers, eventually, keys, values
from tests.support import messages as wire
from tests.support import tenant_pool as tenants
from tests.support.moves import moves_of
from tests.support.raw_peers import Raw, ask, frame
from tests.support.tenant_pool import TenantPool, tenant, tenant_pool

THEIRS = keys("of the zebra", 4)
OWN = keys("of blue", 4)
#: Users of both call it so.
MODEL = Namespace("llama")
#: Every name of the tenant's, as the pool knows it, has the tenant's in it.
ZEBRA = b"zebra"
KEYS = [form for key in THEIRS for form in (key, key.hex()[:12].encode(), repr(key)[2:-1].encode())]
TOKEN = bytes(16)


def named_in(what: object) -> list[bytes]:
    """What names `zebra` in these bytes, or in this as a text."""
    found = what if isinstance(what, bytes) else repr(what).encode()
    return [one for one in (ZEBRA, *KEYS) if one in found]


@pytest.fixture
async def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TenantPool]:
    """Two servers, with blocks of `zebra` in several states."""
    secrets = {"zebra": b"0123456789abcdef-zebra", "blue": tenants.SECRETS["blue"]}
    monkeypatch.setattr(tenants, "SECRETS", secrets)
    tcp = {"listen": ["tcp://127.0.0.1:0"]}
    async with tenant_pool(tmp_path, {"tcp": TcpTransport()}, **tcp) as pool:
        await pool.start_server("second", {"tcp": TcpTransport()}, **tcp)
        async with await pool.client(tenant("zebra")) as zebra:
            statuses = await zebra.write(MODEL, THEIRS, values(THEIRS), session="chat")
            assert statuses == [WriteStatus.STORED] * 4
            await zebra.write(Namespace("llama", 2), THEIRS[:1], values(THEIRS[:1]), part=0)
            await zebra.session("chat").hint(resume_in=5)
            await zebra.read(MODEL, THEIRS, buffers(4), match=await zebra.match(MODEL, THEIRS))
            await zebra.remove(MODEL, THEIRS[3:])
            yield pool


def keys_of(namespace: str, digests: list[bytes], parts: int = 1) -> dict[str, Any]:
    return {"namespace": namespace, "parts": parts, "digest_size": 32, "digests": b"".join(digests)}


def messages() -> list[wire.Message]:
    """Every message that is a request, about names of its own, of others, and of nobody."""
    questions: list[wire.Message] = [
        wire.Seal([1, 2, 3], [0, 0, 0], True, 0.1),
        wire.Unpin(),
        wire.RemoveAll("@blue/llama", 1, (0, 0, 0, 0, 0)),
        wire.RemoveAll("@zebra/llama", 1, (0, 0, 0, 0, 0)),
        wire.Drain(),
        wire.Drain(begin=True, within_s=1.0),
        wire.Register("s", 7, TOKEN, "host", ["tcp://127.0.0.1:1"], ["dram"], 1 << 20),
        wire.Heartbeat("s", 7, TOKEN, ServerStats()),
        wire.Leave("s", 7, TOKEN),
        wire.Announce("s", 7, TOKEN, 1, []),
        wire.Inventory("s", 7, TOKEN, 1, 0, True, []),
        wire.Members(),
        wire.Members("s"),
        wire.Namespaces(),
        wire.Namespaces("@z", 1),
        wire.Demands(),
        wire.Changes(1, 0),
        wire.Snapshot(),
        wire.SendToken(bytes(8)),
    ]
    for session in ("@blue/chat", "@zebra/chat", "chat"):
        questions += [wire.Hint(session, 1.0), wire.ExplainSession(session)]
    for name in ("@blue/llama", "@blue/nothing", "@zebra/llama"):
        for digests in (OWN, THEIRS):
            for parts in (1, 2):
                questions += about(keys_of(name, digests, parts), len(digests))
    return questions


def about(keys: dict[str, Any], count: int) -> list[wire.Message]:
    parents, sizes, sums = bytes(32 * count), [64] * count, [0] * count
    parent = keys["digests"][:32]
    return [
        wire.Reserve(**keys, part=0, parents=parents, sizes=sizes, wait_s=0.1),
        wire.Reserve(**keys, part=0, parents=parents, sizes=sizes, checksums=sums, visible=True,
                     wait_s=0.1),
        wire.Read(**keys, part=0, buffer_sizes=[1 << 20] * count),
        wire.Remove(**keys),
        wire.Remove(**keys, part=0, checksums=sums),
        wire.Remove(**keys, part=0, corrupt=True),
        wire.Propose(**keys, part=0, receiver="second"),
        wire.Fetch(**keys, part=0, source="second", wait_s=0.1),
        wire.Prefetch(**keys, part=0),
        wire.Find(**keys, prefix=False),
        wire.Find(**keys, prefix=True, session="@blue/chat"),
        wire.Find(**keys, prefix=True, before=bytes(8)),
        wire.Place(**keys, parent=parent, size=64, host="h", copies=2),
        wire.Explain(**keys),
    ]  # fmt: skip


def test_every_request_is_sent() -> None:
    """And what names somebody, about `zebra`, too."""
    asked = {type(message).__name__ for message in messages()}
    assert asked == {name for name, may in TENANT_MAY.items() if may is not Access.NO_REQUEST}
    about = [one for one in messages() if any(name[1:6] == "zebra" for name in names_of(one))]
    own = {name for name, may in TENANT_MAY.items() if may is Access.OWN}
    assert {type(one).__name__ for one in about} >= own


async def test_no_reply_of_a_master_names_others(pool: TenantPool) -> None:
    with pool.link(tenant("blue")) as link:
        for message in messages():
            deadline = asyncio.get_running_loop().time() + 2
            _, body = await link.request(*wire.encode(message), deadline=deadline)
            assert not named_in(body), message


async def everything(peer: Raw) -> bytes:
    """What a server sends until it ends the connection."""
    got = b""
    async with asyncio.timeout(5):
        with contextlib.suppress(ConnectionResetError):
            while more := await asyncio.get_running_loop().sock_recv(peer.socket, 1 << 16):
                got += more
    return got


async def test_no_answer_of_a_server_names_others(pool: TenantPool) -> None:
    async def exchange(message: wire.Message) -> bytes:
        async with pool.raw(tenant("blue")) as peer:
            payload = bytes(64 * 4) if getattr(message, "visible", False) else b""
            await peer.send(frame(message, payload) + frame(wire.Unpin(confirm=True)))
            # It ends the connection, whatever came before it.
            await peer.send(frame(wire.Drain()))
            return await everything(peer)

    for message in messages():
        assert not named_in(await exchange(message)), message
    async with await pool.client(tenants.OPERATOR) as operator:
        for server in ("s", "second"):  # neither takes blocks then
            await admin(operator).drain(server, within_s=0.2)
        await eventually(lambda: bool(named_in(moves_of(pool.server).drainer.report())))
    assert not named_in(await exchange(wire.Drain()))


async def test_no_call_of_a_client_names_others(
    pool: TenantPool, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does its log, nor do its metrics."""
    caplog.set_level(logging.DEBUG)
    registry = CollectorRegistry()
    async with await pool.client(tenant("blue")) as blue:
        registry.register(PoolMetrics(blue))
        for namespace in (MODEL, Namespace("llama", 2), Namespace("nothing")):
            for digests in (THEIRS, OWN):
                for call in calls(blue, namespace, digests):
                    try:
                        answer: object = await call()
                    except KvpoolError as error:
                        answer = str(error)
                    # Which keys it has asked about, it knows.
                    assert not set(named_in(answer)) - set(KEYS if digests is THEIRS else [])
        assert not named_in(generate_latest(registry))
    for_operators = {"kvpool.server", "kvpool.master", "kvpool.audit"}
    lines = [one.getMessage() for one in caplog.records if one.name not in for_operators]
    assert not named_in(lines)


COMMANDS = [
    ("status",),
    ("status", "--json"),
    ("usage", "--by", "namespace"),
    ("usage", "--by", "program", "--json"),
    ("explain", OWN[0].hex(), THEIRS[0].hex(), "--namespace", "nothing"),
    ("explain", "--session", "chat"),
    ("doctor",),
    ("remove", "--model", "llama"),
    ("spread", OWN[0].hex(), "--namespace", "llama", "--to", "2"),
]


async def test_no_command_names_others(pool: TenantPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "configure", lambda level: None)  # the pool is in this process
    key = str(tenants.key_file(pool.folder, "blue"))
    options = ("--masters", pool.master.address, "--secret-file", key)
    for command in COMMANDS:
        done = await asyncio.to_thread(CliRunner().invoke, app, [*command, *options])
        assert done.exit_code in (0, 1), done.output
        shown = done.output.encode().replace(THEIRS[0].hex()[:12].encode(), b"")  # was asked about
        assert not named_in(shown), command
        assert "@blue/" not in done.output, command  # a tenant writes its names without it
        if command[0] in ("status", "usage") and "--json" not in command:
            check_figures(done.output)
    # A process of its own: a thread gets no signals.
    command = [sys.executable, "-m", "kvpool", "top", "--refreshes", "1", *options]
    top = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    code, out = top.returncode, top.stdout
    assert (code, named_in(out.encode())) == (0, [])
    check_figures(out)


def check_figures(shown: str) -> None:
    """None that it is not told."""
    assert "this key is a tenant's" in shown
    assert "0 B" not in shown


@pytest.mark.parametrize(
    "bug", [KeyError(ZEBRA), InvariantViolated("@zebra/llama"), OSError(ZEBRA)]
)
async def test_a_bug_names_nobody(pool: TenantPool, bug: Exception) -> None:
    """Its text has whatever the code had at hand: the peer is told that it is one."""

    def fails(*_: object) -> None:
        raise bug

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool.master.directory, "find", fails)
        patch.setattr(pool.server.store, "remove", fails)
        find = wire.Find(**keys_of("@blue/llama", OWN), prefix=False)
        with pool.link(tenant("blue")) as link, pytest.raises(BadMessage, match="a bug there"):
            await ask(link, find, wire.FindReply)
        async with pool.raw(tenant("blue")) as peer:
            await peer.send(frame(wire.Remove(**keys_of("@blue/llama", OWN))))
            assert not named_in(await everything(peer))


def calls(
    blue: Pool, namespace: Namespace, digests: list[bytes]
) -> list[Callable[[], Awaitable[object]]]:
    return [
        lambda: blue.write(namespace, digests, values(digests), part=0),
        lambda: blue.match(namespace, digests),
        lambda: blue.contains(namespace, digests),
        lambda: blue.where(namespace, digests),
        lambda: admin(blue).explain(namespace, digests),
        lambda: blue.read(namespace, digests, buffers(len(digests)), part=0),
        lambda: blue.prefetch(namespace, digests),
        lambda: admin(blue).spread(namespace, digests, to=2),
        lambda: blue.score(namespace, digests, ["h"]),
        lambda: blue.remove(namespace, digests),
        lambda: blue.members(),
        lambda: admin(blue).namespaces(),
        lambda: admin(blue).demand(),
        lambda: blue.session("chat").hint(resume_in=1),
        lambda: blue.session("chat").explain(),
        lambda: admin(blue).drain_report("s"),
        lambda: admin(blue).drain("s", within_s=1),
    ]
