"""Memory as a GPU hands it out: what was in it before, not zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_MAKERS = ("aten::empty", "aten::new_empty")


class PoisonedMemory(TorchDispatchMode):
    """Every byte that nobody has written, gaps between rows too, has this value."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self._value = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func._schema.name.startswith(_MAKERS) and made.device.type == "cpu":
            torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage()).fill_(self._value)
        return made
