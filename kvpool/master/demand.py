"""The joint of a master for what clients ask it for, and what follows from that."""

from __future__ import annotations

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Final

from kvpool.master.state.directory import ChainMatch, Directory
from kvpool.spans import MarkedChain
from kvpool.types import Demand, Namespace

#: `module:class`; the last one is made. Without its line and file nothing is measured.
DEMANDS: Final = (
    "kvpool.master.demand:NoDemand",
    "kvpool.master.state.demand:DemandMeter",
)


class NoDemand:
    """What a master tells of the questions that it answers, and is asked for; `now` in seconds."""

    def __init__(self, directory: Directory) -> None:
        """It has the blocks that are behind a hole."""

    def asked(
        self, namespace: Namespace, digests: Sequence[bytes], now: float, size: int = 0
    ) -> None:
        """These blocks were looked up, or are being written with `size` bytes each."""

    def asked_chain(
        self, namespace: Namespace, chain: MarkedChain, now: float, behind: Sequence[int] = ()
    ) -> None:
        """These blocks were looked up for a prompt, which goes on with the spans `behind`."""

    def found(self, namespace: Namespace, chain: MarkedChain, match: ChainMatch, nth: int) -> None:
        """That was answered, as the `nth` match that ended so; 0: the client asks again."""

    def demand(self, now: float) -> Demand:
        """The figures now."""
        return Demand(0.0, (), 0.0, 0.0)


def make_demand(directory: Directory) -> NoDemand:
    made: NoDemand = resolve_name(DEMANDS[-1])(directory)
    return made
