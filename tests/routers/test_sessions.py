"""Which sessions real routers keep on one engine, and what clients see when that engine is gone.

The table is in docs/fleet.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.routers.partners import GPU, SETTLE_S, Engine, Prompt, need, vllm_router_by

need("aiohttp", "vllm_router")

pytestmark = pytest.mark.timeout(120)

#: How clients name a session: headers, and members of the body.
NAMES: Final[dict[str, Any]] = {
    "X-Session-ID": lambda name: ({"X-Session-ID": name}, {}),
    "Codex": lambda name: ({"session-id": name, "thread-id": name}, {}),
    "Claude Code": lambda name: ({"X-Claude-Code-Session-Id": name}, {}),
    "session_id": lambda name: ({}, {"session_id": name}),
    "prompt_cache_key": lambda name: ({}, {"prompt_cache_key": name}),
}


class Asked:
    """Three engines behind a router."""

    def __init__(
        self, url: str, session: Any, engines: list[Engine], closers: list[AsyncExitStack]
    ) -> None:
        self._url = url
        self._session = session
        self._engines = engines
        self._closers = closers

    async def has_begun(self, sessions: int) -> None:
        """Each engine has the first two blocks of every third session on its device."""
        for number in range(sessions):
            prompt = Prompt(2)
            prompt.tokens = _prompt(number, 0)[: len(prompt.tokens)]
            self._engines[number % 3].send(prompt.stored(0, 2, GPU))
        await asyncio.sleep(SETTLE_S)

    async def ask(self, number: int, turn: int, headers: Any, members: Any) -> str:
        """The engine of a session's turn, whose prompt begins with the one before; or a status."""
        body = {"model": "m", "prompt": _prompt(number, turn), "max_tokens": 1, **members}
        url = f"{self._url}/v1/completions"
        async with self._session.post(url, json=body, headers=headers) as answer:
            if answer.status != 200:
                return str(answer.status)
            text: str = (await answer.json())["choices"][0]["text"]
            return text

    async def stop(self, number: int) -> None:
        """An engine is gone."""
        await self._closers[number].aclose()


def _prompt(number: int, turn: int) -> list[int]:
    return [*range(10), *range(1000 * number, 1000 * number + 30 + 16 * turn)]


@asynccontextmanager
async def behind(policy: str, directory: Path) -> AsyncIterator[Asked]:
    async with AsyncExitStack() as stack:
        engines, closers = [], []
        for name in "abc":
            engine = Engine(name)
            stack.callback(engine.publisher.close)
            closers.append(await stack.enter_async_context(AsyncExitStack()))
            await closers[-1].enter_async_context(engine.serve())
            engines.append(engine)
        log, streams = directory / f"{policy}.log", policy == "kv_aware"
        router = vllm_router_by(policy, engines, log, streams=streams)
        url, session = await stack.enter_async_context(router)
        yield Asked(url, session, engines, closers)


@pytest.mark.parametrize("policy", ["sticky_least_loaded", "consistent_hash"])
async def test_sticky_policies_know_one_header_only(policy: str, tmp_path: Path) -> None:
    """Codex and Claude Code do not send it: all of their sessions go to one engine, or move."""
    async with behind(policy, tmp_path) as asked:
        for name, written in NAMES.items():
            sessions = [
                [await asked.ask(number, turn, *written(f"s{number}")) for turn in range(4)]
                for number in range(1, 9)
            ]
            used = {engine for turns in sessions for engine in turns}
            assert "500" not in used
            if name == "X-Session-ID":
                assert all(len(set(turns)) == 1 for turns in sessions)
                assert len(used) > 1
            else:  # what a session is called does not matter: each turn goes where the others' go
                assert all(turns == sessions[0] for turns in sessions), name
                assert len(used) == 1 or policy == "consistent_hash"


@pytest.mark.parametrize(
    ("policy", "elsewhere"),
    [
        ("round_robin", True),
        ("kv_aware", True),
        ("sticky_least_loaded", False),
        ("consistent_hash", False),
    ],
)
async def test_sticky_policies_ask_a_dead_engine_again(
    policy: str, elsewhere: bool, tmp_path: Path
) -> None:
    """Clients see errors until the router takes the engine for dead; then sessions go on."""
    async with behind(policy, tmp_path) as asked:
        header = [{"X-Session-ID": f"s{number}"} for number in range(12)]
        await asked.has_begun(12)
        before = [await asked.ask(number, 0, header[number], {}) for number in range(12)]
        assert set(before) == {"a", "b", "c"}
        await asked.stop(0)
        after = [await asked.ask(number, 1, header[number], {}) for number in range(12)]
        assert ("500" not in after) == elsewhere
        for _ in range(20):
            last = [await asked.ask(number, 2, header[number], {}) for number in range(12)]
            if "500" not in last:
                break
            await asyncio.sleep(0.5)
        assert set(last) == {"b", "c"}
