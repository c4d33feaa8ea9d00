"""What a channel and a transport pass on, and how long they may keep it: every status and refusal,
every deadline, who calls, what a server sees of its clients, and what a transport declares.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from kvpool import removals
from kvpool.errors import (
    BadMessage,
    ConfigError,
    DeadlineExceeded,
    Forbidden,
    KvpoolError,
    Overloaded,
    PeerError,
    Unavailable,
)
from kvpool.guard import Guard
from kvpool.protocols import (
    Channel,
    OverFabric,
    Peer,
    ReadOptions,
    RequiresCertificates,
    SupportsReachability,
    SupportsStatusText,
    SupportsZeroCopyView,
)
from kvpool.protocols.transport import ClientLink
from kvpool.tenant_names import marker_of
from kvpool.testing.harness import (
    CLUSTER,
    LARGE,
    NAMESPACE,
    NotDeclared,
    Stage,
    TransportCheck,
    blank,
    blocks,
    describe,
    digest,
)
from kvpool.types import Cluster, Namespace, Pin, ReadBlock, ReadStatus, Reservation, WriteStatus

#: The deadline of a call that nobody answers.
_SHORT_S: Final = 0.15


def instead(stage: Stage, **calls: Callable[..., Any]) -> None:
    """Connections of the server that are made from now on answer so."""
    connect = stage.recorder.connect

    def changed(peer: Peer) -> Any:
        connection = connect(peer)
        for name, call in calls.items():
            setattr(connection, name, call)
        return connection

    stage.recorder.connect = changed  # type: ignore[method-assign]


async def _never(*_: object, **__: object) -> Any:
    await asyncio.Event().wait()


#: Each is begun by whoever awaits it.
Calls: TypeAlias = dict[str, Callable[[], Awaitable[object]]]


def waiting(channel: Channel, stage: Stage, within_s: float) -> Calls:
    """One call of each kind for which a server may take its time, but for those of `every_call`."""
    until = stage.within(within_s)
    block = ReadBlock(digest("waits"), (memoryview(blank(9)),), 9)
    options = ReadOptions(NAMESPACE, 0)
    return {
        "read": lambda: channel.read(options, [block], deadline=until),
        "Remove": lambda: removals.remove(channel, NAMESPACE, [block.digest], deadline=until),
    }


# --- what a server says ------------------------------------------------------------------------


@TransportCheck
async def every_status_arrives(stage: Stage) -> None:
    """Whatever the server says of a block, its caller hears: nothing is left out, or turned into
    something else."""
    clients_own = {"SERVER_LOST", "NO_MASTER", "RESERVED", "STORED", "HIT"}
    misses = [one for one in ReadStatus if one.name not in clients_own]
    outcomes = [one for one in WriteStatus if one.name not in clients_own]

    async def pin(*_: object, **__: object) -> list[Pin]:
        return [Pin(status) for status in misses]

    async def reserve(*_: object, **__: object) -> list[Reservation]:
        return [Reservation(status) for status in outcomes]

    instead(stage, pin=pin, reserve=reserve)
    stage.recorder.at_once_max = 0
    channel = await stage.connect()
    keys = [digest(number) for number in range(len(misses))]
    results = await stage.read(channel, keys, [blank(9) for _ in keys])
    stage.expect([r.status for r in results] == misses, f"{misses}", describe(results))
    keys = [digest(number) for number in range(len(outcomes))]
    statuses = await stage.write(channel, dict.fromkeys(keys, b"a block"))
    stage.expect(statuses == outcomes, f"{outcomes}", describe(statuses))


def _refusable(stage: Stage, channel: Channel) -> Calls:
    """One call of each kind that a server may refuse, by its name there."""
    keys, until = [digest("refused")], stage.within()
    calls = waiting(channel, stage, 10.0)
    calls["pin"] = calls.pop("read")
    calls["a report of corruption"] = lambda: removals.report_corruption(
        channel, NAMESPACE, 0, keys, deadline=until
    )
    return calls


@TransportCheck
async def a_refusal_arrives_unchanged(stage: Stage) -> None:
    """Its class, which says what to do next, and its words; and each call is made once."""
    recorder = stage.recorder
    for error in (Overloaded("not now: 7 of 7"), Forbidden("not yours"), BadMessage("no block")):
        channel = await stage.connect()
        recorder.refuse_others = error
        for name, call in _refusable(stage, channel).items():
            recorder.refused.clear()
            got = await stage.raises(type(error), call(), f"a refused `{name}`")
            same = type(got) is type(error) and str(error) in str(got)
            stage.expect(same, f"{error!r} from a refused `{name}`", describe(got))
            count = len(recorder.refused)
            stage.expect(count == 1, f"one `{name}`", f"the server was asked {count} times")
        recorder.refuse_others = None
        await channel.close()


# --- how long it takes -------------------------------------------------------------------------


@TransportCheck
async def every_call_ends_by_its_deadline(stage: Stage) -> None:
    """Reads, and all that an operator asks for, where the server does not answer."""
    instead(stage, pin=_never, answer=_never)
    for name in waiting(await stage.connect(), stage, 1.0):
        channel = await stage.connect()
        started = stage.within(0)
        call = asyncio.ensure_future(waiting(channel, stage, _SHORT_S)[name]())
        (outcome,) = await stage.promptly([call], f"by its deadline: `{name}`")
        late = isinstance(outcome, DeadlineExceeded)
        stage.expect(late, f"DeadlineExceeded from `{name}`", describe(outcome))
        took = stage.within(0) - started
        stage.expect(took > _SHORT_S / 2, "the server to be given its time", f"{took:.3f} s")
    channel = await stage.connect()
    if isinstance(channel, SupportsZeroCopyView):
        options, until = ReadOptions(NAMESPACE, 0), stage.within(_SHORT_S)
        view = channel.read_view(options, [digest("waits")], deadline=until)
        looking = asyncio.ensure_future(view.__aenter__())
        (outcome,) = await stage.promptly([looking], "by its deadline: `read_view`")
        late = isinstance(outcome, DeadlineExceeded)
        stage.expect(late, "DeadlineExceeded from `read_view`", describe(outcome))


class _Heard:
    """An `IdleTimeout` that writes down what it is told."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def touch(self) -> None:
        self.events.append("touch")

    def rest(self) -> None:
        self.events.append("rest")

    def disarm(self) -> None:
        self.events.append("disarm")


