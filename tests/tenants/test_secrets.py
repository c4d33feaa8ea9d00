"""Secrets of tenants: read from files, rotated and revoked while the pool runs."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvpool import ConfigError, MasterLost, WriteStatus, connect, read_cluster, read_secret
from kvpool.cli.run import _tenants_of
from kvpool.config import Config
from kvpool.errors import Forbidden, LinkBroken, Unauthenticated
from kvpool.net.control_network import TcpNetwork
from kvpool.net.tenants_file import TenantsFile
from kvpool.supervision import Supervisor
from kvpool.types import Cluster
from kvpool.wire import auth
from tests.conftest import eventually, keys, values
from tests.support import messages as wire
from tests.support import raw_peers
from tests.support.commands import running_kvpool
from tests.support.programs import pool_of_commands
from tests.support.raw_peers import ask, frame, raw
from tests.support.tenant_pool import MODEL, OPERATOR, SECRETS, TenantPool, tenant, tenant_pool

CHAIN = keys("secrets", 2)
NEW = b"0123456789abcdef-acme-new"


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[TenantPool]:
    async with tenant_pool(tmp_path) as pool:
        yield pool


async def works(pool: TenantPool, cluster: Cluster) -> bool:
    """On both planes."""
    try:
        async with await pool.client(cluster, timeout_s=0.5) as client:
            (status,) = await client.write(MODEL, CHAIN[:1], values(CHAIN[:1]))
            return status.present
    except MasterLost:
        return False


# --- rotation and revocation ----------------------------------------------------------------


async def test_two_secrets_are_good_while_one_replaces_the_other(pool: TenantPool) -> None:
    old, new = tenant("acme"), tenant("acme", NEW)
    (pool.folder / "acme.new").write_bytes(NEW)
    assert (await works(pool, old), await works(pool, new)) == (True, False)
    pool.write_tenants(files={"acme": ["acme.secret", "acme.new"]})
    assert await pool.read_again() == [True, True]
    assert (await works(pool, old), await works(pool, new)) == (True, True)
    pool.write_tenants(files={"acme": "acme.new"})
    assert await pool.read_again() == [True, True]
    assert (await works(pool, old), await works(pool, new)) == (False, True)
    assert await works(pool, tenant("blue"))


async def test_connections_of_a_revoked_secret_end_and_no_others(
    pool: TenantPool, caplog: pytest.LogCaptureFixture
) -> None:
    (pool.folder / "acme.new").write_bytes(NEW)
    pool.write_tenants(files={"acme": ["acme.secret", "acme.new"]})
    await pool.read_again()
    async with AsyncExitStack() as stack:
        old, new, other = [
            await stack.enter_async_context(pool.raw(cluster))
            for cluster in (tenant("acme"), tenant("acme", NEW), tenant("blue"))
        ]
        operator = await stack.enter_async_context(pool.raw(OPERATOR))
        link = stack.enter_context(pool.link(tenant("acme")))
        await ask(link, wire.Members(), wire.MembersReply)
        with pytest.raises(Forbidden):  # the master knows whose link it is
            await ask(link, wire.Explain("@blue/x", 1, 32, CHAIN[0]), wire.Explained)
        caplog.clear()
        pool.write_tenants(files={"acme": "acme.new"})
        await pool.read_again()
        await old.refusal()  # it has ended, before it said one more word
        assert pool.server.stats(0.0).counters["revoked_connections"] == 1
        # The connection to the master is open, and good for nothing.
        for _ in range(3):
            with pytest.raises(Unauthenticated, match="not valid any more"):
                await ask(link, wire.Members(), wire.MembersReply)
        said = [one.message for one in caplog.records if "control plane" in one.message]
        assert len(said) == 1
        assert "its secret is not valid any more" in said[0]
        for peer, name in ((new, "@acme/x"), (other, "@blue/x"), (operator, "x")):
            read = wire.Read(name, 1, 32, CHAIN[0], 0, [64])
            assert list((await peer.ask(read, wire.Data)).sizes) == []


@pytest.mark.parametrize("proof", ["of a revoked secret", "of the server"])
async def test_a_proof_that_is_none_is_refused(pool: TenantPool, proof: str) -> None:
    """Its secret is revoked while it is under way; or it is the server's own, sent back."""
    acme, nonce = tenant("acme"), bytes(32)
    async with raw(pool) as peer:  # type: ignore[arg-type]
        hello = wire.Hello("default", "raw", nonce, False, "acme", auth.key_id(acme, nonce))
        challenge = await peer.ask(hello, wire.Challenge)
        sent = challenge.proof
        assert sent == auth.server_proof(acme, nonce, challenge.nonce)
        if proof == "of a revoked secret":
            pool.write_tenants(only="blue")
            await pool.read_again()
            sent = auth.client_proof(acme, nonce, challenge.nonce)
        await peer.send(frame(wire.Proof(sent)))
        assert await peer.refusal() == "Unauthenticated"


