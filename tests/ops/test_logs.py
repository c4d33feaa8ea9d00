"""The fields of an event are in each log line, however the host program formats its logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

#: What a module of kvpool logs.
WARN = """
from kvpool import logs
log = logs.get("kvpool.client")
log.warning("server is silent", server="gpu-17", why="no route: 'x'", block=bytes(range(32)), n=3)
"""
FIELDS = ("server=gpu-17", "why=\"no route: 'x'\"", "block=000102030405", "n=3")

#: How hosts configure logs, and how each field then looks.
PLAIN = 'import logging; logging.basicConfig(format="%(asctime)s %(levelname)s: %(message)s")'
STRUCTLOG = """
import logging, structlog
handler = logging.StreamHandler()
handler.setFormatter(structlog.stdlib.ProcessorFormatter(
    foreign_pre_chain=[EXTRA],
    processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer()]))
logging.getLogger().addHandler(handler)
structlog.configure(logger_factory=structlog.stdlib.LoggerFactory())
"""
HOSTS = {
    "logs are not configured": "",
    "basicConfig": PLAIN,
    "structlog is not configured": "import structlog\n" + PLAIN,
    "structlog without extras": STRUCTLOG.replace("EXTRA", "structlog.stdlib.add_log_level"),
}


def lines_of(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_program_sees_every_field(host: str) -> None:
    printed = lines_of(HOSTS[host] + WARN)
    (line,) = printed.splitlines()
    text = json.loads(line)["event"] if line.startswith("{") else line
    assert "server is silent " in text
    for field in FIELDS:
        assert field in text


def test_a_host_with_structured_logs_has_the_event_and_its_fields() -> None:
    printed = lines_of(STRUCTLOG.replace("EXTRA", "structlog.stdlib.ExtraAdder()") + WARN)
    assert json.loads(printed) == {
        "event": "server is silent",
        "server": "gpu-17",
        "why": "no route: 'x'",
        "block": "000102030405",
        "n": 3,
    }


def test_our_own_programs_print_each_field_once() -> None:
    printed = lines_of("from kvpool.cli import log_lines; log_lines.configure()" + WARN)
    record = json.loads(printed)
    assert record["event"] == "server is silent"
    assert (record["level"], record["logger"], record["n"]) == ("warning", "kvpool.client", 3)
    assert printed.count("gpu-17") == 1


def test_a_traceback_is_in_the_line_of_a_plain_host() -> None:
    fail = 'try: 1 / 0\nexcept ZeroDivisionError: log.exception("it failed", at=1)'
    printed = lines_of(PLAIN + "\nfrom kvpool import logs\nlog = logs.get('kvpool.x')\n" + fail)
    assert "it failed at=1 \nTraceback" in printed
    assert printed.rstrip().endswith("ZeroDivisionError: division by zero")


def test_a_value_cannot_begin_another_line() -> None:
    printed = lines_of(PLAIN + WARN.replace("gpu-17", "a\\nERROR b\\x1b[31m"))
    assert len(printed.splitlines()) == 1
    assert r"server='a\nERROR b\x1b[31m'" in printed
