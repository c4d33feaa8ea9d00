"""tls://: blocks are encrypted, and nobody stands between a client and its server."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvpool import ClientConfig, Cluster, Pool, ReadStatus, WriteStatus, dev, strangers
from kvpool.errors import ConfigError, KvpoolError, LinkBroken, Unauthenticated
from kvpool.net.control_network import TcpNetwork
from kvpool.protocols import RequiresCertificates, Transport
from kvpool.wire import auth
from kvpool_transports import certificates
from kvpool_transports.tcp import TcpTransport
from kvpool_transports.tls import TlsTransport
from tests.conftest import NAMESPACE, buffers, eventually, keys, values
from tests.support.between import between
from tests.support.certificates import certificate
from tests.support.raw_peers import connect

SECRET = Cluster("default", b"s" * 32)
OPEN = Cluster("default")
BLOCK = 64 << 10


def server_tls(name: str = "server", **settings: Any) -> TlsTransport:
    mine = certificate(name)
    return TlsTransport(cert=mine.cert, key=mine.key, **settings)


@asynccontextmanager
async def serving(cluster: Cluster, transport: TlsTransport) -> AsyncIterator[dev.Dev]:
    async with dev.serve(
        "8MiB", listen=("tls://127.0.0.1:0",), transports={"tls": transport}, cluster=cluster
    ) as running:
        yield running


@asynccontextmanager
async def client_of(
    running: dev.Dev, cluster: Cluster, transport: Transport | None = None, **settings: Any
) -> AsyncIterator[Pool]:
    async with Pool(
        ClientConfig(masters=[running.address], transports=["tls"], **settings),
        cluster=cluster,
        network=TcpNetwork(cluster),
        transports={"tls": transport or TlsTransport()},
        owns_network=True,
    ) as pool:
        yield pool


def blind() -> ssl.SSLContext:
    """Of a peer that looks at no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def address_of(running: dev.Dev) -> str:
    (address,) = running.servers[0].addresses
    assert address.startswith("tls://127.0.0.1:")
    return address


@pytest.mark.parametrize(
    ("cluster", "client"), [(SECRET, {}), (SECRET, {"ca": "server"}), (OPEN, {"ca": "server"})]
)
async def test_blocks_pass(cluster: Cluster, client: dict[str, str]) -> None:
    chain = keys("chain", 40)
    settings = {name: certificate(of).cert for name, of in client.items()}
    async with (
        serving(cluster, server_tls()) as running,
        client_of(running, cluster, TlsTransport(**settings)) as pool,
    ):
        assert set(await write(pool, chain)) == {WriteStatus.STORED}
        got = buffers(40, BLOCK)
        results = await pool.read(NAMESPACE, chain, got)
        assert {result.status for result in results} == {ReadStatus.HIT}
        assert got == values(chain, BLOCK)


async def write(pool: Pool, chain: list[bytes]) -> list[WriteStatus]:
    return list(await pool.write(NAMESPACE, chain, values(chain, BLOCK)))


@asynccontextmanager
async def in_the_middle(target: str, *, name: str) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Who ends TLS with a certificate of its own, and passes everything on; and what it saw."""
    mine, seen = certificate(name), []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(mine.cert, mine.key)

    def passes(data: bytes, reply: bool) -> bytes:
        seen.append(data)
        return data

    async with between(target, passes, shown=context, far=blind()) as address:
        yield f"tls://{address}", seen


async def test_a_secret_is_not_proved_through_a_peer_in_the_middle() -> None:
    async with (
        serving(SECRET, server_tls()) as running,
        in_the_middle(address_of(running), name="middle") as (address, seen),
    ):
        with pytest.raises(Unauthenticated, match="another process answers in its place"):
            await connect(TlsTransport(), address, SECRET)
        assert seen  # the handshake went through it
        await connect(TlsTransport(), address_of(running), SECRET)


async def test_a_server_sees_a_peer_in_the_middle_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that does not look at the server's proof gets nothing."""
    same, believed = auth.same, iter([True])  # the client's check comes first

    class Careless(TlsTransport):
        async def _open(self, host: str, port: int, cluster: Cluster) -> Any:
            stream, _ = await super()._open(host, port, cluster)
            return stream, b"of another certificate"

    async with serving(SECRET, server_tls()) as running:
        monkeypatch.setattr(auth, "same", lambda *proofs: next(believed, False) or same(*proofs))
        with pytest.raises(Unauthenticated, match="the client does not know"):
            await connect(Careless(), address_of(running), SECRET)


