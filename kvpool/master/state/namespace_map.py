"""The namespaces of a master's map in order: for those who list them page by page. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Final

from kvpool.master.state.block_map import BlockMap
from kvpool.master.state.directory import Directory
from kvpool.piecewise_dict import PiecewiseDict
from kvpool.types import Namespace

#: Namespaces that are sorted in one list.
_RUN_MAX: Final = 1024


class NamespaceMap(PiecewiseDict[Namespace, BlockMap]):
    """The blocks of each namespace, which are also in order: of their names, then of their parts.

    The order is kept in short runs, so that no step takes longer with many namespaces.
    """

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        super().__init__()
        #: Sorted one after the other; none is empty, unless it is the only one.
        self._runs: list[list[Namespace]] = [[]]

    def __setitem__(self, namespace: Namespace, blocks: BlockMap) -> None:
        if namespace not in self:
            number = self._run_of(_order(namespace))
            run = self._runs[number]
            bisect.insort(run, namespace, key=_order)
            if len(run) > _RUN_MAX:
                half = len(run) // 2
                self._runs[number : number + 1] = run[:half], run[half:]
        super().__setitem__(namespace, blocks)

    def __delitem__(self, namespace: Namespace) -> None:
        super().__delitem__(namespace)
        number = self._run_of(_order(namespace))
        run = self._runs[number]
        del run[bisect.bisect_left(run, _order(namespace), key=_order)]
        if not run and len(self._runs) > 1:
            del self._runs[number]

    def after(self, name: str, parts: int = 0) -> Iterator[Namespace]:
        """The namespaces behind this one, in order. Change nothing meanwhile."""
        number = self._run_of((name, parts))
        run = self._runs[number]
        yield from run[bisect.bisect_right(run, (name, parts), key=_order) :]
        for later in range(number + 1, len(self._runs)):
            yield from self._runs[later]

    def _run_of(self, place: tuple[str, int]) -> int:
        """The number of the run that has this place."""
        return max(0, bisect.bisect_right(self._runs, place, 1, key=lambda run: _order(run[0])) - 1)


def _order(namespace: Namespace) -> tuple[str, int]:
    return namespace.name, namespace.parts


def in_order(directory: Directory) -> NamespaceMap:
    """Those of a directory."""
    assert isinstance(directory.blocks, NamespaceMap)
    return directory.blocks