# --- the file -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tenants: [", "no YAML that can be read: line 2, column 1$"),
        ("tenants: []\nsecret: {of: [sesame", "line 3, column 1$"),
        ("tenants: " + "[" * 40 + "]" * 40, "deeper or longer than any settings are"),
        ("tenants: [" + "a: b," * 9000 + "]", "deeper or longer than any settings are"),
        ("tenants: " + "9:" * 3000 + "9", "a value of more than 4096 characters"),
        ("", "got nothing, expected one list"),
        ("root:x:secret", "tenants.yaml: got str, expected one list"),
        ("tenants:\n- {name: acme, secret_file: acme.secret, gold: 1}", "unknown setting 'gold'"),
        ("tenants:\n- {name: acme, secret_file: nowhere}", "'acme': secret file .*No such file"),
        ("tenants:\n- {name: acme, secret_file: acme.secret}\n" * 2, "'tenants' stands twice"),
        (
            "tenants:\n- {name: acme, secret_file: acme.secret}\n"
            "- {name: blue, secret_file: acme.secret}",
            "'blue': the secret in acme.secret is that of tenant 'acme', too",
        ),
        ("tenants:\n- {name: acme, secret_file: cluster}", "is that of the cluster, expected"),
        ("tenants:\n- {name: acme, secret_file: short}", "holds 5 bytes"),
        ("tenants:\n- {name: acme, secret_file: acme.secret, limit: 1GB}", "unit 'GB'"),
        ("tenants:\n- {name: acme, secret_file: acme.secret}", "its last line .* cut off$"),
        (None, "No such file"),
    ],
)
async def test_a_bad_file_is_refused_and_the_one_before_stays(
    pool: TenantPool, text: str | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    (pool.folder / "short").write_bytes(b"short")
    (pool.folder / "cluster").write_bytes(OPERATOR.secret)
    if text is None:
        pool.path.unlink()
    else:
        pool.path.write_text(text + "\n" * ("cut off" not in why))
    with pytest.raises(ConfigError, match=why) as raised:
        TenantsFile(str(pool.path), OPERATOR)
    assert str(pool.path) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert b"0123456789abcdef" not in str(raised.value).encode()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):  # each look of a second
            assert await pool.of_server.look() is False
    (line,) = [one for one in caplog.records if "the one before stays" in one.message]
    assert line.levelname == "WARNING"
    assert await works(pool, tenant("acme"))
    assert await works(pool, tenant("blue"))
    pool.write_tenants(only="blue")
    assert await pool.read_again() == [True, True]
    assert not await works(pool, tenant("acme"))


async def test_a_file_that_is_cut_off_in_a_line_says_nothing_else(pool: TenantPool) -> None:
    """As by a full disk, or read while it is written: `limit: 6` is right, too."""
    pool.write_tenants(limit="60%", rate="500MiB")
    whole = pool.path.read_text()
    assert await pool.read_again() == [True, True]
    for end in range(len(whole)):
        pool.path.write_text(whole[:end])
        if await pool.of_server.look():
            assert whole[:end].endswith("\n")
            assert {one.rate for one in pool.of_server.tenants.values()} <= {500 << 20, 0}
            assert {str(one.limit) for one in pool.of_server.tenants.values()} <= {"60%", "100%"}


