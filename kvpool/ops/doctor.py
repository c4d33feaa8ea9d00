"""`kvpool doctor`: what keeps a pool from working or from being fast, and what to do about it."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import aiofiles
import msgspec

from kvpool import registry
from kvpool.client.admin import admin
from kvpool.client.device_staging import ROUND
from kvpool.client.pool import Pool
from kvpool.client.room import OBSERVED_S
from kvpool.config import ClientConfig, Config, ServerConfig, cluster_of, parse_transport
from kvpool.device_copy import first_line
from kvpool.errors import ConfigError, KvpoolError
from kvpool.guard import of_secrets
from kvpool.memory_limits import Limit, MemoryLimits, tightest
from kvpool.net.control_network import TcpNetwork
from kvpool.ops.demand import judged, memory_of
from kvpool.ops.finding import Finding, tried, unchecked
from kvpool.ops.own_host import examine_settings, wanted_memory
from kvpool.ops.pool_health import filled, same_id, untold, unwell
from kvpool.ops.unreachable_master import unreachable
from kvpool.protocols import SupportsStatusText
from kvpool.runtime import host_id
from kvpool.types import Cluster, Member, Namespace, WriteStatus
from kvpool.units import human

_TRIAL_SIZE = 1 << 20


async def examine(settings: Config) -> list[Finding]:
    """Look at this machine, the masters, the servers, and one real block on each transport."""
    findings = []
    for check, look in _OF_THE_HOST.items():
        findings += await tried(check, look)
    wrong = await tried("settings", lambda: examine_settings(settings))
    if all(one.check != "secret" for one in wrong):
        findings += await tried("secret", lambda: _secret(settings))
    findings += await tried("memory limits", lambda: _limits(settings, MemoryLimits()))
    findings += wrong + _transports(settings.client)
    findings += await tried(  # in a thread: it imports torch
        "device memory", lambda: asyncio.to_thread(device_memory, settings.client)
    )
    known: dict[str, list[Member]] = {}
    for address in dict.fromkeys(settings.client.masters):
        ask = partial(_master, settings, address, known)
        findings += await tried(f"master {address}", ask)
    about = [*untold(known), *await tried("pool", lambda: _pool(settings))]
    return findings + _unchecked(about) + about


def _python() -> Finding:
    packages = ", ".join(f"{name} {version(name)}" for name in ("kvpool", "msgspec"))
    return Finding("python", "ok", f"{platform.python_version()}, {packages}")


def _loop() -> Finding:
    try:
        return Finding("event loop", "ok", f"uvloop {version('uvloop')}")
    except ImportError:
        return Finding("event loop", "warn", "asyncio's own", "pip install uvloop")


def _kernel() -> Finding:
    release = platform.release()
    if not hasattr(os, "memfd_create"):
        return Finding("kernel", "fail", f"{release} has no memfd", "use Linux >= 3.17")
    if _kernel_version() < (5, 14):
        return Finding(
            "kernel", "warn", f"{release} cannot touch pages in advance", "use Linux >= 5.14"
        )
    return Finding("kernel", "ok", release)


def _kernel_version() -> tuple[int, int]:
    major, minor = platform.release().split(".")[:2]
    return int(major), int(minor)


async def _huge_pages() -> Finding:
    path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    try:
        async with aiofiles.open(path) as file:
            mode = (await file.read()).partition("[")[2].partition("]")[0]
    except OSError:
        mode = "unknown"
    if mode in ("always", "advise", "within_size"):
        return Finding("huge pages", "ok", f"shared memory: {mode}")
    if mode == "never" and _kernel_version() >= (6, 1):
        return Finding("huge pages", "ok", "shared memory: never; made of small ones afterwards")
    return Finding("huge pages", "warn", f"shared memory: {mode}", f"echo advise > {path}")


#: By the name of the check.
_OF_THE_HOST: Mapping[str, Callable[[], Finding | Awaitable[Finding]]] = {
    "python": _python,
    "event loop": _loop,
    "kernel": _kernel,
    "huge pages": _huge_pages,
}


def _limits(settings: Config, limits: MemoryLimits) -> Finding:
    """What a server that is started here could have, and one with these settings takes."""
    memory, reserved = tightest(limits.memory()), tightest(limits.huge_pages())
    text = f"{human(max(0, memory.free))} ({memory.name})"
    if reserved.free > 0:
        text += f", huge pages {human(reserved.free)} ({reserved.name})"
    shm = tightest(_shared_memory())
    asked = any(one.startswith("ucx") for one in settings.client.transports)
    over_ucx = asked and importlib.util.find_spec("ucxx") is not None
    if over_ucx and shm.free < _SHM_MIN:
        text += f"; {shm.name} has {human(shm.free)}, and UCX needs more"
        return Finding("memory limits", "warn", text, f"raise {shm.advice}")
    locked = tightest(limits.locked())
    if over_ucx and Path("/sys/class/infiniband").exists() and locked.free < memory.free:
        text += f"; {locked.name} has {human(max(0, locked.free))}, and RDMA locks a whole segment"
        return Finding("memory limits", "warn", text, f"raise {locked.advice}")
    wanted = wanted_memory(settings.server)
    if settings.server != ServerConfig() and wanted > max(memory.free, reserved.free):
        text += f", and a server of these settings takes {human(wanted)}"
        raised = f", or raise {memory.advice}" if memory.advice else ""
        advice = f"give it less memory{raised}; right where it runs already"
        return Finding("memory limits", "warn", text, advice)
    return Finding("memory limits", "ok", text)


def _shared_memory() -> list[Limit]:
    """Of /dev/shm, for UCX: our memory is in a memfd, and has no name there."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return []
    free = found.f_bavail * found.f_frsize
    return [Limit("/dev/shm", free, "--shm-size or --ipc=host of its container")]


