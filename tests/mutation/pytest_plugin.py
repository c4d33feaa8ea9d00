"""A plug-in of pytest for the run under coverage (`coverage_map.py`)."""

from __future__ import annotations

import json
import os
from collections import defaultdict

import pytest

_seconds: defaultdict[str, float] = defaultdict(float)


def pytest_configure(config: pytest.Config) -> None:
    """Programs that a test starts are measured, too.

    Only the processes that run tests set the variable: one that inherits it starts coverage
    before pytest does, and then two tracers would disturb each other.
    """
    if hasattr(config, "workerinput"):
        os.environ["COVERAGE_PROCESS_START"] = os.environ["MUTATION_COVERAGE"]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add one phase (set-up, call, tear-down) of a test."""
    _seconds[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the seconds of each test; a worker of xdist, which saw only its part, does not."""
    if not hasattr(session.config, "workerinput"):
        with open(os.environ["MUTATION_SECONDS"], "w") as file:
            json.dump(_seconds, file)