@TransportCheck
async def a_read_shows_that_it_goes_on(stage: Stage) -> None:
    """Each part that arrives is a `touch`, and what is left after `disarm` is local; a server that
    says nothing is not heard."""
    gate = asyncio.Event()
    gate.set()
    connect = stage.recorder.connect

    def watched(peer: Peer) -> Any:
        connection: Any = connect(peer)
        inner = connection.pin

        async def pin(*asked: Any, **options: Any) -> Any:
            await gate.wait()
            return await inner(*asked, **options)

        connection.pin = pin
        return connection

    stage.recorder.connect = watched  # type: ignore[method-assign]
    channel = await stage.connect()
    data = blocks("heard", 3, LARGE)
    await stage.stored(channel, data)
    for again in ("once", "and again"):
        heard = _Heard()
        wanted = [ReadBlock(k, (memoryview(blank(LARGE)),), LARGE) for k in data]
        options = ReadOptions(NAMESPACE, 0, idle_timeout=heard)
        await channel.read(options, wanted, deadline=stage.within())
        events = heard.events
        stage.expect(bool({"touch", "disarm"} & set(events)), f"a `touch`, {again}", events)
        local = events[events.index("disarm") :] if "disarm" in events else []
        stage.expect("touch" not in local, "nothing to arrive after `disarm`", events)
    gate.clear()
    heard = _Heard()
    reading = asyncio.ensure_future(
        channel.read(options._replace(idle_timeout=heard), wanted, deadline=stage.within())
    )
    await asyncio.sleep(0.02)
    before = heard.events.count("touch")
    await asyncio.sleep(0.05)
    now = heard.events.count("touch")
    stage.expect(now == before, "no `touch` while the server is silent", f"{now - before}")
    gate.set()
    await reading


