"""Calls and commands that are wrong, or that end too early: one sentence, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
from collections.abc import Callable, Coroutine
from decimal import Decimal
from fractions import Fraction
from typing import Any, cast

import numpy as np
import pytest
from typer.testing import CliRunner

import kvpool.sync
from kvpool import ClientConfig, Cluster, Namespace, Pool, ReadStatus, WriteStatus, admin, dev
from kvpool.cli.app import app
from kvpool.cli.shared import console
from kvpool.errors import BadBuffer, BadKey, Closed, ConfigError, UsageError
from kvpool.ops.tables import members_table
from kvpool.testing.invariants import check_invariants
from kvpool.types import ROOT, Member, ServerStats
from tests.conftest import (
    CHAIN,
    NAMESPACE,
    TRANSPORTS,
    buffers,
    eventually,
    key,
    keys,
    value,
    values,
)

# --- callers -----------------------------------------------------------------------------


async def test_a_buffer_resized_during_a_call(pool: Pool) -> None:
    """It cannot be: the buffer is held until the call has ended."""
    digest, size = key("resized"), 4 << 20
    buffer = bytearray(value(digest, size))
    for call in (
        lambda: pool.write(NAMESPACE, [digest], [buffer]),
        lambda: pool.read(NAMESPACE, [digest], [buffer]),
    ):
        task = asyncio.create_task(call())
        while not task.done():
            await asyncio.sleep(0)
            if not task.done():
                with pytest.raises(BufferError):
                    buffer.append(0)
        (result,) = await task
        assert result in (WriteStatus.STORED, (ReadStatus.HIT, size))
    buffer.append(0)  # it is the caller's again
    assert buffer[:-1] == value(digest, size)


async def test_every_call_checks_its_digests(watched: dev.Dev) -> None:
    wrong = [b"fifteen bytes.."]
    async with watched.pool() as pool:
        for call in (
            lambda: pool.read(NAMESPACE, wrong, buffers(1)),
            lambda: pool.write(NAMESPACE, wrong, [bytes(100)]),
            lambda: pool.match(NAMESPACE, wrong),
            lambda: pool.contains(NAMESPACE, wrong),
            lambda: pool.contains(NAMESPACE, []),
            lambda: pool.contains(NAMESPACE, [bytes(24), bytes(23), bytes(25)]),  # 3 times 24
            lambda: pool.where(NAMESPACE, []),
            lambda: pool.where(NAMESPACE, [bytes(24), bytes(23), bytes(25)]),
            lambda: admin(pool).explain(NAMESPACE, wrong),
            lambda: pool.remove(NAMESPACE, wrong),
            lambda: pool.remove(NAMESPACE, []),
        ):
            with pytest.raises(BadKey):
                await call()


async def test_values_of_another_type_are_named(watched: dev.Dev) -> None:
    asked: Any
    async with watched.pool() as pool:
        for asked, says in (
            (["61" * 16], r"keys begin with '6161.*bytes.fromhex"),
            (key("a"), "keys begin with [0-9]+, expected a list of bytes"),
        ):
            explain = admin(pool).explain
            for call in (pool.match, pool.contains, explain, pool.prefetch, pool.remove):
                with pytest.raises(BadKey, match=says):
                    await call(NAMESPACE, asked)
        asked = "model"
        with pytest.raises(UsageError, match="namespace is 'model', expected"):
            await pool.match(asked, CHAIN)
        with pytest.raises(UsageError, match=r"session b.name."):
            await pool.match(NAMESPACE, CHAIN, session=cast(Any, b"name"))


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize(
    ("argument", "value"),
    [(name, value) for name in ("part", "copies") for value in (True, 1.0, "1", None)]
    + [(name, value) for name in ("timeout", "resume_in") for value in (True, "1", Decimal(1))],
)
async def test_an_argument_of_another_type_is_no_failure_of_servers(
    watched: dev.Dev, transport: str, argument: str, value: Any
) -> None:
    """They would refuse the message, and count as failed for the other calls of this process."""
    space, (digest,) = Namespace("typed", 2), keys(f"{transport} {argument} {value}", 1)
    config = ClientConfig(masters=[watched.address], transports=[transport])
    async with await kvpool.connect(config=config) as pool:
        with pytest.raises(UsageError, match=re.escape(f"{argument} ")) as raised:
            await pool.write(space, [digest], values([digest]), **{argument: value})
        assert repr(value) in str(raised.value)
        assert await pool.write(NAMESPACE, [digest], values([digest])) == [WriteStatus.STORED]


async def test_numbers_and_texts_of_numpy_and_subclasses(watched: dev.Dev) -> None:
    """They mean what they mean in Python, and are on the wire what they mean."""
    text = type("text", (str,), {})
    space, (digest,) = Namespace(text("typed"), np.int64(2)), keys("numpy", 1)
    assert (type(space.name), type(space.parts)) == (str, int)
    assert space == Namespace("typed", 2)
    config = ClientConfig(masters=[watched.address], transports=["tcp"])
    async with await kvpool.connect(config=config) as pool:
        for part in range(2):
            (status,) = await pool.write(
                space,
                (digest,),
                [value(digest)],
                part=np.int32(part),
                copies=np.int64(2),
                visible=cast(Any, np.bool_(True)),
                session=text("s"),
                resume_in=np.float32(1.5),
                timeout=Fraction(5, 1),
            )
            assert status is WriteStatus.STORED
        (got,) = buffers(1)
        (result,) = await pool.read(space, [digest], [got], part=np.int8(1), timeout=np.float64(5))
        assert (result.status, got) == (ReadStatus.HIT, value(digest))


async def test_sequences_that_are_none(watched: dev.Dev) -> None:
    asked: Any
    async with watched.pool() as pool:
        for asked in (iter(CHAIN), set(CHAIN), dict.fromkeys(CHAIN)):
            explain = admin(pool).explain
            for call in (pool.match, pool.contains, explain, pool.prefetch, pool.remove):
                with pytest.raises(BadKey, match=f"keys are a {type(asked).__name__}, expected"):
                    await call(NAMESPACE, asked)
        for asked in (CHAIN[1].hex()[:32], None):
            explain = admin(pool).explain
            for call in (pool.match, pool.contains, explain, pool.prefetch, pool.remove):
                with pytest.raises(BadKey, match=r"key 1 .*expected (bytes|equal)"):
                    await call(NAMESPACE, [CHAIN[0], asked])
            with pytest.raises(BadKey, match=r"parent 1 is .*, expected bytes"):
                await pool.write(NAMESPACE, CHAIN[:2], values(CHAIN[:2]), parents=[ROOT, asked])
        asked = iter(values(CHAIN))
        with pytest.raises(BadBuffer, match="buffers are a list_iterator, expected a list"):
            await pool.write(NAMESPACE, CHAIN, asked)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (ClientConfig(masters=[]), "'masters' is empty"),
        (ClientConfig(masters=cast(Any, None)), "masters"),
        (ClientConfig(timeout_s=-1), "'client.timeout_s': duration -1"),
        (ClientConfig(hedge_s=-1), "'client.hedge_s'"),
        (cast(Any, "127.0.0.1:7450"), "config is a str, expected a kvpool.ClientConfig"),
    ],
)
async def test_a_configuration_that_a_program_makes(config: ClientConfig, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        await kvpool.connect(config=config)
    with pytest.raises(ConfigError, match=says):
        kvpool.sync.connect(config=config)


async def test_masters_and_times_as_a_file_has_them(watched: dev.Dev) -> None:
    config = ClientConfig(masters=cast(Any, watched.address), timeout_s=cast(Any, "5s"))
    async with await kvpool.connect(config=config) as pool:
        assert (await pool.match(NAMESPACE, CHAIN)).length == len(CHAIN)


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        (None, "cluster is None, expected a name"),
        (Cluster("x", cast(Any, "0123456789abcdef")), "a str, expected bytes"),
        (Cluster("x", b"short"), "holds 5 bytes, expected 16"),
    ],
)
async def test_a_cluster_that_no_file_could_hold(cluster: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        await kvpool.connect(cluster=cluster)


@pytest.mark.parametrize(
    "timeout",
    [float("inf"), float("nan"), 1e9, pytest.param(10**400, id="10**400"), "5"],
)
async def test_a_timeout_that_is_no_bound(watched: dev.Dev, timeout: float) -> None:
    """G6: it is refused, and no server looks slow to other calls because of it."""
    async with watched.pool() as pool:
        with pytest.raises(UsageError, match="expected seconds, at most 86400"):
            await pool.read(NAMESPACE, CHAIN, buffers(3), timeout=timeout)
        results = await pool.read(NAMESPACE, CHAIN, buffers(3), timeout=5.0)
        assert all(result.status is ReadStatus.HIT for result in results)
        assert not pool.counters["hedged"]


async def test_blocks_that_are_their_own_ancestors(watched: dev.Dev) -> None:
    """G9: refused before a byte moves, however the parents are given; other orders are fine."""
    a, b, c = keys("circle", 3)
    blocks = values([a, b, c])
    async with watched.pool() as pool:
        for parents in ([b, a, a], [c, a, b], [ROOT, b, ROOT]):
            with pytest.raises(BadKey, match=r"its own ancestor|itself as its parent"):
                await pool.write(NAMESPACE, [a, b, c], blocks, parents=parents)
        with pytest.raises(BadKey, match="one of the keys that follow it"):
            await pool.write(NAMESPACE, [a, b, c], blocks, parent=c)
        assert not (await pool.match(NAMESPACE, [a])).length
        tail_first = await pool.write(NAMESPACE, [c, b, a], blocks, parents=[b, a, ROOT])
        assert tail_first == [WriteStatus.STORED] * 3


async def test_a_stranger_who_writes_a_circle_cannot_fill_the_pool(watched: dev.Dev) -> None:
    """G9: in two calls no client sees it; the server leaves one of the parents out."""
    (server,) = watched.servers
    a, b = keys("two calls", 2)
    async with watched.pool() as pool:
        await pool.write(NAMESPACE, [a], values([a]), parent=b)
        await pool.write(NAMESPACE, [b], values([b]), parent=a)
        size = 1 << 20
        count = 2 * server.store.allocator.capacity // size
        for digest in keys("everything else", count):
            statuses = await pool.write(NAMESPACE, [digest], [bytes(size)])
            assert statuses == [WriteStatus.STORED]
        assert not (await pool.match(NAMESPACE, [a])).length
        await pool.write(NAMESPACE, CHAIN, values(CHAIN))  # for the witness


CALLS: dict[str, Callable[[Pool, list[bytes], list[bytearray]], Coroutine[Any, Any, Any]]] = {
    "write": lambda pool, chain, _: pool.write(NAMESPACE, chain, values(chain, 400_000)),
    "read": lambda pool, _, into: pool.read(NAMESPACE, CHAIN, into),
    "match": lambda pool, *_: pool.match(NAMESPACE, CHAIN),
    "remove": lambda pool, chain, _: pool.remove(NAMESPACE, chain),
    "members": lambda pool, *_: pool.members(),
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", CALLS)
async def test_cancelled_at_every_step(watched: dev.Dev, name: str, transport: str) -> None:
    """No pin, no reservation, and no later byte in the caller's buffers."""
    (server,) = watched.servers
    config = ClientConfig(masters=[watched.address], transports=[transport])
    steps, done = 0, False
    while not done and steps < 200:
        chain, into = keys(f"{transport} {steps}", 2), buffers(3)
        async with watched.pool(config) as pool:
            task = asyncio.create_task(CALLS[name](pool, chain, into))
            for _ in range(steps):
                await asyncio.sleep(0)
            done = task.done()
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() or task.exception() is None
            then = [bytes(one) for one in into]
            await eventually(lambda: server.store.held.pins == server.store.held.reservations == 0)
            check_invariants(server.store)
        assert into == then
        # Late steps cancel a write that only waits for a master, whose thread a busy machine may
        # let wait for a hundred steps: what they have stored would evict the blocks of others.
        server.store.remove(NAMESPACE, chain)
        steps += 1
    assert server.store.held.quarantined == 0


