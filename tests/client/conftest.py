"""A client of a small pool, for tests of what does not depend on the transport."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvpool import ClientConfig, Pool, dev


@pytest.fixture
async def tcp(pool_dev: dev.Dev) -> AsyncIterator[Pool]:
    """A client of `pool_dev` over tcp."""
    config = ClientConfig(masters=[pool_dev.address], transports=["tcp"])
    async with pool_dev.pool(config) as client:
        yield client