#: Of /dev/shm, for the queues of UCX's workers. Docker gives 64 MiB.
_SHM_MIN = 256 << 20


def _secret(settings: Config) -> Finding:
    if not settings.local_only and not settings.secret_file:
        return Finding("secret", "ok", "none: who reaches the pool may use it")
    try:
        if settings.local_only:
            return Finding("secret", "ok", f"of this user: {of_secrets('local_secret_file')()}")
        cluster_of(settings)
    except ConfigError as error:
        advice = "`kvpool secret FILE` makes one; all processes of a pool have the same"
        return Finding("secret", "fail", str(error), advice)
    from kvpool.secret_file import secret_problem

    if problem := secret_problem(settings.secret_file):
        what, _, advice = problem.rpartition(": ")
        return Finding("secret", "warn", what, f"{advice}; make another one if others were there")
    return Finding("secret", "ok", f"{settings.secret_file}, not for every user of this host")


def _transports(config: ClientConfig) -> list[Finding]:
    findings = []
    known = registry.installed(registry.TRANSPORTS)
    for spec in config.transports:
        scheme = parse_transport(spec).scheme
        if scheme not in known:
            findings.append(
                Finding(f"transport {scheme}", "warn", "not installed", "see README, extras")
            )
            continue
        try:
            made = registry.transport(spec)
            status_text = (
                made.status_text if isinstance(made, SupportsStatusText) else known[scheme].value
            )
        except ConfigError as error:
            # One of several is left out, and the pool works; the error says how to get it.
            verdict = "ok" if len(config.transports) > 1 else "fail"
            advice = "do as it says; packages are in README, extras"
            findings.append(Finding(f"transport {scheme}", verdict, f"left out: {error}", advice))
        except Exception as error:  # of a plug-in, which may be anybody's
            findings.append(unchecked(f"transport {scheme}", error))
        else:
            findings.append(Finding(f"transport {scheme}", "ok", status_text))
    return findings


def device_memory(config: ClientConfig) -> Finding:
    """How blocks would go from and to memory of a GPU: staged, or not at all, and why."""
    check = "device memory"
    gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    advice = "pip install a torch that is built for CUDA" if gpus else ""
    verdict = "warn" if gpus else "ok"
    here = f"the driver knows {gpus} GPUs" if gpus else "no NVIDIA driver"
    if importlib.util.find_spec("torch") is None:
        return Finding(check, verdict, f"not used: torch is not installed; {here}", advice)
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding(check, "warn", f"not used: {first_line(error)}", "install torch again")
    if not torch.cuda.is_available():
        why = "finds no device" if torch.version.cuda else "was built without CUDA"
        text = f"not used: torch {torch.__version__} {why}; {here}"
        return Finding(check, verdict, text, advice if not torch.version.cuda else _NO_DEVICE)
    devices = ", ".join(
        f"cuda:{n} {torch.cuda.get_device_name(n)}" for n in range(torch.cuda.device_count())
    )
    text = (
        f"{devices}: staged through {config.device_staging >> 20} MiB of pinned memory, over every "
        f"transport; client.device_path is {config.device_path}"
    )
    if config.device_staging < 2 * ROUND:
        advice = f"client.device_staging below {2 * ROUND >> 20} MiB: rounds wait for each other"
        return Finding(check, "warn", text, advice)
    return Finding(check, "ok", text)