async def test_certificates_of_an_authority_are_checked() -> None:
    trusted = certificate("server").cert
    async with serving(OPEN, server_tls()) as running:
        address = address_of(running)
        await connect(TlsTransport(ca=trusted), address, OPEN)
        with pytest.raises(LinkBroken, match=r"(?i)certificate"):
            await connect(TlsTransport(ca=certificate("other").cert), address, OPEN)
        with pytest.raises(ConfigError, match=r"tls without a secret needs tls\?ca=FILE"):
            await connect(TlsTransport(), address, OPEN)
    elsewhere = certificate("elsewhere", "10.9.8.7")
    async with serving(OPEN, TlsTransport(cert=elsewhere.cert, key=elsewhere.key)) as running:
        with pytest.raises(LinkBroken, match=r"(?i)certificate"):
            await connect(TlsTransport(ca=elsewhere.cert), address_of(running), OPEN)
        lax = TlsTransport(ca=elsewhere.cert, check_name=False)
        await connect(lax, address_of(running), OPEN)


async def test_a_server_with_an_authority_serves_certified_clients_only() -> None:
    client = certificate("client")
    transport = server_tls(ca=client.cert)
    assert isinstance(transport, RequiresCertificates)
    assert transport.requires_certificates
    trusted = certificate("server").cert
    async with serving(OPEN, transport) as running:
        address = address_of(running)
        shown = TlsTransport(cert=client.cert, key=client.key, ca=trusted)
        await connect(shown, address, OPEN)
        for other in (
            TlsTransport(ca=trusted),
            TlsTransport(ca=trusted, cert=trusted, key=certificate("server").key),
        ):
            with pytest.raises(KvpoolError):
                await connect(other, address, OPEN)
        await connect(shown, address, OPEN)


async def test_beyond_loopback_certificates_stand_in_for_a_secret() -> None:
    everywhere = ("tls://0.0.0.0:0",)
    with pytest.raises(ConfigError, match="access needs no secret"):
        async with dev.serve("8MiB", listen=everywhere, transports={"tls": server_tls()}):
            pass
    certified = {"tls": server_tls(ca=certificate("client").cert)}
    async with dev.serve("8MiB", listen=everywhere, transports=certified) as running:
        assert running.servers[0].addresses


async def test_tls_and_tcp_do_not_mix() -> None:
    """Each gets an error in time, and the server goes on."""
    async with serving(SECRET, server_tls()) as running:
        address = address_of(running)
        with pytest.raises(KvpoolError):
            await connect(TcpTransport(), address.replace("tls", "tcp"), SECRET, 2.0)
        await connect(TlsTransport(), address, SECRET)
    async with dev.serve("8MiB", listen=("tcp://127.0.0.1:0",), cluster=SECRET) as running:
        (plain,) = running.servers[0].addresses
        with pytest.raises(KvpoolError):
            await connect(TlsTransport(), plain.replace("tcp", "tls"), SECRET, 2.0)


async def test_silent_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have not even begun TLS: the oldest goes, and an honest client comes in."""
    monkeypatch.setattr(strangers, "HANDSHAKES_MAX", 8)
    async with serving(SECRET, server_tls()) as running:
        address = address_of(running)
        port = int(address.rpartition(":")[2])
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        await connect(TlsTransport(), address, SECRET)

        def ended() -> int:
            return sum(reader.at_eof() for reader, _ in silent)

        waiting = [asyncio.ensure_future(reader.read(1)) for reader, _ in silent]
        await eventually(lambda: ended() >= 30, within_s=3)  # not after HELLO_S
        for task in waiting:
            task.cancel()
        for _, writer in silent:
            writer.close()


async def tls_from(host: str, address: str, *, hang_up: bool = False) -> bytes:
    """What a peer at `host` gets of a server that it greets well, or after it has hung up."""
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        blind().wrap_bio(received, sent).do_handshake()
    port = int(address.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
    try:
        writer.write(sent.read() if not hang_up else sent.read()[:100])
        if hang_up:
            return b""
        async with asyncio.timeout(5):
            return await reader.read(1 << 16)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\n\r\n", None])
async def test_too_many_failed_handshakes_shut_their_address_out_before_tls(
    greeting: bytes | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Garbage, or a peer that lets the server sign and hangs up: both cost a handshake."""
    monkeypatch.setattr(strangers, "WRONG_PROOFS_PER_S", 0.0)
    caplog.set_level("INFO")
    there = "127.0.0.2"
    async with serving(SECRET, server_tls()) as running:
        address, (server,) = address_of(running), running.servers

        def refused() -> int:
            return server.stats(0.0).counters.get("refused_handshakes", 0)

        assert await tls_from(there, address)  # it is greeted, and hangs up: that is the first
        for number in range(2, strangers.WRONG_PROOFS_MAX + 1):
            if greeting is None:
                await tls_from(there, address, hang_up=True)
            else:
                port = int(address.rpartition(":")[2])
                _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(there, 0))
                writer.write(greeting)
                await eventually(lambda number=number: refused() == number)
                writer.close()
        await eventually(lambda: refused() == strangers.WRONG_PROOFS_MAX)
        assert await tls_from(there, address) == b""  # not one byte of TLS
        await eventually(lambda: refused() == strangers.WRONG_PROOFS_MAX + 1)
        await connect(TlsTransport(), address, SECRET)  # from another address
        monkeypatch.setattr(strangers, "WRONG_PROOFS_PER_S", 1e9)
        assert await tls_from(there, address)
    lines = [record for record in caplog.records if record.levelname in ("INFO", "WARNING")]
    about = [line for line in lines if vars(line).get("peer") == there]
    assert len(about) == 1, about
    assert vars(about[0])["count"] == 1
    assert "no TLS" in vars(about[0])["why"]
    assert not [line for line in caplog.records if line.name == "asyncio" and line.levelno > 10]


