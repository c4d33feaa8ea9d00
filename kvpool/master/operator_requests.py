"""What operators ask a master: why blocks are where they are, what there is, what is asked for."""

from __future__ import annotations

from itertools import islice
from typing import Final

from kvpool.master.client_requests import ClientRequests, replicas_of, size_of_replicas
from kvpool.master.extension import Handlers
from kvpool.master.state.changes import PAGE_SIZE, size_of
from kvpool.master.state.directory import Directory
from kvpool.master.state.explanations import explain
from kvpool.master.state.namespace_map import in_order
from kvpool.protocols import Caller
from kvpool.tenant_names import marker_of
from kvpool.types import BATCH_BLOCKS_MAX, Demand, ReadStatus
from kvpool.wire import messages as wire
from kvpool.wire.questions import NAMESPACES_MAX, Demands, DemandsReply, Namespaces, NamespacesReply

#: Of a block that this master does not know, while servers may have it.
_JUST_BEGUN: Final = (
    "as far as this master knows, which has just begun, and not heard from all servers yet: "
    "ask again"
)


class OperatorRequests:
    def __init__(self, directory: Directory, clients: ClientRequests, stream: int) -> None:
        self._directory = directory
        self._clients = clients

    @property
    def handlers(self) -> Handlers:
        return {
            wire.Explain: self.explain,
            Namespaces: self.namespaces,
            Demands: self.demands,
        }

    def explain(self, m: wire.Explain, caller: Caller) -> wire.Explained:
        namespace, digests = wire.unpack_question(m)
        answers: list[tuple[int, str, list[tuple[str, str, int]]]] = []
        size = 0
        for one in explain(self._directory, namespace, digests[:BATCH_BLOCKS_MAX]):
            if self._clients.partial and one.status is ReadStatus.NEVER_WRITTEN:
                one = one._replace(text=_JUST_BEGUN)
            size += 64 + size_of(one.text) + size_of_replicas(one.replicas)
            if answers and size > PAGE_SIZE:
                break
            answers.append((one.status, one.text, replicas_of(one.replicas)))
        return wire.Explained(answers, len(answers) < len(digests))

    def namespaces(self, m: Namespaces, caller: Caller) -> NamespacesReply:
        """Those that have blocks, in order of name and parts: those of a tenant follow each
        other."""
        marker, held = marker_of(caller.tenant), in_order(self._directory)
        after = max((m.after, m.parts), (marker, 0))
        found = list(islice(held.after(*after), NAMESPACES_MAX + 1))
        found = [one for one in found if one.name.startswith(marker)]
        page = [(one.name, one.parts, len(held[one])) for one in found[:NAMESPACES_MAX]]
        return NamespacesReply(page, len(found) > len(page))

    def demands(self, m: Demands, caller: Caller) -> DemandsReply:
        demand = self._clients.demand(self._clients.now())
        if caller.tenant:  # the other figures are means over everybody
            marker = marker_of(caller.tenant)
            own = [one for one in demand.working_sets if one.namespace.name.startswith(marker)]
            demand = Demand(demand.seconds, tuple(own), 0.0, 0.0)
        sets = [
            (one.namespace.name, one.namespace.parts, one.size, one.blocks)
            for one in demand.working_sets
        ]
        return DemandsReply(
            demand.seconds,
            sets,
            min(4096.0, demand.chain_servers),
            demand.beyond_hole,
            demand.asked_blocks,
            demand.found_blocks,
            [one.prompt for one in demand.working_sets],
        )
