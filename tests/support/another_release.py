"""A `kvpool` command as a process of another release: it speaks protocol 5.

python -m tests.support.another_release COMMAND...
"""

from __future__ import annotations

import runpy
import sys

from kvpool.wire import frames

frames.PROTOCOL_VERSION = 5  # type: ignore[misc]

if __name__ == "__main__":
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
