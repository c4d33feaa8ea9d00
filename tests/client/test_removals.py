"""What a client takes for the answer to a removal or a report, over any channel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpool import removals
from kvpool.errors import BadMessage
from kvpool.wire.messages import StatusReply
from tests.conftest import NAMESPACE, keys


async def answered(statuses: bytes) -> list[bool]:
    async def request(*_: Any, **__: Any) -> StatusReply:
        return StatusReply(statuses)

    channel: Any = SimpleNamespace(request=request)
    return await removals.remove(channel, NAMESPACE, keys("three", 3), deadline=0.0)


async def test_an_answer_has_one_status_for_each_block_and_only_a_one_is_yes() -> None:
    assert await answered(b"\1\0\2") == [True, False, False]
    for statuses in (b"", b"\1\1", b"\1\1\1\1"):
        with pytest.raises(BadMessage, match="statuses for 3 blocks"):
            await answered(statuses)
