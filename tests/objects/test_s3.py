"""Real processes, S3's protocol over loopback, and kill -9."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
import zlib
from collections.abc import AsyncIterator, Iterator

import pytest

pytest.importorskip("obstore")
moto = pytest.importorskip("moto.server")

from kvpool import Cluster, Pool  # noqa: E402
from kvpool.errors import ConfigError, Unavailable  # noqa: E402
from kvpool.protocols.cold_tier import Gone  # noqa: E402
from kvpool_tiers.objects.remote import ObstoreObjects  # noqa: E402
from kvpool_tiers.objects.tier import S3  # noqa: E402
from tests.conftest import NAMESPACE, soon  # noqa: E402
from tests.support.commands import kvpool  # noqa: E402
from tests.support.object_store import Fleet  # noqa: E402
from tests.support.programs import master_and_server  # noqa: E402
from tests.tiers.test_objects import CHAIN, FAST, MEMORY, found, hits, write  # noqa: E402


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    name = f"bucket-{zlib.crc32(request.node.name.encode())}"
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{name}", method="PUT")).close()
    return name


@pytest.fixture(params=["s3", "file"])
async def fleet(
    request: pytest.FixtureRequest, bucket: str, endpoint: str, tmp_path: object
) -> AsyncIterator[Fleet]:
    places = {
        "s3": f"s3://{bucket}/some/prefix:64MiB?endpoint={endpoint}&{FAST}",
        "file": f"file://{tmp_path}/store:64MiB?{FAST}",
    }
    cold = places[request.param].replace("beat_s=40ms", "beat_s=1s")
    async with Fleet([MEMORY, cold], Cluster("test")) as running:
        yield running


@pytest.fixture
async def pool(fleet: Fleet) -> AsyncIterator[Pool]:
    async with fleet.pool() as client:
        yield client


async def test_another_server_has_it_when_all_are_lost(fleet: Fleet, pool: Pool) -> None:
    await write(pool, await fleet.start("a"))
    await pool.remove(NAMESPACE, CHAIN[:4])
    await fleet.lose("a")
    assert await hits(pool) == 0
    other = await fleet.start("b")
    await found(other, len(CHAIN) - 4)
    assert await hits(pool) == len(CHAIN) - 4


async def test_requests_and_their_errors(bucket: str, endpoint: str) -> None:
    store = ObstoreObjects(f"s3://{bucket}", "below/one", endpoint, "")
    await store.put("a/b%2Fc/1", memoryview(b"0123456789"))
    await store.put("a/d/2", b"")
    assert bytes(await store.get("a/b%2Fc/1", 3, 4)) == b"3456"
    assert [(o.name, o.size) for o in await store.listing("a/")] == [
        ("a/b%2Fc/1", 10),
        ("a/d/2", 0),
    ]
    assert all(one.written_at > 1e9 for one in await store.listing("a/"))
    assert await store.folders("a/") == ["b%2Fc", "d"]
    for start in (8, 10, 2000):  # more than there is: one that was cut ends no use of the others
        with pytest.raises(Gone, match="shorter"):
            await store.get("a/b%2Fc/1", start, 4)
    await store.delete("a/d/2")
    await store.delete("a/d/2")
    with pytest.raises(Gone):
        await store.get("a/d/2", 0, 1)
    assert await store.folders("nothing/") == []
    assert await ObstoreObjects(f"s3://{bucket}", "below/another", endpoint, "").listing("") == []


async def test_a_listing_has_more_pages_than_one(
    bucket: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool_tiers.objects.remote._CHUNK", 2)
    store = ObstoreObjects(f"s3://{bucket}", "many", endpoint, "")
    for number in range(5):
        await store.put(f"blocks/{number}", b"")
    assert len(await store.listing("blocks/")) == 5


async def test_nobody_there(bucket: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
        store = ObstoreObjects(f"s3://{bucket}", "any", endpoint, "")
        reasons = set()
        for name in ("a", "b"):
            with pytest.raises(Unavailable) as error:
                await store.get(name, 0, 1)
            reasons.add(str(error.value))
        assert len(reasons) == 1, "one line in a log, not one for each object"


async def test_a_bucket_that_is_not_there_is_no_object_that_is_not_there(
    bucket: str, endpoint: str
) -> None:
    store = ObstoreObjects("s3://nobody-has-made-it", "any", endpoint, "")
    for request in (
        store.put("a", b""),
        store.get("a", 0, 1),
        store.listing("a/"),
        store.folders("a/"),
        store.delete("a"),
    ):
        with pytest.raises(Unavailable, match="there is no such bucket") as error:
            await request
        assert not isinstance(error.value, Gone)


ANSWERS = [
    ("403 Forbidden", "ExpiredToken", "the credentials have expired"),
    ("403 Forbidden", "RequestTimeTooSkewed", "the clock of this host is not that of the store"),
    ("400 Bad Request", "Strange", "400 Bad Request: Strange$"),
]


@pytest.mark.parametrize(("status", "code", "expected"), ANSWERS)
async def test_what_a_store_answers_is_a_reason_of_few_words(
    bucket: str, status: str, code: str, expected: str
) -> None:
    """The same for each request, whatever number the store gives it."""
    requests = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        requests += 1
        await reader.readuntil(b"\r\n\r\n")
        body = f"<Error><Code>{code}</Code><RequestId>{requests}</RequestId></Error>"
        head = f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {len(body)}"
        writer.write(f"{head}\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        store = ObstoreObjects(f"s3://{bucket}", "any", f"http://127.0.0.1:{port}", "")
        reasons = set()
        for _ in range(2):
            for ask in (store.get("a", 0, 1), store.listing("a/")):
                with pytest.raises(Unavailable, match=expected) as error:
                    await ask
                reasons.add(str(error.value))
    assert len(reasons) == 1


async def test_doctor_names_credentials_that_are_refused(bucket: str, endpoint: str) -> None:
    def admit(without_a_look: bytes) -> None:
        told = {"data": without_a_look, "headers": {"Content-Type": "text/plain"}}
        auth = urllib.request.Request(f"{endpoint}/moto-api/reset-auth", **told, method="POST")
        urllib.request.urlopen(auth).close()

    tiers = ("--tier", MEMORY, "--tier", f"s3://{bucket}/any:64MiB?endpoint={endpoint}")
    admit(b"0")
    try:
        async with master_and_server(*tiers) as (master, _):
            words = ("doctor", "--json", "--transport", "tcp", "--masters", master)
            said = "access is refused (InvalidAccessKeyId)"
            await asyncio.to_thread(soon, lambda: said in kvpool(*words).out, 30)
    finally:
        admit(b"inf")


def test_settings_that_make_no_sense(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="expected at least that of one"):
        S3(1 << 20, "//bucket/prefix", endpoint=endpoint)
    with pytest.raises(ConfigError, match=r"wait_s=0.0, expected 0\.01 to 3,600"):
        S3(1 << 30, "//bucket/prefix", endpoint=endpoint, wait_s=0.0)
    for wrong in ("10.0.0.1:9000", "http://", "ftp://host", "http://a host"):
        with pytest.raises(ConfigError, match="expected one like http://10"):
            S3(1 << 30, "//bucket/prefix", endpoint=wrong)
