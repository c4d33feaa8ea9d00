"""Asks a master once where a chain is, and computes what a reader on each of several hosts would
load."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence, Set
from typing import Final

from kvpool.client.checks import check_whole
from kvpool.client.extension import ClientExtension, ClientParts
from kvpool.client.load_estimate import LoadEstimate
from kvpool.errors import MasterLost, UsageError
from kvpool.types import BLOCK_SIZE_MAX, HostScore, Member, Namespace, ReadStatus

#: That one call of `Pool.score` compares.
SCORED_HOSTS_MAX: Final = 1024

#: What servers report is asked for again after so many seconds.
_MEMBERS_S: Final = 2.0
#: The same, after servers that are new to this client.
_NEW_MEMBERS_S: Final = 0.2
#: Runs, and hosts, that one turn of the loop computes: about a millisecond at most.
_RUNS_BURST: Final = 64
_HOSTS_BURST: Final = 2


class Scorer(ClientExtension):
    """The scores of one client, and the servers that a master has named lately."""

    def __init__(self, parts: ClientParts) -> None:
        self._lookup = parts.context.lookup
        self._servers = parts.context.servers
        self._rates = parts.rates
        self._members: Mapping[str, Member] = {}
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()

    async def score(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        hosts: Sequence[str],
        block_bytes: int | None,
        deadline: float,
    ) -> list[HostScore]:
        """As `Pool.score`."""
        if (
            isinstance(hosts, str)
            or not 1 <= len(hosts) <= SCORED_HOSTS_MAX
            or not all(isinstance(host, str) and host for host in hosts)
        ):
            raise UsageError(
                f"hosts is {str(hosts)[:80]}, expected 1 to {SCORED_HOSTS_MAX} ids of hosts"
            )
        if block_bytes is not None:
            block_bytes = check_whole("block_bytes", block_bytes, BLOCK_SIZE_MAX)
        match = await self._lookup.match(namespace, chain, deadline, observes=True)
        if match.stopped is ReadStatus.NO_MASTER:
            raise MasterLost("no master answers where the chain is")
        holders: set[str] = set()
        for number, run in enumerate(match.runs, 1):
            holders.update(replica.server for replica in run.replicas)
            if not number % _RUNS_BURST:
                await asyncio.sleep(0)
        members = await self._known(holders, deadline) if holders else {}
        estimate = LoadEstimate(namespace.parts, members)
        for number, run in enumerate(match.runs, 1):
            estimate.add(run.replicas, run.last + 1 - run.first)
            if not number % _RUNS_BURST:
                await asyncio.sleep(0)
        scores = []
        for number, host in enumerate(hosts, 1):
            scores.append(estimate.score(host, self._rates, block_bytes))
            if not number % _HOSTS_BURST:
                await asyncio.sleep(0)
        return scores

    async def _known(self, holders: Set[str], deadline: float) -> Mapping[str, Member]:
        """All servers with their figures, at most `_MEMBERS_S` old."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(deadline):
                await self._asking.acquire()  # many scores at once ask one question together
        except TimeoutError:
            raise MasterLost("no master has named the servers in time") from None
        try:
            age_max_s = _MEMBERS_S if holders <= self._members.keys() else _NEW_MEMBERS_S
            if loop.time() >= self._asked_at + age_max_s:
                listed = await self._servers.refresh(deadline)
                self._members = {one.server: one for one in listed}
                self._asked_at = loop.time()
        finally:
            self._asking.release()
        return self._members
