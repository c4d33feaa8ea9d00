"""What a client of a tenant on the server's own host can map, or be sent: nothing of others."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvpool import ClientConfig, ConfigError, Namespace, ServerConfig, WriteStatus
from kvpool.client.pool import Pool
from kvpool.errors import PeerError
from kvpool.net.control_network import TcpNetwork
from kvpool.wire import auth
from kvpool_transports.shm import ShmTransport
from kvpool_transports.tcp import TcpTransport
from tests.conftest import buffers, keys
from tests.support import messages as wire
from tests.support.raw_peers import frame, payload, raw
from tests.support.servers import small_server
from tests.support.tenant_pool import (
    MODEL,
    OPERATOR,
    TenantPool,
    key_file,
    reserve,
    tenant,
    tenant_pool,
)
from tests.transports.test_shm import Collected

CHAIN = keys("shared memory", 4)
SECRET_BYTES = b"what only acme may see " * 100
FOREIGN = [bytearray(SECRET_BYTES) for _ in CHAIN]


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[TenantPool]:
    async with tenant_pool(tmp_path) as pool:
        async with await pool.client(tenant("acme")) as acme:
            assert await acme.write(MODEL, CHAIN, FOREIGN) == [WriteStatus.STORED] * 4
        yield pool


@pytest.mark.parametrize("writer", [False, True], ids=["reader", "writer"])
@pytest.mark.parametrize("claims", ["blue", "acme", "", "nobody"])
async def test_a_hostile_client_on_the_same_host_is_passed_no_memory(
    pool: TenantPool, claims: str, writer: bool
) -> None:
    """It speaks over shm, knows blue's secret, claims what it likes, and goes on in any case."""
    knows = tenant("blue")._replace(tenant=claims)
    nonce, challenge = bytes(range(32)), bytes(32)
    async with raw(pool, "shm") as peer:  # type: ignore[arg-type]
        key = auth.key_id(knows, nonce) if claims else b""
        hello = wire.Hello("default", "raw", nonce, writer, claims, key)
        with contextlib.suppress(PeerError):
            challenge = (await peer.ask(hello, wire.Challenge)).nonce
        got = Collected(peer)
        await peer.send(frame(wire.Proof(auth.client_proof(knows, nonce, challenge))))
        await peer.send(frame(wire.Read("@acme/llama", 1, 32, CHAIN[0], 0, [1 << 20])))
        await got.until(None)
        assert got.fds == []
        assert b"acme may see" not in got.data


async def test_a_tenants_client_takes_tcp_where_an_operators_maps_memory(pool: TenantPool) -> None:
    settings = {"transports": ["inproc", "shm", "ucx", "tcp"]}
    async with await pool.client(tenant("acme"), **settings) as acme:
        got = buffers(4, len(SECRET_BYTES))
        assert all(one.status.hit for one in await acme.read(MODEL, CHAIN, got))
        assert got == FOREIGN
        async with acme.read_view(MODEL, CHAIN) as views:
            assert not any(one.status.hit for one in views)
        transports = {one.peer.transport for one in pool.server._context.clients.connections}
        assert transports == {"tcp"}
        assert not acme.counters["failed_shm"]
    async with await pool.client(OPERATOR, **settings) as operator:
        await operator.read(Namespace("@acme/llama"), CHAIN, buffers(4, len(SECRET_BYTES)))
        transports = {one.peer.transport for one in pool.server._context.clients.connections}
        assert "shm" in transports


async def test_where_nothing_serves_tenants_it_is_a_sentence(pool: TenantPool) -> None:
    with pytest.raises(ConfigError, match="a tenant's client needs tcp, got shm"):
        await pool.client(tenant("blue"), transports=["shm"])