async def test_a_pool_from_before_a_fork(watched: dev.Dev) -> None:
    async with watched.pool() as pool:
        child = os.fork()
        if not child:  # no loop runs here: the calls must end at their first step
            try:
                with pytest.raises(Closed):
                    pool.match(NAMESPACE, CHAIN).send(None)
                pool.close().send(None)
            except StopIteration:
                os._exit(0)
            finally:
                os._exit(1)
        assert (await asyncio.to_thread(os.waitpid, child, 0))[1] == 0
        assert (await pool.match(NAMESPACE, CHAIN)).length == 3


# --- the command line --------------------------------------------------------------------

COMMANDS = {
    "capacity 0": ("server --capacity 0", "is 0 B, expected at least 4 KiB"),
    "capacity 1e3": ("server --capacity 1e3", "1e3"),
    "a negative capacity": ("server --capacity -1GiB", "-1GiB"),
    "a capacity of GB": ("server --capacity 64GB", "did you mean 64GiB"),
    "a capacity with 400 digits": (f"server --capacity {'1' * 400}", "1111"),
    "a capacity beyond the machine": ("server --capacity 900TiB", "capacity is 900 TiB, "),
    "markup for a capacity": ("server --capacity [/red]", "[/red]"),
    "escapes in an id": ("server --id \x1b[2J", "printable"),
    "a long id": (f"server --id {'x' * 257}", "256"),
    "a scheme nobody knows": ("server --listen gopher://x", "gopher"),
    "no port": ("server --listen tcp://127.0.0.1", "host:port"),
    "port 70000": ("server --listen tcp://127.0.0.1:70000", "host:port"),
    "half a bracket": ("server --listen tcp://[::1", "host:port"),
    "a name that is none": ("server --insecure --listen tcp://a..b:1", "a..b"),
    "a master at port 70000": ("status --masters 127.0.0.1:70000", "host:port"),
    "a master in half a bracket": ("status --masters [::1", "host:port"),
    "no master": ("status --masters ,", "masters"),
    "bind to port 70000": ("master --bind 127.0.0.1:70000", "host:port"),
    "bind to half a bracket": ("master --bind [::1", "host:port"),
    "bind to everybody": ("master --bind 0.0.0.0:0", "--insecure"),
    "listen to everybody": ("server --listen tcp://0.0.0.0:0", "--insecure"),
    "bind to a name that is none": ("master --insecure --bind a..b:1", "a..b"),
    "a file that is not there": ("status --config nowhere.yaml", "nowhere.yaml"),
    "no hex": ("explain --namespace n xyz", "hex"),
    "a short key": ("explain --namespace n 00", "16 to 32"),
    "no namespace": (f"explain --namespace '' {'00' * 16}", "namespace"),
    "log level loud": ("master --log-level loud", "loud"),
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", COMMANDS)
def test_commands(name: str) -> None:
    """One sentence, exit code 2, no traceback."""
    line, says = COMMANDS[name]
    result = CliRunner().invoke(app, shlex.split(line))
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert says in result.stderr


async def test_names_of_servers_are_no_markup() -> None:
    """What a peer is called does not break the table that shows it."""
    member = Member("[/red]", 1, "h", (), ("[bold]",), True, 0, 1, ServerStats())
    with console.capture() as capture:
        console.print(members_table([member]))
    assert "[/red]" in capture.get()
    assert "[bold]" in capture.get()
