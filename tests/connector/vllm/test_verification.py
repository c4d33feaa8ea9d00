"""KV of another model under an engine's own name: it is found, and no answer after it is wrong.

No two engines whose KV differs have one name, so the test gives one's blocks the other's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool import Namespace, Pool
from tests.connector.vllm.helpers import prompt
from tests.connector.vllm.test_wrong_names import WARM_UP, Sequence
from tests.support.local_pool import LocalPool

pytestmark = pytest.mark.timeout(240)

#: Of 6 whole blocks each; they share nothing.
PROMPTS = [prompt(number, 200, 0) for number in range(300, 314)]


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    local = LocalPool()
    yield local
    local.close()


@pytest.fixture(scope="module")
def engines(logs: Callable[[str], Path], pool: LocalPool) -> Iterator[Sequence]:
    sequence = Sequence(logs("verification"), pool)
    yield sequence
    sequence.close()


def rename(pool: LocalPool, old: str, new: str) -> int:
    """Store the blocks of one tenant under the name of the other one; how many."""
    entries = [entry for server in pool.dev.servers for entry in server.store.inventory()]
    [name] = {
        entry.index.namespace for entry in entries if f"tenant={new} " in entry.index.namespace.name
    }
    mine = [entry for entry in entries if f"tenant={old} " in entry.index.namespace.name]

    async def copy(client: Pool) -> int:
        for entry in mine:
            data = bytearray(entry.size)
            [read] = await client.read(entry.index.namespace, [entry.digest], [data])
            [written] = await client.write(name, [entry.digest], [data], parents=[entry.parent])
            assert read.status.hit
            assert written.present
        return len(mine)

    assert isinstance(name, Namespace)
    return pool.ask(copy)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0}}),
        ("qwen3_moe", {"num_experts_per_tok": 1}),
    ],
    ids=["rope theta", "experts per token"],
)
def test_wrong_kv_is_found_within_ten_loads(
    kind: str,
    overrides: dict[str, Any],
    model: Callable[..., Path],
    engines: Sequence,
    pool: LocalPool,
) -> None:
    folder, ours, others = model(kind, layers=2), f"ours-{kind}", f"others-{kind}"
    engines.rounds(folder, [PROMPTS], tenant=others, hf_overrides=overrides)
    engines.rounds(folder, [[WARM_UP]], tenant=ours)
    assert rename(pool, others, ours) >= 6 * len(PROMPTS)
    rounds = [[one] for one in [*PROMPTS, PROMPTS[0]]]
    answers = engines.rounds(folder, rounds, tenant=ours, settings={"verify_rate": 0.1})
    truth = engines.rounds(folder, rounds)
    assert [answer["cached"][0] for answer in answers[:-1]] == [192] * 9 + [0] * 5
    assert [answer["tokens"] for answer in answers[:9]] != [one["tokens"] for one in truth[:9]]
    assert [answer["tokens"] for answer in answers[9:]] == [one["tokens"] for one in truth[9:]]
    lines = [line for line in engines.log.read_text().splitlines() if "other KV than" in line]
    assert f"tenant={ours} " in lines[-1]
    assert "ERROR" in lines[-1]
