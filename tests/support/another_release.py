"""A `kvpool` command as a process of another release: it speaks a later protocol.

python -m tests.support.another_release COMMAND...
"""

from __future__ import annotations

import runpy
import sys

from kvpool.wire import frames

frames.PROTOCOL_VERSION += 1  # type: ignore[misc]

if __name__ == "__main__":
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