async def test_a_secret_that_is_replaced_or_comes_late_is_noticed(pool: TenantPool) -> None:
    (pool.folder / "acme.secret").write_bytes(NEW)
    assert await pool.read_again() == [True, True]
    assert await works(pool, tenant("acme", NEW))
    assert not await works(pool, tenant("acme"))
    assert await pool.read_again() == [False, False]
    pool.write_tenants(files={"acme": "late"})
    assert await pool.read_again() == [False, False]
    (pool.folder / "late").write_bytes(SECRETS["acme"])
    assert await pool.read_again() == [True, True]
    assert await works(pool, tenant("acme"))


async def test_a_change_is_noticed_within_a_second_and_at_once_on_sighup(
    pool: TenantPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, then, real = list[set[str]](), list[object](), signal.signal
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert _tenants_of(Config(tenants_file=str(pool.path)))
    pool.of_server.on_change(lambda tenants: seen.append(set(tenants)))
    async with pool.of_server.watched(Supervisor()):
        pool.write_tenants(only="blue")
        await eventually(lambda: seen[-1] == {"blue"}, 3.0)
        await asyncio.sleep(0.05)
        pool.write_tenants()
        began = time.monotonic()
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(lambda: seen[-1] == {"acme", "blue"}, 3.0)
        assert time.monotonic() - began < 0.7
        # A file of the same size and time is read again when it is asked for.
        count = len(seen)
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(lambda: len(seen) > count, 0.7)
        monkeypatch.setattr(signal, "signal", lambda one, to: (then.append(to), real(one, to))[1])
    assert then == [signal.SIG_IGN], "not for a moment anything else"
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("step", ["_read", "use"])
async def test_a_change_that_fails_half_way_is_made_with_the_next_look(
    step: str, pool: TenantPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a secret that was revoked would stay valid for whoever was to hear of it later."""
    file = pool.of_master
    seen: list[set[str]] = []

    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    pool.write_tenants(only="blue")
    with monkeypatch.context() as patch:
        if step == "_read":
            patch.setattr(file, "_read", fail)
        else:
            patch.setattr(file, "_on_change", [fail])
        with pytest.raises(RuntimeError):
            await file.look()
    file.on_change(lambda tenants: seen.append(set(tenants)))
    assert await file.look()
    assert len(seen) == 2
    assert seen[-1] == {"blue"}
    assert not await file.look()


async def test_the_loop_is_not_held_up_by_many_tenants(tmp_path: Path) -> None:
    """Reading 300 tenants with two secrets takes a while; it must not be the loop's."""
    lines = ["tenants:"]
    for number in range(300):
        for which in ("old", "new"):
            (tmp_path / f"{number}.{which}").write_text(f"0123456789abcdef-{number}-{which}")
        files = f"[{number}.old, {number}.new]"
        lines.append(f"- {{name: t{number}, secret_file: {files}, guaranteed: 0.3%}}")
    path = tmp_path / "tenants.yaml"
    path.write_text("\n".join([*lines, ""]))
    loaded = TenantsFile(str(path), OPERATOR)
    slowest = 0.0
    reading = asyncio.create_task(loaded.look(asked=True))
    while not reading.done():
        began = time.thread_time()
        await asyncio.sleep(0)
        slowest = max(slowest, time.thread_time() - began)
    assert reading.result()
    assert slowest < 0.005


async def test_without_a_secret_of_the_cluster_there_are_no_tenants(pool: TenantPool) -> None:
    with pytest.raises(ConfigError, match="tenants need a cluster with a secret"):
        TcpNetwork(Cluster(), pool.of_master.keys)


# --- key files, and the commands ------------------------------------------------------------


async def test_the_commands_of_a_pool_with_tenants(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef-cluster")
    secret = ("--secret-file", str(tmp_path / "secret"))
    for name in ("acme", "blue"):
        files = ("--tenant-secret", str(tmp_path / f"{name}.secret"))
        out = ("--out", str(tmp_path / f"{name}.key"))
        code, said, why = await running_kvpool("tenant-key", name, *files, *out, *secret)
        assert code == 0, why
        assert f"secret of tenant {name}" in said
        assert (tmp_path / f"{name}.key").stat().st_mode & 0o777 == 0o600
        assert (tmp_path / f"{name}.secret").stat().st_mode & 0o777 == 0o600
    code, _, why = await running_kvpool("tenant-key", "acme", *files, *out, *secret)
    assert (code, "is there already" in why) == (2, True)
    (tmp_path / "tenants.yaml").write_text(
        "tenants:\n- {name: acme, secret_file: acme.secret}\n"
        "- {name: blue, secret_file: blue.secret}\n"
    )
    tenants = ("--tenants", str(tmp_path / "tenants.yaml"))
    acme = ("--secret-file", str(tmp_path / "acme.key"))
    for which in ("master", "server"):
        code, _, why = await running_kvpool(which, *acme)
        assert (code, f"a tenant's key makes no {which}" in why) == (2, True), why
        code, _, why = await running_kvpool(which, *tenants)
        assert (code, "set 'secret_file'" in why) == (2, True), why
    async with pool_of_commands(*secret, *tenants) as address:
        master = ("--masters", address)
        cluster = read_cluster("default", acme[1])
        async with await connect(address, cluster=cluster) as pool:
            assert await pool.write(MODEL, CHAIN, values(CHAIN)) == [WriteStatus.STORED] * 2
        code, said, _ = await running_kvpool(
            "explain", CHAIN[0].hex(), "--namespace", "llama", *master, *acme
        )
        assert "dram" in said
        await asyncio.sleep(1.5)  # servers report with their heartbeats
        code, said, _ = await running_kvpool("status", *master, *secret)
        assert code == 0
        (title, *rows) = said[said.index("evicted by") - 80 :].splitlines()[-4:]
        assert any(row.startswith("acme") for row in (title, *rows)), said
        code, said, _ = await running_kvpool("status", *master, *acme)
        assert code == 0, said


def test_a_key_file_is_no_secret_and_is_never_printed(tmp_path: Path) -> None:
    import msgspec

    from kvpool.secret_file import TenantKey

    cluster = tenant("acme")
    key = TenantKey(2, "bank", "acme", cluster.fingerprint, SECRETS["acme"])
    path = tmp_path / "acme.key"
    path.write_bytes(msgspec.json.encode(key))
    read = read_cluster("bank", str(path))
    assert (read.name, read.tenant, read.secret) == ("bank", "acme", SECRETS["acme"])
    assert read_cluster("default", str(path)) == read
    assert "0123456789" not in f"{read!r}{read}"
    assert "'acme'" in repr(read)
    with pytest.raises(ConfigError, match="is the key of a tenant, expected a secret"):
        read_secret(str(path))
    with pytest.raises(ConfigError, match="is for cluster 'bank', expected 'other'"):
        read_cluster("other", str(path))
    for damaged in (
        {"kvpool_tenant_key": 3},
        {"tenant": "A"},
        {"fingerprint": b"short"},
        {"secret": b"short"},
    ):
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(key, **damaged)))
        with pytest.raises(ConfigError):
            read_cluster("bank", str(path))
    for former in (b"", b',"cluster":"bank","tenant":"acme","masters_key":"x","secret":"eA=="'):
        path.write_bytes(b'{"kvpool_tenant_key":1' + former + b"}")
        with pytest.raises(ConfigError, match=r"another release: make it anew with `kvpool tenant"):
            read_cluster("bank", str(path))


async def test_a_client_of_a_tenant_is_no_client_of_a_pool_without(tmp_path: Path) -> None:
    """A server that does not ask for the tenant's secret is not the pool that it takes it for."""
    from kvpool_transports.tcp import TcpTransport
    from tests.net.test_secret import pool_of

    for cluster in (OPERATOR, Cluster()):
        async with pool_of(cluster) as running:
            address = next(a for a in running.servers[0].addresses if a.startswith("tcp"))
            with pytest.raises((Unauthenticated, LinkBroken)):
                await raw_peers.connect(TcpTransport(), address, tenant("acme"), within_s=2)
