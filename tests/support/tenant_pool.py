"""A pool with two tenants, `acme` and `blue`, and hostile clients of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from kvpool import ClientConfig, Cluster, ServerConfig, connect
from kvpool.client.pool import Pool
from kvpool.config import MasterConfig
from kvpool.master.service import Master
from kvpool.net.control_network import TcpNetwork
from kvpool.net.masters_certificate import masters_fingerprint
from kvpool.net.tenants_file import TenantsFile
from kvpool.protocols import Link, Transport
from kvpool.secret_file import TenantKey
from kvpool.server.block_server import BlockServer
from kvpool.server.tenancy import Tenancy
from kvpool.types import Namespace
from kvpool.wire import auth
from kvpool_transports.shm import ShmTransport
from kvpool_transports.tcp import TcpTransport
from tests.support import messages as wire
from tests.support.raw_peers import Raw, frame, raw
from tests.support.servers import small_server

OPERATOR = Cluster("default", b"0123456789abcdef-cluster")
SECRETS = {"acme": b"0123456789abcdef-acme", "blue": b"0123456789abcdef-blue"}
MODEL = Namespace("llama")
#: The same as a tenant's servers and masters know it.
OF_ACME = Namespace("@acme/llama")


def tenant(name: str, secret: bytes | None = None) -> Cluster:
    """What a client of this tenant has in its key file."""
    return Cluster("default", secret or SECRETS[name], name, masters_fingerprint(OPERATOR))


def key_file(folder: Path, name: str) -> Path:
    """What `kvpool tenant-key` writes for this tenant."""
    own, path = tenant(name), folder / f"{name}.key"
    key = TenantKey(2, own.name, own.tenant, own.fingerprint, own.secret)
    path.write_bytes(msgspec.json.encode(key))
    return path


def reserve(name: str, digest: bytes, size: int = 64, wait_s: float = 1.0) -> wire.Reserve:
    """Space for the first block of a chain."""
    return wire.Reserve(name, 1, 32, digest, 0, bytes(32), [size], wait_s)


class TenantPool:
    """One master and one server, which read the same tenants file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "tenants.yaml"
        for name, secret in SECRETS.items():
            (folder / f"{name}.secret").write_bytes(secret)
        self.write_tenants()

    def write_tenants(
        self, *, only: str = "", files: Mapping[str, object] | None = None, **more: Any
    ) -> None:
        entries = [
            {"name": name, "secret_file": (files or {}).get(name, f"{name}.secret"), **more}
            for name in SECRETS
            if only in ("", name)
        ]
        self.path.write_text(yaml.safe_dump({"tenants": entries}))

    async def read_again(self) -> list[bool]:
        """Whether the master and the server use another version of the file now."""
        return [await self.of_master.look(), await self.of_server.look()]

    async def start(self, transports: Mapping[str, Transport], **settings: Any) -> None:
        self.of_master, self.of_server = (
            TenantsFile(str(self.path), OPERATOR),
            TenantsFile(str(self.path), OPERATOR),
        )
        self.networks = [TcpNetwork(OPERATOR, self.of_master.keys), TcpNetwork(OPERATOR)]
        self.master = Master(MasterConfig(bind="127.0.0.1:0"), self.networks[0])
        await self.master.start()
        self.servers: list[BlockServer] = []
        await self.start_server("s", transports, **settings)

    async def start_server(
        self, id: str, transports: Mapping[str, Transport], **settings: Any
    ) -> BlockServer:
        settings = {"heartbeat_s": 0.1, **settings}
        config = ServerConfig(id=id, masters=[self.master.address], **settings)
        network, keys = self.networks[1], self.of_server.keys
        server = small_server(config, OPERATOR, network, transports, tenants=keys, capacity=4 << 20)
        self.servers.append(server)
        self.of_server.on_change(Tenancy.of(server).tenants_changed)
        await server.start()
        await server.wait_until_registered(asyncio.get_running_loop().time() + 10)
        return server

    async def close(self) -> None:
        for server in self.servers:
            await server.close()
        await self.master.close()
        for network in self.networks:
            network.close()

    @property
    def server(self) -> BlockServer:
        """The first one."""
        return self.servers[0]

    async def client(self, cluster: Cluster, **settings: Any) -> Pool:
        config = ClientConfig(masters=[self.master.address], **settings)
        return await connect(config=config, cluster=cluster)

    @contextlib.contextmanager
    def link(self, cluster: Cluster) -> Iterator[Link]:
        """To the master, for any message."""
        network = TcpNetwork(cluster)
        try:
            yield network.connect(self.master.address)
        finally:
            network.close()

    @contextlib.asynccontextmanager
    async def raw(self, cluster: Cluster, scheme: str = "tcp") -> AsyncIterator[Raw]:
        """A hostile client that has proved its secret, and may now send anything."""
        async with raw(self, scheme) as peer:  # type: ignore[arg-type]
            await prove(peer, cluster)
            yield peer


async def prove(peer: Raw, cluster: Cluster, *, writer: bool = False) -> wire.Welcome:
    """The handshake."""
    nonce = bytes(range(32))
    key = auth.key_id(cluster, nonce) if cluster.tenant else b""
    hello = wire.Hello(cluster.name, "raw", nonce, writer, cluster.tenant, key)
    challenge = await peer.ask(hello, wire.Challenge)
    await peer.send(frame(wire.Proof(auth.client_proof(cluster, nonce, challenge.nonce))))
    return await peer.ask(None, wire.Welcome)


@contextlib.asynccontextmanager
async def tenant_pool(
    folder: Path, transports: Mapping[str, Transport] | None = None, **settings: Any
) -> AsyncIterator[TenantPool]:
    pool = TenantPool(folder)
    await pool.start(transports or {"shm": ShmTransport(), "tcp": TcpTransport()}, **settings)
    try:
        yield pool
    finally:
        await pool.close()
