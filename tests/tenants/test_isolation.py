"""A tenant gets nothing of another one, by any message on either plane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from kvpool import (
    ClientConfig,
    Cluster,
    ConfigError,
    MasterLost,
    ReadStatus,
    WriteStatus,
    admin,
    connect,
)
from kvpool.client.pool import Pool
from kvpool.errors import Forbidden, Unauthenticated, UsageError
from kvpool.guard import Guard
from kvpool.net.control_network import TcpNetwork
from kvpool.ops.metrics import pages_of_master
from kvpool.tenants import TenantKeys
from kvpool.types import Namespace, ServerStats
from kvpool.wire.access import TENANT_MAY, Access, check_access, names_of
from tests.conftest import buffers, eventually, keys, values
from tests.support import messages as wire
from tests.support.raw_peers import REGISTER, ask, frame, payload, raw
from tests.support.tenant_pool import (
    MODEL,
    OF_ACME,
    OPERATOR,
    TenantPool,
    reserve,
    tenant,
    tenant_pool,
)

BY_NAME = {kind.__name__: kind for kind in wire.TYPES}
CHAIN = keys("tenants", 4)
PACKED = b"".join(CHAIN)
ACME = {"namespace": OF_ACME.name, "parts": 1, "digest_size": 32, "digests": PACKED}
TOKEN = bytes(16)


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[TenantPool]:
    async with tenant_pool(tmp_path) as pool:
        yield pool


@pytest.fixture
async def acme(pool: TenantPool) -> AsyncIterator[Pool]:
    """The victim, which has written CHAIN in a session."""
    async with await pool.client(tenant("acme")) as acme:
        statuses = await acme.write(MODEL, CHAIN, values(CHAIN), session="chat")
        assert statuses == [WriteStatus.STORED] * 4
        yield acme


@pytest.fixture
async def blue(pool: TenantPool, acme: Pool) -> AsyncIterator[Pool]:
    async with await pool.client(tenant("blue")) as blue:
        yield blue


# --- the table ------------------------------------------------------------------------------


def test_every_message_has_a_row() -> None:
    assert TENANT_MAY.keys() == BY_NAME.keys()


def test_what_names_something_is_no_row_of_those_that_name_nothing() -> None:
    for name, access in TENANT_MAY.items():
        fields = {field.name for field in msgspec.structs.fields(BY_NAME[name])}
        names = fields & {"namespace", "session", "sessions"}
        assert access is not Access.ANSWERED or not names, name
        assert access is not Access.OWN or names, name
    # A new field that has a name in it must be known to `names_of`.
    texts = {
        field.name
        for name, access in TENANT_MAY.items()
        if access in (Access.OWN, Access.ANSWERED)
        for field in msgspec.structs.fields(BY_NAME[name])
        if "str" in str(field.type)
    }
    assert texts == {"namespace", "session", "host", "source", "after"}


def test_an_unknown_message_is_for_operators() -> None:
    class New(wire.Message, frozen=True):
        pass

    check_access("", New())
    with pytest.raises(Forbidden):
        check_access("acme", New())


def test_both_names_of_a_message_are_checked() -> None:
    own = wire.Find(**ACME, prefix=True, session="@acme/chat")
    assert list(names_of(own)) == ["@acme/llama", "@acme/chat"]
    check_access("acme", own)
    check_access("acme", wire.Find(**ACME, prefix=True))
    for foreign in ("chat", "@blue/chat", "@acme", "@acm/chat", "@acme2/chat", " @acme/chat"):
        with pytest.raises(Forbidden):
            check_access("acme", wire.Find(**ACME, prefix=True, session=foreign))
        with pytest.raises(Forbidden):
            check_access("acme", wire.Find(**{**ACME, "namespace": foreign}, prefix=True))


def test_a_process_without_tenants_takes_no_secrets_of_theirs_and_answers_none() -> None:
    with pytest.raises(ConfigError, match="runs without tenants"):
        Guard(TenantKeys())  # of an empty file, too
    guard = Guard(None)
    assert guard.secrets_of("acme") == guard.secrets_of("") == ()
    guard.check("", wire.Members())
    with pytest.raises(Forbidden):
        guard.check("acme", wire.Members())


# --- the data plane -------------------------------------------------------------------------

DATA_PLANE = [
    wire.Read(**ACME, part=0, buffer_sizes=[1 << 20] * 4),
    wire.Reserve(**ACME, part=0, parents=bytes(32 * 4), sizes=[64] * 4, wait_s=1.0),
    msgspec.structs.replace(reserve("@blue/llama", CHAIN[0]), session="@acme/chat"),
    wire.Remove(**ACME),
    wire.Remove(**ACME, part=0, checksums=[0] * 4),
    wire.RemoveAll("@acme/llama", 1, (0, 1 << 40, 0, 0, 0)),
    wire.Remove(**ACME, part=0, corrupt=True),
    wire.Fetch(**ACME, part=0, source="s", wait_s=1.0),
    wire.Prefetch(**ACME, part=0),
    wire.Propose(**ACME, part=0, receiver="s"),
    wire.Drain(),
    wire.Drain(begin=True, within_s=1.0),
]


@pytest.mark.parametrize("message", DATA_PLANE, ids=lambda m: type(m).__name__)
async def test_a_server_does_nothing_with_blocks_of_others(
    pool: TenantPool, acme: Pool, message: wire.Message
) -> None:
    before = pool.server.stats(0.0)
    async with pool.raw(tenant("blue")) as peer:
        await peer.send(frame(message))
        assert await peer.refusal() == "Forbidden"
    after = pool.server.stats(0.0)
    assert (after.used, after.blocks, after.draining) == (before.used, before.blocks, False)
    assert after.counters["forbidden_requests"] == 1
    assert after.counters.get("read_blocks", 0) == before.counters.get("read_blocks", 0)
    got = buffers(4)
    assert all(one.status.hit for one in await acme.read(MODEL, CHAIN, got))
    assert got == values(CHAIN)


async def test_a_reservation_of_another_cannot_be_sealed(pool: TenantPool) -> None:
    """Ids are numbers that one can guess; they are good on their own connection only."""
    digest = keys("seal", 1)
    async with pool.raw(tenant("acme")) as victim, pool.raw(tenant("blue")) as thief:
        theirs = await victim.ask(reserve("@acme/llama", digest[0]), wire.Reserved)
        mine = await thief.ask(reserve("@blue/llama", digest[0]), wire.Reserved)
        await thief.send(payload(64))
        await thief.send(frame(wire.Seal(theirs.ids, [0], False, 0.5)))
        assert await thief.refusal() == "BadMessage"
        assert mine.ids != theirs.ids
        assert pool.server.store.index.peek(OF_ACME, 0, digest[0]) is None
        await victim.send(payload(64))
        sealed = await victim.ask(wire.Seal(theirs.ids, [0], False, 0.5), wire.StatusReply)
        assert list(sealed.statuses) == [WriteStatus.STORED]


async def test_an_unpin_ends_only_what_its_own_connection_has_pinned(
    pool: TenantPool, acme: Pool
) -> None:
    """`Unpin` names no block, so there is none of another that it could name."""
    assert set(wire.Unpin.__struct_fields__) == {"confirm"}
    (held,) = pool.server.store.pin(
        999_999, OF_ACME, 0, CHAIN[:1], asyncio.get_running_loop().time(), [1 << 20]
    )
    assert held.extent is not None
    async with pool.raw(tenant("blue")) as peer:
        await peer.send(frame(wire.Unpin(confirm=True)))
        await peer.refusal()
    assert pool.server.store.held.pins == 1
    pool.server.store.unpin(999_999, held.id)


async def test_a_name_of_another_client_takes_no_share_of_its_connections(
    pool: TenantPool, acme: Pool
) -> None:
    async with pool.raw(tenant("blue")) as peer:
        await peer.ask(reserve("@blue/llama", CHAIN[0]), wire.Reserved)
        assert [one.name for one in pool.server.stats(0.0).clients] == ["@blue/raw"]
        shares = pool.server._context.clients.shares
        assert shares.held("@blue/") == 1
        assert shares.held("raw") == 0


# --- the control plane ----------------------------------------------------------------------

CONTROL_PLANE = [
    wire.Find(**ACME, prefix=True),
    wire.Find(**{**ACME, "namespace": "@blue/llama"}, prefix=True, session="@acme/chat"),
    wire.Find(**ACME, prefix=True, before=bytes(8)),
    wire.Place(**ACME, parent=b"", size=64, host="h", copies=1),
    wire.Place("@blue/llama", 1, 32, PACKED, b"", 64, "h", 1, session="@acme/chat"),
    wire.Explain(**ACME),
    wire.Hint("@acme/chat", None),
    wire.Hint("chat", 0.0),
    wire.ExplainSession("@acme/chat"),
    wire.Changes(1, 0),
    wire.Snapshot(),
    wire.Snapshot("@acme/llama", 1),
    REGISTER,
    wire.Heartbeat("s", 1, TOKEN, ServerStats()),
    wire.Leave("s", 1, TOKEN),
    wire.Announce("s", 1, TOKEN, 1, []),
    wire.Inventory("s", 1, TOKEN, 1, 0, True, []),
]


@pytest.mark.parametrize("message", CONTROL_PLANE, ids=lambda m: type(m).__name__)
async def test_a_master_tells_nothing_of_others(
    pool: TenantPool, acme: Pool, message: wire.Message
) -> None:
    with pool.link(tenant("blue")) as link, pytest.raises(Forbidden):
        await ask(link, message, wire.Error)
    name = type(message).__name__.lower()
    assert pool.master.refusals[f"forbidden {name}"] == 1
    assert [one.alive for one in await acme.members()] == [True]
    report = await acme.session("chat").explain()
    assert report.hints == []


async def test_lists_have_what_is_the_tenants_own(pool: TenantPool, blue: Pool, acme: Pool) -> None:
    await blue.write(Namespace("mistral"), CHAIN[:2], values(CHAIN[:2]))
    assert await admin(acme).namespaces() == [(MODEL, 4)]
    assert await admin(blue).namespaces() == [(Namespace("mistral"), 2)]
    async with await pool.client(OPERATOR) as operator:
        found = await admin(operator).namespaces()
        assert found == [(OF_ACME, 4), (Namespace("@blue/mistral"), 2)]
        await operator.write(MODEL, CHAIN[:1], values(CHAIN[:1]))
    assert await admin(acme).namespaces() == [(MODEL, 4)]
    (explained,) = await admin(blue).explain(Namespace("mistral"), CHAIN[:1])
    assert explained.key.namespace == Namespace("mistral")
    pool.master.clients.partial = False  # it has heard of all
    (unknown,) = await admin(blue).explain(Namespace("mistra"), CHAIN[:1])
    assert "mistral" in unknown.text
    assert "@blue" not in unknown.text  # a tenant writes its names without it


async def test_a_list_is_not_cut_off_by_what_others_have(pool: TenantPool, acme: Pool) -> None:
    """A page of a master's list could be full of names that this tenant may not see."""
    async with await pool.client(OPERATOR) as operator:
        many = [Namespace(f"0{number:04}") for number in range(wire.NAMESPACES_MAX + 2)]
        for first in range(0, len(many), 32):  # within their deadline, also on a busy machine
            part = many[first : first + 32]
            await asyncio.gather(*(operator.write(one, CHAIN[:1], [bytearray(1)]) for one in part))
        assert len(await admin(operator).namespaces()) == len(many) + 1
    assert await admin(acme).namespaces() == [(MODEL, 4)]


