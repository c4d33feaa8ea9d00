"""The NVMe tier with encrypt=yes: what a file shows, what changing it brings, and which keys."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool import Cluster, ReadStatus, WriteStatus, dev
from kvpool.checksum import block_seed, checksum, namespace_seed
from kvpool.errors import ConfigError
from kvpool.protocols.persistent_tier import Record
from kvpool.server.tier_keys import storage_key
from kvpool.types import ROOT
from kvpool_tiers.nvme.format import GROUP_SIZE, PAGE, SEALED_HEADER_SIZE, Geometry
from kvpool_tiers.nvme.tier import Nvme
from tests.conftest import NAMESPACE, eventually, key, keys, read_back, values

pytest.importorskip("cryptography", reason="needs cryptography")
from kvpool_tiers.nvme import encryption

KEY, OTHER = bytes(32), b"\1" * 32
CAPACITY = 1 << 20
PLACES = Geometry(CAPACITY, PAGE, SEALED_HEADER_SIZE)
BANK = Cluster("bank", b"0123456789abcdef0123456789abcdef")


@contextlib.contextmanager
def tier_at(path: Path, capacity: int = CAPACITY, secret: bytes = KEY) -> Iterator[Nvme]:
    tier = Nvme(capacity, path=path, encrypt=True)
    tier.use_key(secret)
    try:
        yield tier
    finally:
        tier.close()


def content(one: Record) -> bytes:
    return (one.digest * (one.size // len(one.digest) + 1))[: one.size]


def record(offset: int, size: int = 2 * PAGE, name: str = "") -> Record:
    digest = key(name or offset)
    one = Record(NAMESPACE, 0, digest, ROOT, offset, size, 0, 1)
    sum_ = checksum(content(one), block_seed(namespace_seed(NAMESPACE, 0), digest))
    return one._replace(checksum=sum_)


async def write(tier: Nvme, *records: Record) -> None:
    for one in records:
        await tier.write_from(one.offset, memoryview(content(one)))
    await tier.persist(records)


async def read(tier: Nvme, one: Record) -> bytes:
    buffer = bytearray(b"?" * one.size)
    await tier.read_into(one.offset, memoryview(buffer))
    return bytes(buffer)


async def test_the_file_shows_neither_bytes_nor_keys(tmp_path: Path) -> None:
    sizes = (1, PAGE, 2 * PAGE + 7, 300_000)
    offsets = (0, PAGE, 8 * PAGE, 64 * PAGE)
    records = [record(offset, size) for offset, size in zip(offsets, sizes, strict=True)]
    with tier_at(tmp_path / "file") as tier:
        assert await tier.recover() == []
        await write(tier, *records)
        for one in records:
            assert await read(tier, one) == content(one)
        assert "encrypted" in tier.status_text
    data = (tmp_path / "file").read_bytes()
    for one in records:
        assert one.digest[:8] not in data
        assert one.checksum.to_bytes(8, "little") not in data
    with tier_at(tmp_path / "file") as tier:  # and it is warm
        assert list(await tier.recover()) == records
        for one in records:
            assert await read(tier, one) == content(one)
        assert tier.altered == 0


async def test_a_large_extent_crosses_groups_and_steps(tmp_path: Path) -> None:
    one = record(GROUP_SIZE - (5 << 20), (11 << 20) + 123)
    with tier_at(tmp_path / "file", 2 * GROUP_SIZE) as tier:
        await write(tier, one)
        assert await read(tier, one) == content(one)
    with tier_at(tmp_path / "file", 2 * GROUP_SIZE) as tier:
        assert await tier.recover() == [one]
        assert await read(tier, one) == content(one)


@pytest.mark.parametrize("where", ["first", "last", "tag", "nonce", "salt", "header"])
async def test_what_was_altered_is_zeros_or_no_record(tmp_path: Path, where: str) -> None:
    one, neighbour = record(0), record(4 * PAGE)
    with tier_at(tmp_path / "file") as tier:
        await write(tier, one, neighbour)
    (piece,) = PLACES.pieces(one.offset, one.size)
    header = PLACES.header(one.offset)
    at = {
        "first": piece.position,
        "last": piece.position + one.size - 1,
        "salt": header,
        "nonce": header + 32,
        "header": header + 40,
        "tag": header + 40 + 128 + 64 + 15,
    }[where]
    flip(tmp_path / "file", at)
    with tier_at(tmp_path / "file") as tier:
        found = await tier.recover()
        assert neighbour in found
        assert await read(tier, neighbour) == content(neighbour)
        if where in ("first", "last"):
            assert one in found
            assert await read(tier, one) == bytes(one.size)  # nothing that somebody has chosen
            assert tier.altered == 1
            assert tier.status_text.endswith("encrypted, 1 blocks did not decrypt")
        else:
            assert one not in found
            assert tier.dropped == {"altered": 1}
    with tier_at(tmp_path / "file") as tier:
        assert (one in await tier.recover()) is (where in ("first", "last"))
        assert not tier.dropped


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


async def test_a_buffer_of_another_size_than_the_extent(tmp_path: Path) -> None:
    """It gets as much as it has room for; behind the extent there are zeros, and never its rest."""
    one = record(8 * PAGE)
    with tier_at(tmp_path / "file") as tier:
        await write(tier, one)
        for size in (1, PAGE, one.size - 1, one.size, one.size + 1, 3 * PAGE):
            buffer = bytearray(b"?" * size)
            await tier.read_into(one.offset, memoryview(buffer))
            assert bytes(buffer) == content(one)[:size].ljust(size, b"\0")
        assert tier.altered == 0


async def test_more_writes_at_once_than_there_is_memory_for_ciphertext(tmp_path: Path) -> None:
    records = [record(number * 8 * PAGE, 5 * PAGE) for number in range(16)]
    with tier_at(tmp_path / "file") as tier:
        await asyncio.gather(*[write(tier, one) for one in records])
        assert [await read(tier, one) for one in records] == [content(one) for one in records]


@pytest.mark.parametrize("what", ["payload", "header", "both"])
async def test_what_was_moved_within_the_file_is_not_served(tmp_path: Path, what: str) -> None:
    """Two blocks of one size, of the same opening: each message is good for its place only."""
    one, two = record(0), record(4 * PAGE)
    with tier_at(tmp_path / "file") as tier:
        await write(tier, one, two)
    data = bytearray((tmp_path / "file").read_bytes())
    for part in ("payload", "header"):
        if what in (part, "both"):
            places = [PLACES.header(each.offset) for each in (one, two)]
            size = SEALED_HEADER_SIZE
            if part == "payload":
                places = [PLACES.pieces(each.offset, 1)[0].position for each in (one, two)]
                size = one.size
            first, second = (slice(place, place + size) for place in places)
            data[first], data[second] = data[second], data[first]
    (tmp_path / "file").write_bytes(data)
    with tier_at(tmp_path / "file") as tier:
        for each in await tier.recover():
            assert await read(tier, each) == bytes(each.size)
        assert sum(tier.dropped.values()) + tier.altered == 2


async def test_no_nonce_is_used_twice_under_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by extents and headers, not after a start, not when an older copy is put back."""
    used: list[tuple[bytes, bytes]] = []
    aead = encryption.AESGCM

    class Noted:
        def __init__(self, secret: bytes) -> None:
            self._secret, self.decrypt = secret, aead(secret).decrypt

        def encrypt(self, iv: bytes, text: bytes, about: None) -> bytes:
            used.append((self._secret, iv))
            return aead(self._secret).encrypt(iv, text, about)

    real = encryption.Sealing

    def sealing(secret: bytes, seal: Any) -> Any:
        used.append((secret, encryption._iv(seal.nonce)))
        return real(secret, seal)

    monkeypatch.setattr(encryption, "Sealing", sealing)
    monkeypatch.setattr(encryption, "AESGCM", Noted)
    path, older = tmp_path / "file", tmp_path / "older"
    for number in range(4):
        with tier_at(path) as tier:
            found = await tier.recover()
            await write(tier, *(record(4 * PAGE * n, name=f"{number}/{n}") for n in range(6)))
            await tier.persist(list(found))  # a header alone, again
        if number == 1:
            shutil.copy(path, older)
        if number == 2:
            shutil.copy(older, path)
    assert len(used) >= 4 * (6 + 6)
    assert len(set(used)) == len(used)


