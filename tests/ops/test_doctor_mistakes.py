"""Mistakes that people make with a pool, planted one by one: `kvpool doctor` names each, and says
what to do about it.

A row: how it is planted, the check that finds it, its verdict, and words of text and advice.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest

from kvpool import ClientConfig, ServerConfig, dev, registry
from kvpool.config import Config
from kvpool.memory_limits import Limit
from kvpool.ops import doctor, own_host, pool_health, unreachable_master
from kvpool.ops.engine_json import ExaminedJson, examine_json
from kvpool.ops.engines import examine_engines
from kvpool.ops.finding import Finding
from kvpool.runtime import host_id
from kvpool.tools.subprocesses import process_of
from kvpool.types import ClientUsage, Cluster, Demand, Namespace, ServerStats, TierUsage, WorkingSet
from kvpool_transports.tcp import TcpTransport
from tests.conftest import patient, soon
from tests.net.test_secret import pool_of
from tests.net.test_versions import THEIRS
from tests.ops.test_doctor import member, settings
from tests.support.commands import kvpool
from tests.support.programs import RunningPrograms, free_address
from tests.support.tenant_pool import OPERATOR, TenantPool, key_file

SECRET = b"0123456789abcdef-the-secret"
OPEN = Cluster()
GIB = 1 << 30
USUAL, SLOW = ClientConfig(), ClientConfig(timeout_s=1.0, attempt_s=1.0)
MANY = {"connections": 900, "connections_max": 1024}
LIMITS = ("memory", "huge_pages", "locked")
BLIND, TWICE = ClientConfig(verify=False), ClientConfig(masters=["a:1", "a:1"])


class Place:
    """Where a mistake is planted."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, stack: AsyncExitStack) -> None:
        self.folder, self.patch, self.stack = folder, patch, stack

    def secret(self, content: bytes = SECRET) -> str:
        path = self.folder / "secret"
        path.write_bytes(content)
        path.chmod(0o600)
        return str(path)

    async def pool(self, cluster: Cluster = OPEN) -> dev.Dev:
        return await self.stack.enter_async_context(pool_of(cluster))

    async def web_server(self) -> str:
        """The address of one."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nno master")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1")
        await self.stack.enter_async_context(server)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def master(self, address: str, **settings: Any) -> list[Finding]:
        """What it says of one master; a client of a pool over tcp."""
        config = Config(client=ClientConfig(masters=[address], transports=["tcp"]), **settings)
        return [await doctor._master(config, address)]

    def server(
        self, *tiers: str, client: ClientConfig = USUAL, **settings: Any
    ) -> Iterable[Finding]:
        settings["tiers"] = [one.replace("DIR", str(self.folder)) for one in tiers]
        return own_host.examine_settings(Config(server=ServerConfig(**settings), client=client))


Found = Iterable[Finding]
Plant = Callable[[Place], Awaitable[Found] | Found]


class Mistake(NamedTuple):
    plant: Plant
    check: str
    verdict: str
    text: str
    advice: str


MISTAKES: dict[str, Mistake] = {}


def mistake(check: str, verdict: str, text: str, advice: str) -> Callable[[Plant], Plant]:
    def entered(plant: Plant) -> Plant:
        name = plant.__name__.replace("_", " ")
        assert name not in MISTAKES
        MISTAKES[name] = Mistake(plant, check, verdict, text, advice)
        return plant

    return entered


# --- masters that are not reached: real sockets, clients and masters ------------------------------


def at(address: str) -> Plant:
    return lambda place: place.master(address)


SAME = "the same secret_file"
#: What is said of them is said of a master.
SETTINGS: dict[str, tuple[Plant, str, str]] = {
    "no such name": (at("nowhere.invalid:7450"), "name nowhere.invalid does not resolve", "DNS"),
    "every address": (at("0.0.0.0:7450"), "no address of one", "the address of its host"),
    "a URL": (at("http://127.0.0.1:7450"), "http:// is no scheme", "give 127.0.0.1:7450"),
}
for name, (planted, *said) in SETTINGS.items():
    MISTAKES[name] = Mistake(planted, "master", "fail", *said)


@mistake("master", "fail", "has no secret, but this process has one", SAME)
async def a_secret_that_the_master_was_not_given(place: Place) -> Iterable[Finding]:
    return await place.master((await place.pool()).address, secret_file=place.secret())


@mistake("master", "fail", "certificate is not that of the masters", "every master with --tenants")
async def a_tenant_of_a_master_that_was_given_no_tenants(place: Place) -> Iterable[Finding]:
    pool = await place.pool(OPERATOR)
    return await place.master(pool.address, secret_file=str(key_file(place.folder, "acme")))


@mistake("master", "fail", "key of this tenant is still valid", "each master the same tenants file")
async def a_master_with_an_older_tenants_file(place: Place) -> Iterable[Finding]:
    pool = TenantPool(place.folder)
    pool.write_tenants(only="blue")
    await pool.start({"tcp": TcpTransport()}, listen=["tcp://127.0.0.1:0"])
    place.stack.push_async_callback(pool.close)
    return await place.master(pool.master.address, secret_file=str(key_file(place.folder, "acme")))


@mistake("master", "fail", "run the same release", "do as it says")
async def another_release(place: Place) -> Iterable[Finding]:
    started = process_of(*THEIRS, "master", "--bind", "127.0.0.1:0")
    theirs = await place.stack.enter_async_context(started)
    return await place.master((await theirs.line()).removeprefix("master at "))


@mistake("master", "fail", "nothing listens there", "start it: kvpool master --bind 127.0.0.1:")
async def no_master(place: Place) -> Iterable[Finding]:
    return await place.master(free_address())


@mistake("master", "fail", "nothing comes back", "firewall")
async def a_firewall_that_drops(place: Place) -> Iterable[Finding]:
    full = place.stack.enter_context(socket.socket())  # its queue is full: packets get no answer
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    for _ in range(4):
        waiting = place.stack.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(full.getsockname())
    return await place.master(f"127.0.0.1:{full.getsockname()[1]}")


# --- servers: real ones, or their figures ---------------------------------------------------------


@mistake("server s", "fail", "no block was tried: it has ", "--transport")
async def no_transport_in_common(place: Place) -> Iterable[Finding]:
    masters = [(await place.pool()).address]
    config = Config(client=ClientConfig(masters=masters, transports=["ucx"]))
    place.patch.setattr(registry, "transports", lambda *_, **__: {})
    return await doctor._pool(config)


@mistake("server s over tcp", "fail", "", "firewalls")
async def the_port_of_a_server_is_closed(place: Place) -> Iterable[Finding]:
    pool = await place.pool()
    for listener in pool.servers[0]._listeners:
        await listener.close()
    return await doctor._pool(settings(pool.address))


@mistake("server id", "fail", "of another host, which is up", "choose another one")
async def an_id_twice(place: Place) -> Iterable[Finding]:
    (server,) = (await place.pool()).servers
    here = member(server.server, host=host_id())
    assert not list(pool_health.same_id([here], "s", host_id())), "it is that server itself"
    return pool_health.same_id([here], "s", "another")


def figures(**stats: Any) -> Iterable[Finding]:
    return pool_health.unwell([member("s", stats=ServerStats(**stats))])


def tier(**figures: Any) -> TierUsage:
    return TierUsage("nvme", "/mnt/pool, O_DIRECT", **figures)


#: Of a tier's figures: a value that is a mistake, its verdict, and what is said.
TIER: dict[str, tuple[Any, str, str, str]] = {
    "read_only": (True, "warn", "takes no writes: /mnt/pool", "is the disk full"),
    "lost": (True, "fail", "is out of service", "dmesg"),
    "files_out": (2, "warn", "does without 2 of its files", "dmesg"),
    "failures": (7, "warn", "7 reads and writes failed", "health of the disk"),
}
#: Of a server's counters: what is said when there are three.
COUNTERS = {
    "corrupt_blocks": ("3 blocks failed their checksum", "memory and disks"),
    "over_limit_blocks": ("for the limit of their tenant", "kvpool usage --by tenant"),
    "unlisted_blocks": ("a master has no room for", "master.blocks_max"),
    "refused_connections": ("did not show the secret", "a stranger"),
    "cold_over_budget": ("were over the budget of the tier", "setting `requests`"),
    "rejected_victims": ("may not be evicted", "POLICY_CHECKS"),
}


def reported(**stats: Any) -> Plant:
    return lambda _: figures(**stats)


for field, (wrong, *said) in TIER.items():
    of_tiers = reported(usage=[TierUsage("dram"), tier(**{field: wrong})])
    MISTAKES[f"tier {field}"] = Mistake(of_tiers, "tier nvme of s", *said)
for counter, texts in COUNTERS.items():
    of_counters = reported(counters={**dict.fromkeys(COUNTERS, 0), counter: 3})
    MISTAKES[counter] = Mistake(of_counters, "figures of s", "warn", *texts)


def cold(text: str = "", failures: int = 0) -> Iterable[Finding]:
    tiers = [TierUsage("dram"), TierUsage("s3", f"s3://b, 1 GiB in 8 objects{text}")]
    tiers[1] = msgspec.structs.replace(tiers[1], failures=failures)
    return figures(usage=tiers, counters={"cold_failures": 3})


@mistake("memory of s", "warn", "75% is held by clients, for 61 s, most by engine-2", "does that")
async def an_engine_that_hangs(place: Place) -> Iterable[Finding]:
    clients = [
        ClientUsage("engine-1", "shm", 1, 1),
        ClientUsage("engine-2", "shm", 1, 3 * GIB // 4),
    ]
    assert not list(figures(pinned_bytes=3 * GIB // 4, oldest_pin_s=9.0, clients=clients))
    return figures(pinned_bytes=3 * GIB // 4, oldest_pin_s=61.0, clients=clients)


@mistake(
    "addresses of b", "warn", "tcp://127.0.0.1:7460 is no address for other hosts", "--announce"
)
async def loopback_announced_to_other_hosts(place: Place) -> Iterable[Finding]:
    shared = member("a", host="one", addresses=("tcp://10.0.0.1:7460", "tcp://127.0.0.1:1"))
    alone = member("b", host="two", addresses=("tcp://127.0.0.1:7460", "shm://@b"))
    assert not list(pool_health.unwell([alone], "two")), "all are on one host"
    found = list(pool_health.unwell([shared, alone]))
    assert len(found) == 1
    return found


@mistake("room", "fail", "every server is leaving", "start servers")
async def all_servers_drain(place: Place) -> Iterable[Finding]:
    staying = member("b")
    leaving = member("a", stats=ServerStats(draining=True))
    assert not list(pool_health.unwell([leaving, staying]))
    return pool_health.unwell([leaving])


class Told(NamedTuple):
    """The operator's half of a pool that says what clients ask for."""

    said: Demand

    async def demand(self) -> Demand:
        return self.said


