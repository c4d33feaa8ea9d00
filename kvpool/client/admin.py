"""What an operator asks of a pool and has it do: what `kvpool.admin(pool)` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kvpool.arguments import as_float
from kvpool.client.buffers import as_views
from kvpool.client.checks import check_digests
from kvpool.client.context import TIMEOUT_S_MAX
from kvpool.client.pool import Pool
from kvpool.client.versions import WrittenBlock, differing
from kvpool.client.writer import status_of_error
from kvpool.errors import BadKey, MasterLost, Overloaded, PeerError, UsageError
from kvpool.operators import DrainOrder, DrainReport
from kvpool.protocols import WriteOptions
from kvpool.tenant_names import marker_of, unqualified
from kvpool.types import ROOT, Buffer, Demand, Explanation, Namespace, WriteBlock, WriteStatus
from kvpool.wire.questions import Namespaces, NamespacesReply

if TYPE_CHECKING:
    from kvpool.client.lookup import Asks
    from kvpool.client.namespace_removal import Removals
    from kvpool.client.room import Room
    from kvpool.client.spread import SpreadReport

#: Pages of a list that a master may send.
_PAGES_MAX: Final = 1000


def admin(pool: Pool) -> Admin:
    """What an operator asks of this pool and has it do. It makes no connection of its own.

    Raises UsageError for what is no `kvpool.Pool`.
    """
    if not isinstance(pool, Pool):
        raise UsageError(
            f"pool is a {type(pool).__module__}.{type(pool).__name__}, expected a kvpool.Pool "
            "(a kvpool.sync.Pool has kvpool.sync.admin)"
        )
    return Admin(pool)


class Admin:
    """Shows what a pool has, and moves or removes it. It uses the connections of the `Pool`.

    Every call takes `timeout`, and raises Closed, as those of `Pool`. A client of a tenant sees
    what that tenant has; servers refuse it what concerns the whole pool.
    """

    def __init__(self, pool: Pool) -> None:
        self._context = pool._context
        self._versions, self._write_on = pool._writer.versions, pool._writer.write_on
        self._extensions = pool._extensions

    def __repr__(self) -> str:
        return f"<Admin of {self._context.servers!r}>"

    @property
    def removals(self) -> Removals:
        """Finds whole namespaces and removes them; a tenant its own."""
        found: Removals = self._extensions.get("removal")
        return found

    # --- looking -------------------------------------------------------------------------

    async def namespaces(self, *, timeout: float | None = None) -> list[tuple[Namespace, int]]:
        """The namespaces that have blocks, by name, with their numbers of blocks.

        Reads at most a thousand pages of a master's list. Raises MasterLost.
        """
        found = await list_namespaces(self._context.masters, self._context.begin(timeout))
        return [(self._as_seen(namespace), blocks) for namespace, blocks in found]

    async def demand(self, *, timeout: float | None = None) -> Demand:
        """What clients ask for: live working sets, as the master that answers has measured.

        All clients ask the first master of their list while it answers; what other clients ask
        another one is not in it. Raises MasterLost.
        """
        found = self._extensions.get("room")
        demand: Demand = await found.demand(self._context.begin(timeout))
        sets = [one._replace(namespace=self._as_seen(one.namespace)) for one in demand.working_sets]
        return demand._replace(working_sets=tuple(sets))

    async def room(self, *, timeout: float | None = None) -> Room:
        """How many sessions fit: for those who admit them. It asks a master twice, and no server;
        once in some seconds is enough. What is measured is that of `demand`. Raises MasterLost.
        """
        found: Room = await self._extensions.get("room").room(self._context.begin(timeout))
        return found

    async def explain(
        self, namespace: Namespace, digests: Sequence[bytes], *, timeout: float | None = None
    ) -> list[Explanation]:
        """Where each block is, or why it is not there. Raises BadKey, and MasterLost when no
        master answers."""
        answers = await self._context.lookup.explain(
            self._context.own(namespace), digests, self._context.begin(timeout)
        )
        own = marker_of(self._context.tenant)  # a tenant writes its names without it
        return [
            one._replace(key=one.key._replace(namespace=namespace), text=one.text.replace(own, ""))
            for one in answers
        ]

    # --- moving --------------------------------------------------------------------------

    async def spread(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        *,
        to: int | Sequence[str],
        timeout: float | None = None,
        report: Callable[[int, int], None] | None = None,
    ) -> SpreadReport:
        """Put copies of a chain where it will be read, before its readers come (design: movers).

        `to` is how many servers should have it afterwards, or which: ids of servers, or of hosts
        (`Member.host`), of which the server with the most room gets it. They fetch it from each
        other, head first, each within its own budget for fetches, and evict for it only what was
        used before. What a server has already is not moved, so calling again goes on where the time
        was over. Ends by `timeout`; the result says what each server has, and why no more. `report`
        is called meanwhile with the blocks that all of these servers have, and are to have.

        Raises BadKey for an empty `chain` or wrong digests; UsageError for a wrong `to`; MasterLost
        when no master answers.
        """
        deadline = self._context.begin(timeout)
        check_digests(chain)
        found: SpreadReport = await self._extensions.get("spread").spread(
            self._context.own(namespace), chain, to, deadline, report
        )
        return found

    async def drain(
        self,
        server: str,
        *,
        within_s: float,
        back_in_s: float = 0.0,
        timeout: float | None = None,
    ) -> DrainReport:
        """Have the other servers fetch all blocks of `server`, which will leave (design: movers).

        Returns when it has begun; `drain_report` says how far it is. From now on `server` takes no
        blocks, and serves those that it has. With `back_in_s` it will be back so soon: blocks that
        lie in its file stay there. Raises ServerLost when the server cannot be reached, and
        MasterLost.
        """
        order = DrainOrder(
            True, False, _seconds("within_s", within_s), _seconds("back_in_s", back_in_s)
        )
        return await self._drain(server, order, timeout)

    async def drain_report(self, server: str, *, timeout: float | None = None) -> DrainReport:
        """How far the drain of `server` is, and what is left. Raises as `drain`."""
        return await self._drain(server, DrainOrder(), timeout)

    async def cancel_drain(self, server: str, *, timeout: float | None = None) -> DrainReport:
        """`server` stays, and takes blocks again; what others have fetched stays there.

        Raises as `drain`.
        """
        return await self._drain(server, DrainOrder(cancel=True), timeout)

    async def write_to(
        self,
        server: str,
        namespace: Namespace,
        digest: bytes,
        buffer: Buffer,
        *,
        timeout: float | None = None,
    ) -> WriteStatus:
        """Store one block on the server with the id `server`: for measurements and tools.

        If another server has it, that server's bytes are stored here, and not those of `buffer`:
        ALREADY_STORED when they differ (design: versions). REFUSED when that server refuses it,
        for example from a process that was stopped while it held memory (design: budgets). Raises
        BadKey, BadBuffer, and ServerLost when that server cannot be reached.
        """
        deadline = self._context.begin(timeout)
        check_digests([digest])
        views = as_views(buffer, 0)
        block = WriteBlock(digest, ROOT, views, sum(map(len, views)))
        options = WriteOptions(self._context.own(namespace), 0, True)
        (holders,) = await self._versions.holders(options, [digest], deadline)
        ours, source = True, block
        for holder in holders:
            if holder == server:
                continue
            (stored,) = await self._versions.stored(holder, options, [block], deadline)
            if stored.block is not None:
                ours = await differing(options, block, stored) is None
                source = stored.block
                break
            if not stored.has_left:
                return WriteStatus.ALREADY_STORED  # what it has is not known, so nothing is added
        try:
            (status,) = await self._write_on(server, options, [source], deadline)
        except (PeerError, Overloaded) as error:  # it is there, and refuses
            return status_of_error(error)
        if status is not WriteStatus.STORED:
            return status
        written = {0: WrittenBlock(source, {server}, set())}
        lost = await self._versions.settle(options, written, deadline)
        return WriteStatus.STORED if ours and not lost else WriteStatus.ALREADY_STORED

    def _as_seen(self, namespace: Namespace) -> Namespace:
        """As this client's tenant calls it. Raises MasterLost for one that a master should not have
        named."""
        tenant = self._context.tenant
        if not tenant:
            return namespace
        try:
            return Namespace(unqualified(tenant, namespace.name), namespace.parts)
        except UsageError as error:
            raise MasterLost(f"a master answered with {error}") from None

    async def _drain(self, server: str, order: DrainOrder, timeout: float | None) -> DrainReport:
        found: DrainReport = await self._extensions.get("drains").drain(
            server, order, self._context.begin(timeout)
        )
        return found


def _seconds(what: str, value: float) -> float:
    seconds = as_float(value)
    if seconds is None or not 0 <= seconds <= TIMEOUT_S_MAX:
        raise UsageError(f"{what} is {value!r:.40}, expected seconds, 0 to {TIMEOUT_S_MAX:g}")
    return seconds


async def list_namespaces(masters: Asks, deadline: float) -> list[tuple[Namespace, int]]:
    """Name, parts and blocks of each, with the names that masters have for them."""
    found: list[tuple[Namespace, int]] = []
    for _ in range(_PAGES_MAX):
        last = found[-1][0] if found else None
        question = Namespaces(last.name, last.parts) if last else Namespaces()
        answer = await masters.ask(question, NamespacesReply, deadline)
        page = answer.namespaces
        # Pages are sorted. A master whose pages do not go on would be asked in vain.
        if not page or page[-1][:2] <= (question.after, question.parts):
            break
        try:
            found += [(Namespace(name, parts), count) for name, parts, count in page]
        except BadKey as error:
            raise MasterLost(f"a master answered with {error}") from None
        if not answer.more:
            break
    return found
