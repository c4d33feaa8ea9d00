"""A `kvpool` command as a process of the release before: it speaks protocol 3 only.

python -m tests.support.previous_release COMMAND...
"""

from __future__ import annotations

import runpy
import sys

import kvpool.net.requests
import kvpool.wire.messages
import kvpool.wire.versions  # noqa: F401
from kvpool_transports.streams import requests

for imported in list(sys.modules.values()):
    for constant in ("PROTOCOL_VERSION", "PROTOCOL_VERSION_MIN"):
        if hasattr(imported, constant):
            setattr(imported, constant, 3)
for constant in ("ONE_REQUEST_MAX", "ONE_REQUEST_MAPPED_MAX"):
    setattr(requests, constant, 0)  # every write came in steps

if __name__ == "__main__":
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
