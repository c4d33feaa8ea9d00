"""The attacked pool, and at the end of `make attack` what each attack cost."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.attack.castle import ATTACK_S, MEASURED, Castle, castle


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attacked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Castle]:
    """One castle for the attacks of a file: what one of them has left, the next ones find."""
    async with castle(tmp_path_factory.mktemp("castle")) as made:
        yield made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if ATTACK_S > 1 and MEASURED:
        terminalreporter.section("what attacks cost others, at most")
        for line in MEASURED:
            terminalreporter.write_line(line)