@pytest.mark.parametrize("name", ["_decrypt", "_update"])
async def test_a_cancelled_call_ends_after_its_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Until then the thread uses the buffer of the caller."""
    one, begun, ended = record(0, 1 << 19), threading.Event(), threading.Event()
    real = getattr(encryption, name)

    def slow(*arguments: Any) -> Any:
        begun.set()
        time.sleep(0.1)
        try:
            return real(*arguments)
        finally:
            ended.set()

    with tier_at(tmp_path / "file") as tier:
        await write(tier, one)
        monkeypatch.setattr(encryption, name, slow)
        for _ in range(6):  # more than there is memory for ciphertext
            begun.clear()
            ended.clear()
            calls = {
                "_decrypt": lambda: tier.read_into(0, memoryview(bytearray(one.size))),
                "_update": lambda: tier.write_from(0, memoryview(content(one))),
            }
            call = asyncio.ensure_future(calls[name]())
            await eventually(begun.is_set)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
            assert ended.is_set()
        monkeypatch.undo()
        await write(tier, one)
        assert await read(tier, one) == content(one)


async def test_a_smaller_file_keeps_what_fits(tmp_path: Path) -> None:
    records = [record(offset, PAGE + 5) for offset in range(0, CAPACITY, CAPACITY // 4)]
    with tier_at(tmp_path / "file") as tier:
        await write(tier, *records)
    with tier_at(tmp_path / "file", CAPACITY // 2) as tier:
        found = await tier.recover()
        assert {one.digest for one in found} == {one.digest for one in records}
        for one in found:
            assert await read(tier, one) == content(one)


# --- in a server --------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def server(path: Path, cluster: Cluster, encrypt: str = "yes") -> Any:
    tiers = ["dram:1MiB", f"nvme:{path}:8MiB?encrypt={encrypt}"]
    async with dev.serve(tiers=tiers, cluster=cluster, listen=("inproc://",)) as running:
        yield running


async def statuses(running: dev.Dev, chain: list[bytes]) -> set[ReadStatus]:
    async with running.pool() as pool:
        return {*await read_back(pool, chain)}


async def test_blocks_of_a_server_survive_a_restart_and_alterations_are_misses(
    tmp_path: Path,
) -> None:
    path, chain = tmp_path / "file", keys("bank", 6)
    async with server(path, BANK) as running, running.pool() as pool:
        assert set(await pool.write(NAMESPACE, chain, values(chain))) == {WriteStatus.STORED}
    async with server(path, BANK) as running:
        assert await statuses(running, chain) == {ReadStatus.HIT}
    data = bytearray(path.read_bytes())
    places = Geometry(8 << 20, PAGE, SEALED_HEADER_SIZE)
    for piece in places.pieces(0, 1 << 20):
        data[piece.position] ^= 1
        for at in range(piece.position, piece.position + piece.stop - piece.start, PAGE):
            data[at + 100] ^= 1
    path.write_bytes(data)
    async with server(path, BANK) as running:
        assert ReadStatus.HIT not in await statuses(running, chain)


@pytest.mark.parametrize(
    ("cluster", "encrypt", "problem"),
    [
        (Cluster("bank", b"another secret, of 32 bytes, now"), "yes", "belongs to another cluster"),
        (Cluster("shop", BANK.secret), "yes", "belongs to another cluster"),
        (BANK, "no", "is encrypted: set encrypt=yes, or remove it to start empty"),
        (Cluster("bank"), "yes", "encrypt=yes needs the cluster's secret"),
        (BANK, "perhaps", "encrypt"),
    ],
)
async def test_another_key_or_setting_is_refused(
    tmp_path: Path, cluster: Cluster, encrypt: str, problem: str
) -> None:
    path, chain = tmp_path / "file", keys("bank", 2)
    async with server(path, BANK) as running, running.pool() as pool:
        await pool.write(NAMESPACE, chain, values(chain))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=problem) as refused:
        async with server(path, cluster, encrypt):
            pass
    assert "\n" not in str(refused.value)
    assert path.read_bytes() == before


async def test_a_plain_file_is_not_mixed_with_encrypted_blocks(tmp_path: Path) -> None:
    path = tmp_path / "file"
    async with server(path, BANK, "no"):
        pass
    with pytest.raises(ConfigError, match="is not encrypted: set encrypt=no, or remove it"):
        async with server(path, BANK):
            pass


async def test_a_file_under_another_key_has_no_records(tmp_path: Path) -> None:
    """Also where nobody compares owners: nothing decrypts."""
    with tier_at(tmp_path / "file") as tier:
        await write(tier, record(0))
    with tier_at(tmp_path / "file", secret=OTHER) as tier:
        assert await tier.recover() == []


def test_keys_are_of_one_cluster() -> None:
    secret = b"0123456789abcdef"
    made = {storage_key(Cluster(name, secret)) for name in ("a", "b")}
    made.add(storage_key(Cluster("a", secret + b"!")))
    assert len(made) == 3