#: What to do when torch could use a GPU and there is none that it can.
_NO_DEVICE = "see nvidia-smi, CUDA_VISIBLE_DEVICES, and whether the driver is new enough for torch"


#: Of an error, where this is the doctor.
_ADVICE = "; `kvpool doctor` says what to do"


#: What to do where a master refuses us; by a word of what it, or our side, says of that.
_REFUSED: Mapping[str, str] = {
    "key of this tenant": "make it anew with `kvpool tenant-key`; has each master the same "
    "tenants file?",
    "certificate": "start every master with --tenants; make the tenant's key with their secret",
    "secret": "give all processes the same secret_file, or all --local-only; and a tenant's "
    "clients the file that `kvpool tenant-key` makes",
}


async def _master(
    settings: Config, address: str, known: dict[str, list[Member]] | None = None
) -> Finding:
    """Whether it answers; the servers that it knows are added to `known`."""
    only = _asking(settings.client, [address], ["tcp"])  # what blocks travel over is asked later
    try:
        async with _client(cluster_of(settings), only) as pool:
            started = time.perf_counter()
            members = await pool.members()
    except KvpoolError as error:
        answer = str(error)
        known_advice = next((what for word, what in _REFUSED.items() if word in answer), "")
        why, advice = ("", known_advice) if known_advice else await unreachable(address)
        why = why or answer.removesuffix(_ADVICE)
        advice = advice or "it is there: do as it says, or look at its log and its host"
        return Finding(f"master {address}", "fail", why, advice)
    if known is not None:
        known[address] = members
    took_ms = (time.perf_counter() - started) * 1e3
    alive = sum(member.alive for member in members)
    text = f"answers in {took_ms:.1f} ms, {alive} of {len(members)} servers up"
    if not alive:
        advice = "see below what is said of each; or " if members else ""
        advice += f"start one: kvpool server --masters {address}"
        return Finding(f"master {address}", "fail", text, advice)
    return Finding(f"master {address}", "ok", text)


async def _pool(settings: Config) -> list[Finding]:
    """Compare what masters know, and write, read and remove a block on every transport to every
    living server. Nothing where no master answers."""
    client = settings.client
    try:
        only = _asking(client, client.masters, ["tcp"])
        async with _client(cluster_of(settings), only) as pool:
            members = await pool.members()
            findings = await tried("servers, compared", partial(_compared, pool, members))
            findings += same_id(members, settings.server.id, host_id())
    except KvpoolError:
        return []
    for member in members:
        if not member.alive:
            findings.append(
                Finding(
                    f"server {member.server}",
                    "warn",
                    f"{'ended in order, ' if member.left else ''}silent for {member.heard_s:.0f} s",
                    "start it again, or wait until it is forgotten"
                    if member.left
                    else "look at its log, or wait until it is forgotten",
                )
            )
            continue
        if member.stats.draining:
            text = "no block was tried: it is leaving, and takes no new ones"
            findings.append(Finding(f"server {member.server}", "ok", text))
            continue
        findings += await _trials(settings, member)
    return findings


async def _compared(pool: Pool, members: list[Member]) -> list[Finding]:
    """Namespaces with each other, servers with each other, memory with what is in use."""
    living = [member for member in members if member.alive]
    findings = [*differing(living), *crowded(living), *unwell(living, host_id())]
    try:
        return compared(await admin(pool).namespaces()) + findings + await _memory(pool, members)
    except KvpoolError as error:
        advice = "look at the master's log, and try again"
        text = f"neither compared nor judged: {error}"
        return [*findings, Finding("namespaces, memory", "warn", text, advice)]


def _unchecked(about: list[Finding]) -> list[Finding]:
    """What `_pool` found nothing to check for: silence is no `ok`."""
    if not any(one.check.startswith("server ") for one in about):
        text = "none is known: no block was written or read"
        return [Finding("servers", "fail", text, "see what masters say above")]
    looked = {check.split()[0] for one in about for check in one.check.split(", ")}
    untold = {
        "model": Finding("namespaces", "ok", "no two of one model are apart"),
        "memory": Finding("memory", "ok", "not judged: no working set was measured yet"),
    }
    return [] if "namespaces" in looked else [untold[one] for one in untold if one not in looked]


