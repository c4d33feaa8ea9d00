"""The joint of a master's map: what has the blocks of all namespaces."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any, Final

from kvpool.piecewise_dict import PiecewiseDict
from kvpool.types import Namespace

#: `module:class`; the last one is made. Without its line and file they are in no order.
NAMESPACES: Final = (
    "kvpool.piecewise_dict:PiecewiseDict",
    "kvpool.master.state.namespace_map:NamespaceMap",
)


def make_namespaces() -> PiecewiseDict[Namespace, Any]:
    made: PiecewiseDict[Namespace, Any] = resolve_name(NAMESPACES[-1])()
    return made
