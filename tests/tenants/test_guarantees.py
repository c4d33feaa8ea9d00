"""What tenants are guaranteed, through a pool: a master, a server, and clients with their keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool.client.pool import Pool
from kvpool.server.state.tenants import account_of
from kvpool.testing.invariants import check_invariants
from kvpool.types import WriteStatus
from kvpool.wire import messages as wire
from tests.conftest import eventually, keys
from tests.support.moves import drain
from tests.support.tenant_pool import MODEL, TenantPool, reserve, tenant, tenant_pool

SIZE = 8192


def used(pool: TenantPool, name: str) -> int:
    account = account_of(pool.server.store, name)
    return account.used if account is not None else 0


async def write(client: Pool, seed: int, count: int) -> list[bytes]:
    digests = keys(seed, count)
    statuses = await client.write(MODEL, digests, [bytes(SIZE)] * count)
    assert set(statuses) <= {WriteStatus.STORED, WriteStatus.NO_SPACE}
    return digests


async def found(client: Pool, digests: list[bytes]) -> int:
    return (await client.match(MODEL, digests)).length


async def test_a_burst_of_one_tenant_leaves_the_other_what_it_is_guaranteed(tmp_path: Path) -> None:
    async with tenant_pool(tmp_path, capacity=4 << 20) as pool:
        pool.write_tenants(guaranteed="30%", limit="90%")
        assert all(await pool.read_again())
        acme, blue = await pool.client(tenant("acme")), await pool.client(tenant("blue"))
        own = await write(acme, 1, 100)  # 800 KiB of 4 MiB
        for n in range(12):
            await write(blue, 100 + n, 100)
        assert await found(acme, own) == 100
        assert used(pool, "blue") <= 0.9 * (4 << 20)
        again = await write(acme, 2, 50)  # within the guarantee: others make room for it
        assert await found(acme, own) == 100
        assert await found(acme, again) == 50
        check_invariants(pool.server.stack)
        await acme.close()
        await blue.close()


async def test_a_refusal_for_the_limit_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And one for want of space does not."""
    async with tenant_pool(tmp_path, capacity=4 << 20) as pool:
        pool.write_tenants(limit="10%")
        assert all(await pool.read_again())
        counters = pool.server.stats
        async with await pool.client(tenant("acme")) as acme:
            for seed in range(4):  # it evicts its own, within its limit
                await write(acme, seed, 40)
            assert counters(0.0).counters["over_limit_blocks"] == 0
            large = [bytes(512 << 10)]
            assert await acme.write(MODEL, keys(9, 1), large) == [WriteStatus.NO_SPACE]
            assert counters(0.0).counters["over_limit_blocks"] == 1
        (line,) = [one for one in caplog.records if one.name == "kvpool.audit"]
        assert "a block of 512 KiB is above its limit of a tier, 409" in vars(line)["why"]
        async with await pool.client(tenant("blue")) as client:
            await write(client, 6, 1)
        await drain(pool.server, 0.5)  # it takes no blocks any more, of nobody
        async with pool.raw(tenant("blue")) as blue:
            answer = await blue.ask(reserve("@blue/llama", keys(7, 1)[0], SIZE), wire.Reserved)
            assert list(answer.statuses) == [WriteStatus.NO_SPACE]
        assert counters(0.0).counters["over_limit_blocks"] == 1


async def test_a_lowered_limit_is_reached_without_a_write(tmp_path: Path) -> None:
    async with tenant_pool(tmp_path, capacity=4 << 20) as pool:
        blue = await pool.client(tenant("blue"))
        for n in range(5):
            await write(blue, 100 + n, 100)
        assert used(pool, "blue") > 3 << 20
        pool.write_tenants(limit="1MiB")
        await pool.read_again()
        await eventually(lambda: used(pool, "blue") <= 1 << 20)
        assert used(pool, "blue") > 900 << 10  # and no more than that
        pool.write_tenants(only="acme")
        await pool.read_again()
        account = account_of(pool.server.store, "blue")
        assert account is not None
        assert not account.configured
        await blue.close()
