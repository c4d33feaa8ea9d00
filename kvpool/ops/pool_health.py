"""`kvpool doctor`: what the figures of servers, and what masters know of them, say is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from kvpool.addresses import is_everywhere, is_loopback, split
from kvpool.ops.finding import Finding
from kvpool.ops.tables import problem_of
from kvpool.types import ROOM_SHARE, Member, TierUsage

#: The share of a server's memory that readers and writers may keep, and for how long, unnoticed.
_HELD_MAX: Final = 0.2
_PIN_S: Final = 60.0
#: A full server that evicts what was used so short a time ago keeps nothing for the next turn.
_YOUNG_S: Final = 120.0
#: Counters of a server that should stay 0: what they count, and what to do.
_COUNTED: Final = {
    "corrupt_blocks": ("blocks failed their checksum", "suspect its memory and disks: dmesg, EDAC"),
    "unlisted_blocks": (
        "blocks that a master has no room for, so nobody finds them",
        "raise master.blocks_max",
    ),
    "over_limit_blocks": (
        "blocks were refused for the limit of their tenant",
        "`kvpool usage --by tenant` shows whose; raise `limit` in the tenants file",
    ),
    "rejected_victims": (
        "victims of its eviction policy may not be evicted",
        "run the policy's checks (kvpool.testing.POLICY_CHECKS), or choose another one",
    ),
    "cold_over_budget": (
        "requests to its object store were over the budget of the tier",
        "raise its setting `requests`, or `object_size`",
    ),
    "refused_connections": (
        "connections did not show the secret of this cluster",
        "its log names the peers: a wrong secret or cluster, or a stranger",
    ),
}


def unwell(members: Sequence[Member], own_host: str = "") -> Iterator[Finding]:
    """What living servers themselves say is wrong; `own_host` is this one's `host_id`."""
    hosts = {one.host for one in members} | ({own_host} if own_host else set())
    for member in members:
        yield from _tiers(member)
        yield from _held(member)
        yield from _counters(member)
        if len(hosts) > 1:
            yield from _announced(member)
    yield from _refusing(members)


def _tiers(member: Member) -> Iterator[Finding]:
    usage = member.stats.usage
    cold = usage[-1] if usage and "cold_failures" in member.stats.counters else None
    for tier in usage:
        check = f"tier {tier.name} of {member.server}"
        if tier is cold:
            yield from _cold(check, tier)
            continue
        if problem := problem_of(tier):
            verdict = "fail" if tier.lost else "warn"
            advice = "is the disk full, read-only or failing? See dmesg and the server's log"
            yield Finding(check, verdict, f"{problem}: {tier.status_text}", advice)
        elif tier.failures:
            text = f"{tier.failures:,} reads and writes failed since the server started"
            yield Finding(check, "warn", text, "look at dmesg and the health of the disk")


def _cold(check: str, tier: TierUsage) -> Iterator[Finding]:
    """Of a tier in an object store, which says itself while it fails."""
    _, fails, why = tier.status_text.partition("; failing: ")
    advice = "its credentials, bucket and endpoint: docs/cold-tier.md"
    if "clock" in why:
        advice = "set it: `chronyc tracking` or `timedatectl` on the host of that server"
    if fails:
        yield Finding(check, "warn", f"the object store fails: {why}", advice)
    elif tier.failures:
        text = f"{tier.failures:,} reads failed since the server started"
        yield Finding(check, "warn", text, "why: `object store fails` in its log")


def _held(member: Member) -> Iterator[Finding]:
    stats = member.stats
    held = stats.pinned_bytes + stats.reserved_bytes + stats.counters.get("quarantined_bytes", 0)
    share = held / member.capacity if member.capacity else 0.0
    if share > _HELD_MAX and stats.oldest_pin_s > _PIN_S and stats.clients:
        most = max(stats.clients, key=lambda one: one.pinned_bytes + one.reserved_bytes)
        text = (
            f"{share:.0%} is held by clients, for {stats.oldest_pin_s:.0f} s, most by {most.name}"
        )
        advice = "does that program hang, or keep views of blocks? Ending it frees them"
        yield Finding(f"memory of {member.server}", "warn", text, advice)


def _counters(member: Member) -> Iterator[Finding]:
    for name, (what, advice) in _COUNTED.items():
        if count := member.stats.counters.get(name, 0):
            text = f"{count:,} {what}, since it started"
            yield Finding(f"figures of {member.server}", "warn", text, advice)


def _announced(member: Member) -> Iterator[Finding]:
    """A server that only its own host can reach, in a pool of several."""
    places = [(one, parts[1]) for one in member.addresses if (parts := split(one)) is not None]
    wrong = [one for one, host in places if is_loopback(host) or is_everywhere(host)]
    if wrong and len(wrong) == len(places):
        text = f"{', '.join(wrong)} is no address for other hosts, and the pool has some"
        advice = "set its --listen, or --announce, to an address that others reach"
        yield Finding(f"addresses of {member.server}", "warn", text, advice)


def _refusing(members: Sequence[Member]) -> Iterator[Finding]:
    if members and all(one.stats.draining for one in members):
        text = "every server is leaving: nothing can be written"
        yield Finding("room", "fail", text, "`kvpool drain SERVER --cancel`, or start servers")


def filled(members: Sequence[Member]) -> Iterator[Finding]:
    """Whether every one of these servers makes room with what was used a moment ago."""
    taking = [one for one in members if not one.stats.draining]
    if taking and all(map(_is_churning, taking)):
        age_s = max(one.stats.victim_age_s for one in taking)
        text = f"every server is full, and evicts what was used {age_s:.0f} s ago"
        advice = "add servers, memory or a disk (--tier); fine where prompts do not come back"
        yield Finding("room", "warn", text, advice)


def _is_churning(member: Member) -> bool:
    stats = member.stats
    evicts = stats.counters.get("evicted_blocks", 0) and stats.victim_age_s < _YOUNG_S
    return bool(evicts) and stats.used >= ROOM_SHARE * member.capacity


def same_id(members: Sequence[Member], server: str, own_host: str) -> Iterator[Finding]:
    """Whether a server that would be started here has the name of one that runs elsewhere."""
    for one in members:
        if server and one.server == server and one.alive and one.host != own_host:
            text = f"server.id {server} is that of a server of another host, which is up"
            yield Finding("server id", "fail", text, "choose another one, or stop that server")


def untold(known: Mapping[str, Sequence[Member]]) -> Iterator[Finding]:
    """Servers that some masters know and others do not; `known` is by the master's address."""
    everywhere = {one.server for members in known.values() for one in members if one.alive}
    for server in sorted(everywhere):
        without = [
            address
            for address, members in known.items()
            if all(one.server != server or not one.alive for one in members)
        ]
        if without:
            text = f"{', '.join(without)} does not know it: clients that ask there find none of it"
            advice = "give the server every master (--masters), and look for a firewall between"
            yield Finding(f"server {server}", "warn", text, advice)
