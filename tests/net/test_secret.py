"""A cluster with a secret: who knows it gets through, on both planes; nobody else does."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvpool import Cluster, ServerConfig, dev, read_secret
from kvpool.config import MasterConfig
from kvpool.errors import ConfigError, Unauthenticated
from kvpool.master.service import Master
from kvpool.net.control_network import TcpNetwork
from kvpool.wire import auth
from kvpool_transports.shm import ShmTransport
from kvpool_transports.tcp import TcpTransport
from tests.conftest import eventually
from tests.support import messages as wire
from tests.support.commands import running_kvpool
from tests.support.programs import pool_of_commands
from tests.support.raw_peers import connect, frame, raw
from tests.support.servers import small_server

OURS = Cluster("default", b"0123456789abcdef-ours")
THEIRS = Cluster("default", b"0123456789abcdef-theirs")
STRANGERS = pytest.mark.parametrize("stranger", [THEIRS, Cluster()], ids=["another", "none"])


@asynccontextmanager
async def pool_of(cluster: Cluster) -> AsyncIterator[dev.Dev]:
    network = TcpNetwork(cluster)
    master = Master(MasterConfig(bind="127.0.0.1:0"), network)
    await master.start()
    transports = {"shm": ShmTransport(), "tcp": TcpTransport()}
    config = ServerConfig(id="s", masters=[master.address], heartbeat_s=0.1)
    server = small_server(config, cluster, network, transports)
    try:
        await server.start()
        await server.wait_until_registered(asyncio.get_running_loop().time() + 10)
        yield dev.Dev(master, [server], {})
    finally:
        await server.close()
        await master.close()
        network.close()


@pytest.mark.parametrize(
    ("cluster", "asks", "insecure", "may"),
    [
        (OURS, True, False, True),
        (OURS, False, False, False),  # such a transport lets everybody in
        (OURS, False, True, True),
        (Cluster(), True, False, False),
        (Cluster(), False, False, False),
        (Cluster(), True, True, True),
    ],
)
async def test_which_servers_may_be_reached_from_other_machines(
    cluster: Cluster, asks: bool, insecure: bool, may: bool
) -> None:
    transport = TcpTransport()
    transport.authenticated = asks  # type: ignore[misc]
    network = TcpNetwork(cluster)
    here = {"masters": ["127.0.0.1:9"], "listen": ["tcp://0.0.0.0:0"]}
    config = ServerConfig("s", insecure=insecure, **here)
    server = small_server(config, cluster, network, {"tcp": transport})
    try:
        if may:
            await server.start()
            assert server.addresses[0].startswith("tcp://")
        else:
            with pytest.raises(ConfigError, match="reachable from other machines"):
                await server.start()
            assert server.addresses == []
    finally:
        await server.close()
        network.close()


@STRANGERS
@pytest.mark.parametrize("transport", [ShmTransport, TcpTransport])
async def test_a_server_refuses_strangers(
    transport: type[ShmTransport] | type[TcpTransport], stranger: Cluster
) -> None:
    async with pool_of(OURS) as running:
        (server,) = running.servers
        (address,) = [a for a in server.addresses if a.startswith(transport.scheme)]
        with pytest.raises(Unauthenticated):
            await connect(transport(), address, stranger)
        await eventually(lambda: server.stats(0.0).counters["connections"] == 0)


async def test_a_proof_is_good_for_its_own_connection_only() -> None:
    """What was overheard opens nothing, nor does what the server itself has said."""
    hello = wire.Hello("default", "raw", bytes(32))
    async with pool_of(OURS) as running:
        async with raw(running) as peer:
            first = await peer.ask(hello, wire.Challenge)
            assert first.proof == auth.server_proof(OURS, hello.nonce, first.nonce)
            good = wire.Proof(auth.client_proof(OURS, hello.nonce, first.nonce))
            await peer.ask(good, wire.Welcome)
        for proof in (good, None):
            async with raw(running) as peer:
                challenge = await peer.ask(hello, wire.Challenge)
                await peer.send(frame(proof or wire.Proof(challenge.proof)))
                assert await peer.refusal() == "Unauthenticated"


async def test_a_server_that_only_claims_to_know_the_secret_gets_no_proof() -> None:
    """Who has taken over an address can send a challenge; the client must not go on with it."""
    heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4096)  # Hello
        writer.write(frame(wire.Challenge(bytes(32), bytes(32))))
        heard.set_result(await reader.read(4096))
        writer.close()

    async with await asyncio.start_server(impostor, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(Unauthenticated, match="the server does not know"):
            await connect(TcpTransport(), f"tcp://127.0.0.1:{port}", OURS)
        assert await heard == b""


# --- settings -------------------------------------------------------------------------------


def test_a_secret_is_never_printed() -> None:
    assert "0123456789" not in f"{OURS} {OURS!r} {[OURS]}"


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"short\n", "holds 5 bytes"), (b"x" * 5000, "expected 16 to"), (None, "No such file")],
)
def test_a_bad_secret_file_is_a_sentence(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as raised:
        read_secret(str(path))
    assert str(path) in str(raised.value)
    assert "short" not in str(raised.value)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_secret_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789abcdef")
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        read_secret(str(path))
    path.chmod(0o644)
    assert read_secret(str(path)) == b"0123456789abcdef"


def test_a_secret_that_all_may_read_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # pytest's own is private
        os.chmod(place, 0o755)
        path = Path(place) / "secret"
        path.write_text("0123456789abcdef")
        for mode, lines in ((0o600, 0), (0o644, 1), (0o644, 1)):
            path.chmod(mode)
            assert read_secret(str(path))
            assert caplog.text.count(f"chmod 600 {path}") == lines
    assert "every user of this host" in caplog.text


def test_white_space_round_a_secret_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"  0123456789abcdef\r\n")
    assert read_secret(str(tmp_path / "secret")) == b"0123456789abcdef"
    assert read_secret("") == b""


async def test_the_commands_share_a_secret(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef")
    secret = ("--secret-file", str(tmp_path / "secret"))
    async with pool_of_commands(*secret) as address:
        refused, _, why = await running_kvpool("status", "--masters", address)
        assert refused == 1
        assert "requires a secret: set secret_file" in why
        code, said, _ = await running_kvpool("status", "--masters", address, *secret, "--json")
        assert code == 0, said