async def _memory(pool: Pool, members: list[Member]) -> list[Finding]:
    """Memory against the live working set, and against what is stored; nothing of the first where
    masters do not measure it yet."""
    demand = await admin(pool).demand()
    full = list(filled([member for member in members if member.alive]))
    if not demand.working_sets:
        return full
    verdict, text = judged(demand, memory_of(members))
    if verdict == "ok" and demand.seconds >= OBSERVED_S:
        full = []  # what is evicted young does not come back
    advice = "add servers, memory or a disk (--tier); or end sessions that are over"
    findings = [*full, Finding("memory", verdict, text, advice if verdict != "ok" else "")]
    if demand.beyond_hole > _HOLES_MAX:
        text = f"{demand.beyond_hole:.0%} of the blocks of prompts lie behind a missing one"
        advice = "are servers lost, or do their sizes differ much?"
        findings.append(Finding("chains", "warn", text, advice))
    return findings


async def _trials(settings: Config, member: Member) -> list[Finding]:
    specs = {parse_transport(spec).scheme: spec for spec in settings.client.transports}
    offered = [address.partition("://")[0] for address in member.addresses]
    shared = [scheme for scheme in offered if scheme in specs and scheme != "inproc"]
    if not shared:
        return [
            Finding(
                f"server {member.server}",
                "fail",
                f"no block was tried: it has {', '.join(offered) or 'no transport'}, and this "
                f"client uses {', '.join(specs)}",
                "add one that it has (--transport, setting client.transports)",
            )
        ]
    findings = []
    for scheme in shared:
        trial = partial(_trial, settings, member, scheme, specs[scheme])
        findings += await tried(f"server {member.server} over {scheme}", trial)
    return findings


def crowded(members: list[Member]) -> list[Finding]:
    """Servers that will soon have no connection left for one more client."""
    findings = []
    for member in members:
        counters = member.stats.counters
        open_now, limit = counters.get("connections", 0), counters.get("connections_max", 0)
        if limit and open_now >= _CROWDED * limit:
            text = f"{member.server} has {open_now} of {limit} connections"
            advice = "raise server.connections_max (100 KiB of memory each), or add servers"
            findings.append(Finding("connections", "warn", text, advice))
    return findings


#: The share of a server's connections that is worth a line.
_CROWDED = 0.8
#: The share of blocks behind a missing one that is worth a line.
_HOLES_MAX = 0.05

#: What to do about a field in which two engines of one model differ.
ADVICE = {
    "seed": "set PYTHONHASHSEED to one value on every host, or on none: `unset` are those without",
    "hash": "give every engine the same --prefix-caching-hash-algo and block size",
    "block": "give every engine the same --block-size",
    "dtype": "give every engine the same --dtype",
    "kv": "give every engine the same --kv-cache-dtype",
    "weights": "their weight files differ: rightly apart, or set the same revision",
    "revision": "set the same revision, or none, where the weights are the same",
    "memory": "their weights in memory differ: rightly apart, unless the engines are still loading",
    "shape": "their models or options differ: `kvpool doctor --engine URL --engine URL` names them",
    "tp": "set the same --tensor-parallel-size, or the same kv_head_parts and revision",
    "pp": "engines of different --pipeline-parallel-size cannot share blocks",
    "layout": "give every engine the same VLLM_KV_CACHE_LAYOUT",
    "packing": "their kernels pack blocks differently: same hardware and attention backend needed",
    "vllm": "run the same version of vLLM",
    "tenant": "tenants share nothing",
    "generation": "the weights of one engine were updated while it ran: restart the others",
}
#: Engines that differ in nothing else have other weights, as two models of one size do.
_OTHER_WEIGHTS = {"memory", "weights"}
#: Pairs of namespaces that are reported, at most.
_APART_MAX = 8


def compared(namespaces: list[tuple[Namespace, int]]) -> list[Finding]:
    """Engines of one model that share nothing, and the fields that keep them apart.

    Names are compared that consist of a word and then `field=value` pairs with a `model`.
    """
    known: dict[tuple[str, str, str], list[tuple[dict[str, str], int, int]]] = {}
    for namespace, blocks in namespaces:
        first, *pairs = namespace.name.split(" ")
        fields = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        if "model" in fields:
            subject = (first, fields["model"], fields.get("group", ""))
            known.setdefault(subject, []).append((fields, namespace.parts, blocks))
    findings = []
    for (_, model, _), names in known.items():
        (one, _, _), *others = sorted(names, key=lambda name: -name[2])
        for other, _, blocks in others:
            apart = [f for f in {**one, **other} if one.get(f) != other.get(f)]
            texts = [f"{f} {one.get(f, 'none')} and {other.get(f, 'none')}" for f in apart]
            advice = "; ".join(ADVICE[f] for f in apart if f in ADVICE)
            findings.append(
                Finding(
                    f"model {model}",
                    "ok" if apart and set(apart) <= _OTHER_WEIGHTS else "warn",
                    f"{blocks} blocks are apart from the others: {', '.join(texts)}",
                    advice or "make these fields equal to share blocks",
                )
            )
    return findings[:_APART_MAX]