# --- who calls ---------------------------------------------------------------------------------


@TransportCheck
async def a_server_knows_who_calls(stage: Stage) -> None:
    """The scheme, and the address of the client's host without a port; nothing is proved."""
    await stage.stored(await stage.connect(), blocks("who", 1, 100))
    for peer in stage.recorder.peers:
        scheme = peer.transport in ("", stage.transport.scheme)
        stage.expect(scheme, f"{stage.transport.scheme!r}", describe(peer.transport))
        plain = not peer.address or _is_host(peer.address)
        stage.expect(plain, "an IP address, a network of 64 bits, or none", describe(peer.address))
        stage.expect(peer.proved is None, "nobody's proof", "one")


def _is_host(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_network(address, strict=False).prefixlen in (32, 64, 128)
    return False


class _AcmeGuard(Guard):
    """Of a pool with one tenant."""

    def __init__(self) -> None:
        super().__init__(None)

    def secrets_of(self, tenant: str) -> tuple[bytes, ...]:
        return (b"acme's own",) if tenant == "acme" else ()

    def check(self, tenant: str, request: Any) -> None:
        if not request.namespace.startswith(marker_of(tenant)):
            raise Forbidden("it is another tenant's")


@TransportCheck
async def a_tenants_client_is_known_or_refused(stage: Stage) -> None:
    """One that proves a tenant's secret is that tenant's to the server, or gets a PeerError; one
    with another secret gets a PeerError, and so does one that asks for what is not its own, of
    which the server hears."""
    heard: list[str] = []
    stage.recorder.forbidden = lambda peer, *_: heard.append(peer.tenant)  # type: ignore
    stage.recorder.guard = _AcmeGuard()
    stage.recorder.cluster = CLUSTER._replace(secret=b"the cluster's")
    theirs, mine = Namespace("@globex/model"), Namespace("@acme/model")

    async def call(cluster: Cluster, namespace: Namespace) -> object:
        channel = await stage.connect(cluster=cluster)
        return await stage.read(channel, [digest(1)], [blank(9)], namespace=namespace)

    right = Cluster(CLUSTER.name, b"acme's own", "acme")
    (outcome,) = await asyncio.gather(call(right, mine), return_exceptions=True)
    if not isinstance(outcome, PeerError):
        stage.expect(isinstance(outcome, list), "an answer, or a PeerError", describe(outcome))
        known = {peer.tenant for peer in stage.recorder.peers}
        stage.expect(known == {"acme"}, "a client of the tenant 'acme'", describe(known))
        await stage.raises(PeerError, call(right, theirs), "asking for another tenant's block")
        stage.expect(heard == ["acme"], "the server to hear once, of 'acme'", describe(heard))
    stage.recorder.peers.clear()
    for wrong in (
        right._replace(secret=b"another one"),
        right._replace(secret=b""),
        right._replace(tenant="globex"),
    ):
        await stage.raises(PeerError, call(wrong, mine), f"{wrong.tenant} with a wrong secret")
    stage.expect(not stage.recorder.peers, "nobody to be served", describe(stage.recorder.peers))


@TransportCheck
async def a_closed_listener_has_no_connection(stage: Stage) -> None:
    """When `close` returns, not some time after: then the memory may be somebody else's."""
    listener = await stage.listen()
    channels = [await stage.connect(listener.address) for _ in range(3)]
    await stage.stored(channels[0], blocks("before", 2, LARGE))
    stage.recorder.answering.clear()
    writing = asyncio.ensure_future(stage.write(channels[1], blocks("running", 2, LARGE)))
    await stage.eventually(
        lambda: stage.store.held.reservations == 2, "the write to be heard", lambda: "it was not"
    )
    await listener.close()
    left = len(stage.recorder.open), stage.store.held.reservations
    stage.expect(left == (0, 0), "no connection and no reservation", describe(left))
    stage.recorder.answering.set()
    await stage.promptly([writing], "when its server has closed")


# --- the server's end of a connection -----------------------------------------------------------


def _links(stage: Stage) -> list[ClientLink]:
    links = [peer.link for peer in stage.recorder.peers if peer.link is not None]
    if not links:
        raise NotDeclared("the server has no hold of this transport's connections")
    return links


@TransportCheck
async def a_server_sees_whether_a_client_is_idle(stage: Stage) -> None:
    """Since when it has asked for nothing; not while it does. An idle one can be sent away."""
    channel = await stage.connect()
    await stage.stored(channel, blocks("idle", 1, 100))
    links = _links(stage)
    await stage.eventually(
        lambda: all(link.idle_since() is not None for link in links),
        "a time since which the client is idle",
        lambda: [link.idle_since() for link in links],
    )
    times = [link.idle_since() for link in links]
    now = stage.within(0)
    fine = all(one is not None and now - 5.0 <= one <= now for one in times)
    stage.expect(fine, f"times of the loop's clock up to {now}", describe(times))
    before = [link.progress() for link in links]
    await asyncio.sleep(0.02)
    same = [link.progress() for link in links] == before
    stage.expect(same, "no progress while only the client could make some", "some")
    stage.recorder.answering.clear()
    writing = asyncio.ensure_future(stage.write(channel, blocks("busy", 1, 100)))
    await stage.eventually(
        lambda: stage.store.held.reservations == 1, "the write to be heard", lambda: "it was not"
    )
    busy = [link.idle_since() for link in _links(stage)]
    stage.expect(None in busy, "one that is not idle while it writes", describe(busy))
    stage.recorder.answering.set()
    await writing
    for link in _links(stage):
        link.retire()
    await stage.eventually(
        lambda: not stage.recorder.open,
        "a connection that was retired to be closed",
        lambda: f"{len(stage.recorder.open)} are open",
    )


@TransportCheck
async def a_server_may_hang_up(stage: Stage) -> None:
    """Its client's next call ends with the reason or with Unavailable, and all is closed."""
    channel = await stage.connect()
    data = blocks("before", 1, 100)
    await stage.stored(channel, data)
    for link in _links(stage):
        link.hang_up(Overloaded("this client does not read"))
    await stage.eventually(
        lambda: not stage.recorder.open, "no connection", lambda: f"{len(stage.recorder.open)} left"
    )
    reading = asyncio.ensure_future(stage.read(channel, list(data), [blank(100)]))
    (outcome,) = await stage.promptly([reading], "when its server has hung up")
    fine = isinstance(outcome, Overloaded | Unavailable | list)
    stage.expect(fine, "Overloaded, Unavailable, or a new connection", describe(outcome))
    await stage.nothing_held("after the server has hung up")


# --- what a transport declares -------------------------------------------------------------------


@TransportCheck
async def what_a_transport_declares_is_so(stage: Stage) -> None:
    """Its capabilities: an address that it can reach, and words for an operator."""
    await stage.connect()
    for transport in (stage.transport, stage.client_transport):
        for flag in ("same_host", "authenticated"):
            value = getattr(transport, flag)
            stage.expect(isinstance(value, bool), f"`{flag}` to be a bool", describe(value))
        if isinstance(transport, SupportsReachability):
            reached = transport.can_reach(stage.address)
            stage.expect(reached is True, f"{stage.address} to be reached: it just was", reached)
        if isinstance(transport, SupportsStatusText):
            text: object = _text(transport)
            fine = isinstance(text, str) and bool(text.strip()) and text.isprintable()
            stage.expect(fine, "a few words in one line, or ConfigError", describe(text))
        if isinstance(transport, RequiresCertificates):
            value = transport.requires_certificates
            stage.expect(isinstance(value, bool), "whether it asks for them", describe(value))
        if isinstance(transport, OverFabric):
            value = transport.has_fabric
            stage.expect(isinstance(value, bool), "whether there is one", describe(value))


def _text(transport: SupportsStatusText) -> object:
    try:
        return transport.status_text
    except ConfigError as error:
        return str(error)
    except KvpoolError as error:
        return error