#: It makes room with what was used a moment ago.
CHURNING = {"used": 7 * GIB // 8, "victim_age_s": 9.0, "counters": {"evicted_blocks": 1}}


def of_demand(size: int, beyond_hole: float, *members: Any) -> Plant:
    async def plant(place: Place) -> Iterable[Finding]:
        said = Demand(600.0, (WorkingSet(Namespace("n"), size, 9),), 1.0, beyond_hole)
        place.patch.setattr(doctor, "admin", lambda _: Told(said))
        return await doctor._memory(None, list(members) or [member("s")])  # type: ignore[arg-type]

    return plant


MISTAKES["a working set larger than memory"] = Mistake(
    of_demand(2 * GIB, 0.0), "memory", "warn", "expect many misses", "add servers"
)


@mistake("room", "warn", "every server is full, and evicts what was used 9 s ago", "add servers")
async def all_full(place: Place) -> Iterable[Finding]:
    full, lost = member("s", **CHURNING), member("gone", alive=False)
    for other in ({"used": GIB // 2}, {"victim_age_s": 121.0}, {"counters": {}}):
        assert not list(pool_health.filled([full, member("b", **CHURNING | other)]))
    assert len(await of_demand(1, 0.0, full)(place)) == 1, "what comes back has room"
    return await of_demand(2 * GIB, 0.0, full, lost)(place)


@mistake("server dev-0 over tcp", "fail", "write: too large", "give it more memory")
async def memory_smaller_than_a_block(place: Place) -> Iterable[Finding]:
    pool = await place.stack.enter_async_context(dev.serve("512KiB"))
    return await doctor._pool(settings(pool.address))


MISTAKES["chains with holes"] = Mistake(
    of_demand(1, 0.2), "chains", "warn", "20% of the blocks of prompts lie behind a", "lost"
)


# --- this host, and settings for a server ---------------------------------------------------------


@mistake("tier files", "fail", "more than once", "a file of its own")
async def a_file_twice(place: Place) -> Iterable[Finding]:
    (place.folder / "link").symlink_to(place.folder / "a")
    return place.server("nvme:DIR/a:1MiB", "nvme:DIR/link:1MiB")


@mistake("disk space", "fail", "1024 TiB is wanted", "a smaller size")
async def files_larger_than_the_disk_together(place: Place) -> Iterable[Finding]:
    assert not list(place.server("nvme:DIR/a:1MiB", "nvme:DIR/b:1MiB"))
    return place.server("nvme:DIR/a:512TiB", "nvme:DIR/b:512TiB")


@mistake("secret", "warn", "none, and tcp://0.0.0.0:7460 is reachable", "kvpool secret")
async def no_secret_beyond_loopback(place: Place) -> Iterable[Finding]:
    listen = ["tcp://0.0.0.0:7460", "shm://"]
    closed = Config(server=ServerConfig(listen=listen), secret_file="s")
    assert not list(own_host.examine_settings(closed))
    return place.server(listen=listen)


DEFAULTS = {"kv_connector": "KVPoolConnector", "kv_role": "kv_both"}
RIGHT = DEFAULTS | {"kv_load_failure_policy": "recompute"}


@mistake("engine", "fail", "Connection refused", "the address of a vLLM server")
async def an_engine_behind_a_proxy_of_the_environment(place: Place) -> Iterable[Finding]:
    """A proxy would answer in its place: none is asked."""
    proxy = await place.web_server()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        place.patch.setenv(name, f"http://{proxy}")
    return await examine_engines(["127.0.0.1:9"])


def said_of(**change: Any) -> list[Finding]:
    """What it says of vLLM's JSON with this in it."""
    return examine_json(json.dumps(RIGHT | change)).findings


def multi(**change: Any) -> ExaminedJson:
    """What it says of this connector in another one, with this in it."""
    inner = {"connectors": [RIGHT | change]}
    outer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": inner}
    return examine_json(json.dumps(RIGHT | outer))


def given(*tiers: str, client: ClientConfig = USUAL, **server: Any) -> Plant:
    return lambda place: place.server(*tiers, client=client, **server)


def far_away(place: Place) -> Found:
    place.patch.setattr(own_host, "_kind_of_mount", lambda _: "nfs4")
    return place.server("nvme:DIR/a:1MiB")


#: Mistakes of one line.
SHORT: dict[str, tuple[Plant, str, str, str, str]] = {
    "no disk there": (given("nvme:DIR/a/b:1MiB"), "tier", "fail", "no directory", "mkdir -p"),
    "a directory": (given("nvme:DIR:1MiB"), "tier", "fail", "is a directory", "name a file in it"),
    "heartbeats": (given(heartbeat_s=1.5), "times", "warn", "one lost heartbeat", "a third of"),
    "attempts": (given(client=SLOW), "times", "warn", "costs a call all of", "hedge_s < attempt_s"),
    "checksums": (given(client=BLIND), "checksums", "warn", "bytes are not noticed", "turn it on"),
    "twice": (given(client=TWICE), "masters", "warn", "a:1 stands twice", "once"),
    "on another host": (
        *(far_away, "tier", "warn", "lies on another host or in a program (nfs4)", "of this host"),
    ),
    "clients": (
        *(lambda _: doctor.crowded([member("s", stats=ServerStats(counters=MANY))]), "connections"),
        *("warn", "s has 900 of 1024 connections", "server.connections_max"),
    ),
    "a secret that is not there": (
        *(lambda _: [doctor._secret(Config(secret_file="/nowhere/secret"))], "secret", "fail"),
        *("secret file '/nowhere/secret': No such file", "kvpool secret FILE"),
    ),
    "a cold store that failed": (
        *(lambda _: cold(failures=7), "tier s3", "warn", "7 reads failed since", "in its log"),
    ),
    "a clock that is not the store's": (
        *(lambda _: cold("; failing: the clock of this host is not that of the store"), "tier s3"),
        *("warn", "the clock of this host is not that", "set it: `chronyc tracking`"),
    ),
    "JSON that is none": (
        *(lambda _: examine_json("{'a': 1}").findings, "vLLM", "fail", "no JSON", "'...'"),
    ),
    "JSON without this connector": (
        *(lambda _: said_of(kv_connector="KvPool"), "vLLM", "fail", "no engine", "KVPoolConnector"),
    ),
    "JSON without a role": (
        *(lambda _: said_of(kv_role=None), "vLLM", "fail", "kv_role is None", '"kv_both" loads'),
    ),
    "no role inside": (lambda _: multi(kv_role=None)[0], "vLLM", "fail", "None, of", "kv_both"),
    "a slip inside": (lambda _: multi(kv_rol="")[0], "vLLM", "fail", "'kv_rol' is", "'kv_role'?"),
    "JSON that lets requests fail": (
        *(lambda _: examine_json(json.dumps(DEFAULTS)).findings, "vLLM", "warn"),
        *("a request fails when one of its blocks", '"kv_load_failure_policy": "recompute"'),
    ),
    "JSON with a slip": (
        *(lambda _: said_of(kv_conector_extra_config={}), "vLLM", "fail", "is no name", "extra_"),
    ),
    "JSON with a setting that is none": (
        *(lambda _: said_of(kv_connector_extra_config={"master": ["a:1"]}), "vLLM", "fail"),
        *("did you mean 'masters'?", "do as it says"),
    ),
}
for name, (planted, *said) in SHORT.items():
    MISTAKES[name] = Mistake(planted, *said)


@asynccontextmanager
async def prepared(folder: Path) -> AsyncIterator[Place]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unreachable_master, "_STEP_S", patient(0.3))
        async with AsyncExitStack() as stack:
            yield Place(folder, patch, stack)


@pytest.mark.parametrize("name", MISTAKES)
async def test_a_mistake_is_found_and_it_says_what_to_do(name: str, tmp_path: Path) -> None:
    planted = MISTAKES[name]
    async with prepared(tmp_path) as place:
        found = planted.plant(place)
        found = list(await found if isinstance(found, Awaitable) else found)
    fitting = [one for one in found if one.check.startswith(planted.check) and one.verdict != "ok"]
    assert fitting, found
    matching = [one for one in fitting if planted.text in one.text and planted.advice in one.advice]
    assert matching, fitting
    assert not [one for one in found if "`kvpool doctor`" in one.text]
    assert {one.verdict for one in matching} == {planted.verdict}
    assert all(one.advice for one in matching)


def test_there_are_many_and_a_right_pool_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(MISTAKES) + len(PLANTED) + len(OF_HOST) >= 60
    little = dict.fromkeys(LIMITS, lambda: [Limit("x", 1, "")])
    monkeypatch.setattr(doctor, "_shared_memory", little["memory"])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)  # UCX is not installed
    for one in (settings("a:1"), settings("a:1", "ucx")):
        assert doctor._limits(one, SimpleNamespace(**little)).verdict == "ok"
    given = {"masters": ["a:1"], "transports": ["tcp"], "cluster": "bank", "secret_file": "/s"}
    (fine,), told = multi(kv_connector_extra_config=given)
    of_client = {f"client.{name}": given.pop(name) for name in ("masters", "transports")}
    assert fine.verdict == "ok"
    assert told == of_client | given | {"local_only": False, "tenants_file": ""}
    assert not list(own_host.examine_settings(Config()))
    assert not list(pool_health.unwell([member("a"), member("b")], "host"))
    known = [member("a"), member("gone", alive=False)]
    assert not list(pool_health.untold({"m:1": known, "m:2": known[:1]}))
    silent = [member("a", alive=False)]
    (found,) = pool_health.untold({"m:1": known, "m:2": silent})  # it no longer hears of it
    assert found.text.startswith("m:2 does not know it")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Where the processes of a pool are: two masters, of which its server was told one."""
    running = RunningPrograms(tmp_path_factory.mktemp("pool"))
    there = {name: free_address() for name in ("told", "untold", "page")}
    for name in ("secret", "other"):
        there[name] = str(running.folder / name)
        assert kvpool("secret", there[name]).code == 0
    both = ("--secret-file", there["secret"])
    running.start_kvpool("told", "master", "--bind", there["told"], "--http", there["page"], *both)
    running.start_kvpool("untold", "master", "--bind", there["untold"], *both)
    of_server = ("--masters", there["told"], "--id", "s", "--capacity", "8MiB", *both)
    running.start_kvpool("server", "server", *of_server)
    right = ("--transport", "tcp", "--masters", there["told"], *both)
    soon(lambda: kvpool("doctor", *right).code == 0, 60)
    yield there | {f"{name}_id": str(one.pid) for name, one in running.processes.items()}
    running.close()


KEY, PORT = "--secret-file {secret}", "not that of --http, nor of a server"
#: Options, a process that is stopped meanwhile, and what is said.
PLANTED = {
    "another secret": ("{told} --secret-file {other}", "", "it has another secret", SAME),
    "no secret": ("{told}", "", "a secret: set secret_file, or local_only if it has that", SAME),
    "another cluster": (
        "{told} --cluster b " + KEY,
        "",
        "another cluster (setting",
        "do as it says",
    ),
    "the port of --http": ("{page} " + KEY, "", "what listens there is no master", PORT),
    "no servers": ("{untold} " + KEY, "", "0 of 0 servers up", "start one: kvpool server"),
    "a master untold": ("{told},{untold} " + KEY, "", "does not know it", "every master"),
    "a frozen master": ("{told} " + KEY, "told", "no master, or one that is frozen", PORT),
    "a frozen server": ("{told} " + KEY, "server", "server s", "ook at its log"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_among_processes_is_found(pool: dict[str, str], name: str) -> None:
    options, stopped, text, advice = PLANTED[name]
    words = options.format_map(pool).split()
    if stopped:
        os.kill(int(pool[f"{stopped}_id"]), signal.SIGSTOP)
    try:
        done = kvpool("doctor", "--json", "--transport", "tcp", "--masters", *words)
    finally:
        if stopped:
            os.kill(int(pool[f"{stopped}_id"]), signal.SIGCONT)
    found = [one for one in json.loads(done.out) if one["verdict"] != "ok"]
    said = [one for one in found if text in f"{one['check']} {one['text']}"]
    assert any(advice in one["advice"] for one in said), found
    assert done.code == (1 if "fail" in {one["verdict"] for one in found} else 0)


#: Hosts with mistakes, and what is done there before `kvpool doctor` looks.
HOSTS = {
    "mounts": """
        mount -t tmpfs -o size=64m none /dev/shm
        mount --bind only only; mount -o remount,bind,ro only
        mount -t tmpfs none memory
        echo 'always [deny]' > pages; mount --bind pages $THP
        exec prlimit --nofile=256:256 $DOCTOR --masters [fd00::1]:7450""",
    "a card": """
        mount -t tmpfs none /sys/class; mkdir /sys/class/infiniband
        exec prlimit --memlock=65536:65536 setpriv --bounding-set=-ipc_lock \\
            $DOCTOR --transport ucx?tls=rc""",
    "a cgroup": "echo $$ > $CGROUP/cgroup.procs; exec $DOCTOR",
}
THP = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
#: Where it is planted, the check that finds it, and words of text and advice.
OF_HOST = {
    "a disk mounted read-only": ("mounts", "tier files", "only is mounted read-only", "mount it"),
    "a file in memory": ("mounts", "tier files", "memory lies in memory", "a file on a disk"),
    "another user's": ("mounts", "tier files", "may not write", "chown"),
    "few open files": ("mounts", "open files", "may open 256", "-n 65536"),
    "no huge pages": ("mounts", "huge pages", "shared memory: deny", "echo advise"),
    "no lanes": ("a card", "transport ucx", "left out: UCX", "extras"),
    "no route": ("mounts", "master [fd00::1]", "there is no way", "has this host IPv6, and a"),
    "a small /dev/shm": ("mounts", "memory limits", "/dev/shm has 64 MiB, and UCX", "--shm-size"),
    "a small memlock": ("a card", "memory limits", "ulimit -l has 64 KiB, and RDMA", "ulimit -l"),
    "a small cgroup": ("a cgroup", "memory limits", "takes 64 GiB", "or raise MemoryMax="),
}


@pytest.fixture(scope="module")
def cgroup() -> Iterator[str]:
    """The folder of one whose memory is limited to 1 GiB, if one may be made."""
    above, limit, found = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "/nowhere"
    if not above.exists():
        above, limit = above.parent, "memory.max"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            (made := above / f"kvpool-test-{os.getpid()}").mkdir()
            stack.callback(made.rmdir)
            (made / limit).write_text(str(GIB))
            found = str(made)
        yield found


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, cgroup: str) -> Callable[[str], Any]:
    """What is found on one of these hosts: namespaces of a process, or a cgroup of its own."""
    folder = tmp_path_factory.mktemp("host")
    places = ("only", "memory", "theirs")
    for name in places:
        (folder / name).mkdir()
    if os.getuid() == 0:
        os.chown(folder / "theirs", 12345, -1)
    tiers = ["dram:64GiB", *(f"nvme:{folder}/{one}/a:1MiB" for one in places)]
    (folder / "pool.yaml").write_text(json.dumps({"server": {"tiers": tiers}}))

    @functools.cache
    def examined(name: str) -> Any:
        def run(program: str) -> subprocess.CompletedProcess[str]:
            told = {**os.environ, "DOCTOR": program, "THP": THP, "CGROUP": cgroup}
            command = ["unshare", "-rmn", "sh", "-ec", HOSTS[name]]
            return subprocess.run(
                command, cwd=folder, env=told, capture_output=True, text=True, timeout=60
            )

        if (tried := run("true")).returncode:
            pytest.skip(f"this machine does not allow it: {tried.stderr}")
        done = run(f"{sys.executable} -m kvpool doctor --json --config pool.yaml")
        assert done.returncode == 1, done.stderr
        return json.loads(done.stdout)

    return examined


@pytest.mark.parametrize("name", OF_HOST)
def test_a_mistake_of_the_host_is_found(host: Callable[[str], Any], name: str) -> None:
    planted, check, text, advice = OF_HOST[name]
    if "UCX" in text or "RDMA" in text:
        pytest.importorskip("ucxx")
    if name == "another user's" and os.getuid() != 0:
        pytest.skip("this process may give no folder away")
    found = [one for one in host(planted) if one["check"].startswith(check)]
    said = [one for one in found if one["verdict"] != "ok" and text in one["text"]]
    assert any(advice in one["advice"] for one in said), found


async def test_a_check_that_warns_is_not_ok_as_well() -> None:
    here = settings("127.0.0.1:9")
    open_to_all = msgspec.structs.replace(here, server=ServerConfig(listen=["tcp://0.0.0.0:1"]))
    for given, verdict in ((open_to_all, "warn"), (here, "ok")):
        found = [one for one in await doctor.examine(given) if one.check == "secret"]
        assert [one.verdict for one in found] == [verdict]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--masters", "no port"], 2),
        (["--engine", "127.0.0.1:9"], 1),
        (["--vllm", "{"], 1),
        (["--vllm", json.dumps(RIGHT), "--masters", "127.0.0.1:9"], 1),
    ],
)
def test_a_script_sees_it_in_the_exit_code(options: list[str], code: int) -> None:
    done = kvpool("doctor", "--transport", "tcp", *options)
    assert (done.code, "vLLM's JSON" in done.all) == (code, "--vllm" in options), done.all