async def test_demand_is_that_for_the_tenants_own(pool: TenantPool, blue: Pool, acme: Pool) -> None:
    for _ in range(3):
        await acme.match(MODEL, CHAIN)
    async with await pool.client(OPERATOR) as operator:
        assert [one.namespace for one in (await admin(operator).demand()).working_sets] == [OF_ACME]
        assert (await admin(operator).demand()).chain_servers > 0
    assert [one.namespace for one in (await admin(acme).demand()).working_sets] == [MODEL]
    theirs = await admin(blue).demand()
    assert (theirs.working_sets, theirs.chain_servers, theirs.beyond_hole) == ((), 0.0, 0.0)


async def test_figures_of_servers_are_hidden(pool: TenantPool, blue: Pool, acme: Pool) -> None:
    await eventually(
        lambda: next(iter(pool.master.directory.servers.members(0.0))).stats.blocks == 4
    )
    (member,) = await blue.members()
    assert member.stats == ServerStats()
    assert member.capacity == 4 << 20
    async with await pool.client(OPERATOR) as operator:
        (member,) = await operator.members()
        assert member.stats.blocks == 4


async def test_events_are_not_for_tenants(blue: Pool) -> None:
    with pytest.raises(UsageError, match="events are of the whole pool"):
        blue.events()


