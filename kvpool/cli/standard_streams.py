"""The standard streams of a command, also where who started it has closed them."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from typing import cast


def open_standard_streams() -> None:
    """Those that are closed are /dev/null from now on.

    Else the next file or socket would have the number of one, such as a disk's of blocks, and would
    get whatever is printed there. What their encoding does not have is written as an escape.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    cast(TextIOWrapper, sys.stdout).reconfigure(errors="backslashreplace")