class Replaced(NamedTuple):
    """Files of a certificate that a test replaces."""

    cert: Path
    key: Path

    def by(self, name: str) -> None:
        """Key first: a server that looks between the two sees a pair that does not fit."""
        self.key.write_bytes(Path(certificate(name).key).read_bytes())
        self.cert.write_bytes(Path(certificate(name).cert).read_bytes())


async def shown_at(address: str) -> bytes:
    """The certificate that a server shows now."""
    port = int(address.rpartition(":")[2])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=blind())
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return shown


def pem(name: str) -> bytes:
    return Path(certificate(name).cert).read_bytes()


def der(name: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pem(name).decode())


async def test_a_certificate_that_is_replaced_is_shown_and_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(certificates, "LOOK_EVERY_S", 0.0)
    caplog.set_level("INFO")
    files = Replaced(tmp_path / "cert.pem", tmp_path / "key.pem")
    files.by("server")

    def refusals() -> int:
        return caplog.text.count("new certificates are refused, those before stay")

    transport = TlsTransport(cert=str(files.cert), key=str(files.key))
    async with serving(SECRET, transport) as running:
        address = address_of(running)
        async with client_of(running, SECRET) as pool:
            chain = keys("rotated", 4)
            assert set(await write(pool, chain)) == {WriteStatus.STORED}
            assert await shown_at(address) == der("server")
            files.by("other")
            assert await shown_at(address) == der("other")
            await connect(TlsTransport(), address, SECRET)  # its proof covers the new one
            got = buffers(4, BLOCK)  # who was connected, stays
            assert {r.status for r in await pool.read(NAMESPACE, chain, got)} == {ReadStatus.HIT}
        for bad in (b"", b"nonsense", None, pem("server")):
            if bad is None:
                files.cert.unlink()
            else:
                files.cert.write_bytes(bad)
            before = refusals()
            for _ in range(3):
                assert await shown_at(address) == der("other")
            assert refusals() == before + 1  # once for each bad version
        await connect(TlsTransport(), address, SECRET)
        files.by("server")
        assert await shown_at(address) == der("server")
    assert caplog.text.count("certificates were read again") == 2


async def test_a_client_trusts_a_replaced_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "LOOK_EVERY_S", 0.0)
    trusted = tmp_path / "ca.pem"
    trusted.write_bytes(pem("other"))
    client = TlsTransport(ca=str(trusted))
    async with serving(OPEN, server_tls()) as running:
        with pytest.raises(LinkBroken, match=r"(?i)certificate"):
            await connect(client, address_of(running), OPEN)
        trusted.write_bytes(pem("server"))
        await connect(client, address_of(running), OPEN)
        trusted.write_bytes(pem("other"))
        with pytest.raises(LinkBroken, match=r"(?i)certificate"):
            await connect(client, address_of(running), OPEN)