#: A server with more memory gets no more new chains than one with so many times the median.
_MEMORY_MEDIANS_MAX = 4
_SERVERS_NAMED_MAX = 8


def differing(members: Sequence[Member]) -> list[Finding]:
    """Living servers that are unlike the others in what decides where chains are and stay.

    Such a pool is never wrong, only worse than it could be.
    """
    if len(members) < 2:
        return []
    findings = []

    def warn(subject: str, odd: list[Member], text: str, advice: str) -> None:
        names = ", ".join(sorted(member.server for member in odd)[:_SERVERS_NAMED_MAX])
        more = f" and {len(odd) - _SERVERS_NAMED_MAX} more" if len(odd) > _SERVERS_NAMED_MAX else ""
        findings.append(Finding(subject, "warn", f"{names}{more}: {text}", advice))

    median = sorted(member.capacity for member in members)[(len(members) - 1) // 2]
    large = [one for one in members if one.capacity > _MEMORY_MEDIANS_MAX * median]
    if large:
        warn(
            "memory of servers",
            large,
            f"more than {_MEMORY_MEDIANS_MAX} times the median; placement counts no more of it",
            "start several servers of the usual size there",
        )
    kinds = Counter(member.tiers for member in members)
    if len(kinds) > 1:
        usual = max(kinds, key=lambda tiers: (kinds[tiers], tiers))
        odd = [member for member in members if member.tiers != usual]
        text = ", ".join(sorted({"+".join(member.tiers) for member in odd}))
        warn(
            "tiers of servers",
            odd,
            f"{text}, the others {'+'.join(usual)}; a chain is whole on one server, so whether it "
            "survives a restart depends on where it began",
            "give every server of a pool the same tiers",
        )
    return findings


#: What to do where a block of 1 MiB finds no place.
_UNWRITTEN: Mapping[WriteStatus, str] = {
    WriteStatus.NO_SPACE: "what it has is held, or is not on the disk yet: `kvpool status` shows "
    "which client holds it",
    WriteStatus.TOO_LARGE: "give it more memory: a block of 1 MiB does not fit",
}


async def _trial(settings: Config, member: Member, scheme: str, spec: str) -> Finding:
    check = f"server {member.server} over {scheme}"
    config = _asking(settings.client, settings.client.masters, [spec])
    namespace = Namespace(f"kvpool-doctor/{secrets.token_hex(4)}")
    key, data = secrets.token_bytes(32), secrets.token_bytes(_TRIAL_SIZE)
    back = bytearray(_TRIAL_SIZE)
    try:
        async with _client(cluster_of(settings), config) as pool:
            started = time.perf_counter()
            written = await admin(pool).write_to(member.server, namespace, key, data)
            (result,) = await pool.read(namespace, [key], [back])
            took_ms = (time.perf_counter() - started) * 1e3
            await pool.remove(namespace, [key])
    except KvpoolError as error:
        if isinstance(error, ConfigError) and cluster_of(settings).tenant:
            return Finding(check, "ok", "not for clients of tenants, which use tcp")
        advice = "check firewalls, user ids and namespaces; does it hang? Look at its log"
        advice = "do as it says" if isinstance(error, ConfigError) else advice
        return Finding(check, "fail", str(error), advice)
    if written is WriteStatus.BYPASSED:
        return Finding(check, "ok", "no block was tried: what it has is worth more to its policy")
    if not written.present or not result.status.hit:
        text = f"write: {written.label}, read: {result.status.label}"
        return Finding(check, "fail", text, _UNWRITTEN.get(written, "look at the server's log"))
    if back != data:
        return Finding(check, "fail", "wrong bytes came back", "stop using it and report this")
    return Finding(check, "ok", f"1 MiB written and read back in {took_ms:.1f} ms")


def _asking(config: ClientConfig, masters: list[str], transports: list[str]) -> ClientConfig:
    return msgspec.structs.replace(
        config, masters=masters, transports=transports, timeout_s=1.5, attempt_s=1.0
    )


def _client(cluster: Cluster, config: ClientConfig) -> Pool:
    return Pool(
        config,
        cluster=cluster,
        network=TcpNetwork(cluster),
        transports=registry.transports(config.transports),
        owns_network=True,
    )