async def test_users_of_two_tenants_may_use_the_same_names(
    pool: TenantPool, blue: Pool, acme: Pool
) -> None:
    """And get their own bytes: nothing that either of them does touches the other's."""
    assert (await blue.match(MODEL, CHAIN)).length == 0
    assert [r.status for r in await blue.read(MODEL, CHAIN, buffers(4))] == [
        ReadStatus.NEVER_WRITTEN
    ] * 4
    other = [bytearray(b"b" * len(value)) for value in values(CHAIN)]
    assert await blue.write(MODEL, CHAIN, other, session="chat") == [WriteStatus.STORED] * 4
    assert await blue.session("chat").end() is True
    assert (await acme.session("chat").explain()).hints == []
    assert await blue.remove(MODEL, CHAIN) == [True] * 4
    got = buffers(4)
    assert all(one.status.hit for one in await acme.read(MODEL, CHAIN, got))
    assert got == values(CHAIN)
    assert (await blue.match(MODEL, CHAIN)).length == 0


async def test_a_foreign_prefix_is_like_an_unknown_one(
    pool: TenantPool, blue: Pool, acme: Pool
) -> None:
    """What `blue` asks about, `acme` has: the answers are those about what nobody has, word for
    word, and the same work is done for both."""
    unknown = keys("nobody has these", 4)
    for chain in (CHAIN, unknown):
        assert await acme.where(MODEL, chain) is not None
    (explained,), (of_unknown,) = (
        await admin(blue).explain(MODEL, CHAIN[:1]),
        await admin(blue).explain(MODEL, unknown[:1]),
    )
    assert (explained.status, explained.replicas) == (of_unknown.status, of_unknown.replicas)
    assert explained.text == of_unknown.text
    assert await blue.match(MODEL, CHAIN) == await blue.match(MODEL, unknown)
    assert await blue.where(MODEL, CHAIN) == await blue.where(MODEL, unknown)
    assert await blue.remove(MODEL, CHAIN) == await blue.remove(MODEL, unknown)
    assert await blue.write(MODEL, CHAIN, values(CHAIN)) == [WriteStatus.STORED] * 4
    assert await blue.write(MODEL, unknown, values(unknown)) == [WriteStatus.STORED] * 4