SCAN = """
import asyncio, os, sys
import kvpool
from kvpool import read_cluster

async def main():
    cluster = read_cluster("default", sys.argv[2])
    async with await kvpool.connect(sys.argv[1], cluster=cluster) as pool:
        chain = [bytes([i]) * 32 for i in range(4)]
        namespace = kvpool.Namespace("llama")
        print(*{s.name for s in await pool.write(namespace, chain, [bytearray(5000)] * 4)})
        await pool.read(namespace, chain, [bytearray(5000) for _ in chain])
        held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                if os.path.islink(f"/proc/self/fd/{fd}")]
        maps = [line.split() for line in open("/proc/self/maps")]
        # Other than of files that libraries map, such as gconv-modules.cache.
        shared = [one for one in maps if one[1].endswith("s") and "/usr/" not in one[-1]]
        print("memfds", sum("memfd" in one for one in held), "shared", shared)

asyncio.run(main())
"""


async def test_a_process_of_a_tenant_has_no_shared_mapping(
    pool: TenantPool, tmp_path: Path
) -> None:
    """Of a whole client with default settings on the server's host: no descriptor of a segment,
    and no memory that it shares with another process."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SCAN, pool.master.address, str(key_file(tmp_path, "blue"))),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert out.decode().splitlines() == ["STORED", "memfds 0 shared []"]


async def test_memory_is_reused_only_with_every_byte_overwritten(pool: TenantPool) -> None:
    """A writer gets memory in which others' bytes still are. It must not be able to seal it before
    it has overwritten all of them, and then read it."""
    async with await pool.client(tenant("acme")) as acme:
        await acme.remove(MODEL, CHAIN)
    size = len(SECRET_BYTES)
    for sent in (b"", payload(1), payload(size - 1)):
        async with pool.raw(tenant("blue")) as peer:
            granted = await peer.ask(reserve("@blue/x", CHAIN[0], size), wire.Reserved)
            assert granted.offsets == []
            await peer.send(sent + frame(wire.Seal(granted.ids, [0], False, 0.5)))
            assert await peer.refusal() in ("BadMessage", "BadFrame")
        async with pool.raw(tenant("blue")) as peer:
            read = wire.Read("@blue/x", 1, 32, CHAIN[0], 0, [1 << 20])
            assert (await peer.ask(read, wire.Data)).sizes == []


# --- ucx ------------------------------------------------------------------------------------


async def test_a_transport_that_asks_nobody_is_refused_beside_tenants(pool: TenantPool) -> None:
    transport = TcpTransport()
    transport.authenticated = False  # type: ignore[misc]
    network = TcpNetwork(OPERATOR)
    for insecure in (False, True):
        listen = ["tcp://127.0.0.1:0"]
        config = ServerConfig("t", masters=[pool.master.address], listen=listen, insecure=insecure)
        keys_of = pool.of_server.keys
        server = small_server(config, OPERATOR, network, {"tcp": transport}, tenants=keys_of)
        if insecure:
            await server.start()
        else:
            with pytest.raises(ConfigError, match="tenants would reach each other's blocks"):
                await server.start()
        await server.close()
    network.close()


async def test_ucx_refuses_tenants_also_with_a_good_proof(tmp_path: Path) -> None:
    pytest.importorskip("ucxx")
    from kvpool_transports.ucx import UcxTransport

    transports = {"tcp": TcpTransport(), "ucx": UcxTransport()}
    listen = ["ucx://127.0.0.1:0", "tcp://127.0.0.1:0"]
    async with tenant_pool(tmp_path, transports, listen=listen, insecure=True) as pool:
        cluster, nonce = tenant("blue"), bytes(32)
        key = auth.key_id(cluster, nonce)
        async with raw(pool, "ucx") as peer:  # type: ignore[arg-type]
            await peer.send(frame(wire.Hello("default", "raw", nonce, False, "blue", key)))
            assert await peer.refusal() == "Forbidden"


async def test_a_pool_of_this_process_is_no_way_round(pool: TenantPool) -> None:
    """Neither with transports that were passed by hand."""
    config = ClientConfig(masters=[pool.master.address])
    with pytest.raises(ConfigError, match="needs tcp"):
        Pool(
            config,
            cluster=tenant("blue"),
            network=TcpNetwork(tenant("blue")),
            transports={"shm": ShmTransport()},
        )
