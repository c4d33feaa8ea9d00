"""The pool's client in vLLM's log. No engine runs here."""

from __future__ import annotations

import re
import subprocess
import sys

_PROGRAM = """
import logging
logging.basicConfig()  # as trainers do that have an engine in their process
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
from kvpool import logs
from kvpool_engines import client_log
from kvpool_connector.vllm_engine import engine_log
configure_logging(LoggingConfig())
client_log.hand_on(engine_log.logger)
engine_log.warning("of the connector")
logs.get("kvpool.client").warning("transport failed", server="a", why="it is gone")
"""


def test_lines_of_the_client_look_like_vllms_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, check=True
    )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "kvpool:" in line]
    for line, text in zip(lines, ["of the", "transport failed server=a"], strict=True):
        assert re.search(rf"WARNING \d\d-\d\d \d\d:\d\d:\d\d .*\] kvpool: {text}", line)
    assert "transport failed" not in (done.stdout + done.stderr).replace(lines[1], "")