# --- who is who -----------------------------------------------------------------------------


async def test_a_master_made_by_a_tenant_is_not_believed() -> None:
    """It knows the hash of the masters' certificate and a tenant's secret; a client asks for the
    certificate."""
    # The best that it can do: to say that it knows each tenant's secret.
    keys = TenantKeys()
    keys.replace({name: (tenant("blue").secret,) for name in ("acme", "blue")})
    network = TcpNetwork(Cluster("default", tenant("blue").secret), keys)
    asked: list[int] = []
    impostor = await network.serve(
        "127.0.0.1:0", lambda type, body, _: (asked.append(type) or type, body)
    )
    for victim in (tenant("acme"), tenant("blue"), OPERATOR):
        config = ClientConfig(masters=[impostor.address], timeout_s=0.5)
        with pytest.raises(MasterLost):
            await connect(config=config, cluster=victim)
    assert not asked
    network.close()


@pytest.mark.parametrize("secret", [b"0123456789abcdef-wrong", OPERATOR.secret])
async def test_a_wrong_secret_opens_neither_plane(pool: TenantPool, secret: bytes) -> None:
    wrong = tenant("acme", secret)
    with pytest.raises(MasterLost):
        await pool.client(wrong, timeout_s=0.5)
    with pytest.raises(Unauthenticated):
        async with pool.raw(wrong):
            pass


async def test_the_secret_of_one_tenant_is_no_proof_for_another(pool: TenantPool) -> None:
    """Nor does anybody without a tenant's name come in with it."""
    for name in ("acme", "", "nobody"):
        posing = tenant("blue")._replace(tenant=name)
        with pytest.raises(Unauthenticated):
            async with pool.raw(posing):
                pass


async def test_who_was_refused_by_masters_is_on_record(
    pool: TenantPool, caplog: pytest.LogCaptureFixture
) -> None:
    for posing in (tenant("blue", b"0123456789abcdef-wrong"), tenant("blue")._replace(tenant="x")):
        why = "the key of this tenant is still valid"
        with pool.link(posing) as link, pytest.raises(Unauthenticated, match=why):
            await ask(link, wire.Members(), wire.MembersReply)
    (line,) = [one for one in caplog.records if one.message.startswith("connection closed")]
    assert (line.transport, line.peer) == ("control plane", "127.0.0.1")  # type: ignore[attr-defined]
    assert pool.master.refused_connections >= 1
    page = pages_of_master(pool.master)["/metrics"]()
    (shown,) = [
        text
        for text in page.body.decode().splitlines()
        if text.startswith("kvpool_master_refused_connections_total")
    ]
    assert float(shown.split()[1]) == pool.master.refused_connections


async def test_half_a_handshake_opens_nothing(pool: TenantPool) -> None:
    """Without the secret there is not even the server's proof, which one could try guesses on."""
    for key in (b"", bytes(8)):
        async with raw(pool) as peer:  # type: ignore[arg-type]
            await peer.send(frame(wire.Hello("default", "raw", bytes(32), False, "acme", key)))
            assert await peer.refusal() == "Unauthenticated"