async def test_files_are_read_once_and_looked_at_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads: list[str] = []
    looks: list[str] = []

    def noting(noted: list[str], real: Callable[[str], Any]) -> Callable[[str], Any]:
        return lambda path: noted.append(path) or real(path)  # type: ignore[func-returns-value]

    monkeypatch.setattr(certificates, "read", noting(reads, certificates.read))
    monkeypatch.setattr(certificates, "stamp", noting(looks, certificates.stamp))
    made = certificate("server")
    files = certificates.Files("", "", made.cert)
    used = certificates.Certificates(files, ssl.PROTOCOL_TLS_CLIENT, lambda context: None)
    first = await used.current()
    for number in range(1, 4):
        assert await asyncio.gather(*(used.current() for _ in range(20))) == [first] * 20
        assert len(looks) == number
        used._looked -= 1.5  # as if so much time had passed
    client = TlsTransport()
    async with serving(SECRET, server_tls()) as running:
        del reads[:]
        await connect(client, address_of(running), SECRET)
        context = client._of_client
        for _ in range(5):
            await connect(client, address_of(running), SECRET)
        assert client._of_client is context
        assert not reads


def altering(every: int) -> Callable[[bytes, bool], bytes]:
    """Flips a bit of each so many bytes of the replies."""
    passed = 0

    def passes(data: bytes, reply: bool) -> bytes:
        nonlocal passed
        if not reply:
            return data
        piece, passed, before = bytearray(data), passed + len(data), passed
        if before // every != passed // every:
            piece[len(piece) // 2] ^= 1
        return bytes(piece)

    return passes


@pytest.mark.parametrize("every", [1 << 40, 100_000], ids=["passed on", "altered"])
async def test_what_is_altered_on_its_way_is_no_hit(every: int) -> None:
    """Also where the reader does not look at checksums, which who alters can make himself."""
    chain = keys("altered", 4)
    async with (
        serving(SECRET, server_tls()) as running,
        between(address_of(running), altering(every)) as diverted,
    ):

        class Diverted(TlsTransport):
            async def _open(self, host: str, port: int, cluster: Cluster) -> Any:
                return await super()._open(host, int(diverted.rpartition(":")[2]), cluster)

        async with client_of(running, SECRET) as pool:
            await write(pool, chain)
        async with client_of(running, SECRET, Diverted(), verify=False) as pool:
            got = buffers(4, BLOCK)
            results = await pool.read(NAMESPACE, chain, got)
        for result, has, right in zip(results, got, values(chain, BLOCK), strict=True):
            assert not result.status.hit or has == right
        assert any(result.status.hit for result in results) is (every > 100_000)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"cert": "SERVER"}, "cert and key are given together"),
        ({"ca": "/nowhere/ca.pem"}, "/nowhere/ca.pem: No such file"),
        ({"cert": "SERVER", "key": "OTHER KEY"}, "expected certificates and a key in PEM"),
        ({"cert": "KEY", "key": "KEY"}, "expected certificates and a key in PEM"),
    ],
)
async def test_wrong_files_are_named(settings: dict[str, str], problem: str) -> None:
    files = {
        "SERVER": certificate("server").cert,
        "KEY": certificate("server").key,
        "OTHER KEY": certificate("other").key,
    }

    async def listen() -> None:
        transport = TlsTransport(**{name: files.get(of, of) for name, of in settings.items()})
        async with serving(SECRET, transport):
            pass

    with pytest.raises(ConfigError, match=problem):
        await listen()


async def test_a_server_without_a_certificate_does_not_start() -> None:
    with pytest.raises(ConfigError, match=r"tls\?cert=FILE&key=FILE"):
        async with serving(SECRET, TlsTransport()):
            pass


def test_on_the_loop_of_production() -> None:
    uvloop = pytest.importorskip("uvloop")
    check: Callable[..., Any] = test_blocks_pass
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(check(SECRET, {}))
        runner.run(test_a_secret_is_not_proved_through_a_peer_in_the_middle())


async def test_plain_tcp_with_a_secret_says_once_what_it_does_not_protect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def warnings() -> int:
        return caplog.text.count("neither encrypted nor authenticated")

    listen = ("tcp://0.0.0.0:0",)
    async with dev.serve("8MiB", listen=listen, cluster=SECRET) as running:
        assert warnings() == 1
        (address,) = running.servers[0].addresses
        port = address.rpartition(":")[2]
        near, far = TcpTransport(), TcpTransport()
        await connect(near, f"tcp://127.0.0.1:{port}", SECRET)
        assert warnings() == 1
        for _ in range(3):
            await connect(far, f"tcp://0.0.0.0:{port}", SECRET)
        assert warnings() == 2
    over_tls = {"tls": server_tls()}
    listen = ("tls://0.0.0.0:0",)
    async with dev.serve("8MiB", listen=listen, transports=over_tls, cluster=SECRET) as running:
        (address,) = running.servers[0].addresses
        await connect(TlsTransport(), address, SECRET)
    assert warnings() == 2
