"""KV of another model under an engine's own name: it is found, and no answer is wrong.

No two engines whose KV differs have one name, so the test gives one's blocks the other's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool import Pool
from kvpool.server.state.entry import Entry
from tests.connector.vllm.helpers import Logs, Models, prompt
from tests.connector.vllm.test_wrong_names import (
    OTHER_KV,
    WARM_UP,
    Sequence,
    adapter,
    trained_embeddings,
)
from tests.support.local_pool import LocalPool

pytestmark = pytest.mark.timeout(240)

#: Of 6 whole blocks each; they share nothing.
PROMPTS = [prompt(number, 200, 0) for number in range(300, 314)]
GOOD = [prompt(number, 200, 0) for number in range(320, 324)]


@pytest.fixture(scope="module")
def engines(logs: Logs, shared_pool: LocalPool) -> Iterator[Sequence]:
    sequence = Sequence(logs("verification"), shared_pool)
    yield sequence
    sequence.close()


def entries(pool: LocalPool, tenant: str) -> list[Entry]:
    """The blocks of a tenant, in the order of their keys."""
    found = [entry for server in pool.dev.servers for entry in server.store.index.inventory()]
    mine = [entry for entry in found if f"tenant={tenant} " in entry.index.namespace.name]
    return sorted(mine, key=lambda entry: entry.digest)


def rename(pool: LocalPool, old: str, new: str, keys: str = "") -> int:
    """Store the blocks of one tenant under the name of another one; how many.

    `keys`: under the keys that a third one has, where those of the first would not be found.
    """
    mine, [name] = entries(pool, old), {entry.index.namespace for entry in entries(pool, new)}
    places = entries(pool, keys or old)

    async def copy(client: Pool) -> int:
        for entry, place in zip(mine, places, strict=True):
            data = bytearray(entry.size)
            [read] = await client.read(entry.index.namespace, [entry.digest], [data])
            [written] = await client.write(name, [place.digest], [data], parents=[place.parent])
            assert read.status.hit
            assert written.present
        return len(mine)

    return pool.ask(copy)


CASES = {**OTHER_KV, "adapter": ("qwen3", {})}
SHORT = ("rope theta", "experts per token")


@pytest.mark.parametrize(
    "case",
    [case if case in SHORT else pytest.param(case, marks=pytest.mark.long) for case in CASES],
)
def test_of_an_engine_with_other_kv_nothing_is_used_and_the_others_go_on_sharing(
    case: str, model: Models, engines: Sequence, shared_pool: LocalPool, tmp_path: Path
) -> None:
    kind, overrides = CASES[case]
    folder, ours, others = model(kind, layers=2), f"ours-{kind}-{case[:4]}", f"others-{case[:4]}"
    other_folder, keys = folder, ""
    lora: dict[str, Any] = {}
    if case == "embeddings":
        other_folder = trained_embeddings(folder, tmp_path / folder.name)
    if case == "adapter":  # its keys tell which adapter a block was computed with
        lora = {"enable_lora": True, "max_lora_rank": 8, "adapter": adapter(tmp_path, 1, 2)}
        overrides = lora
    engines.rounds(other_folder, [[WARM_UP], PROMPTS], tenant=others, **overrides)
    if case == "adapter":
        adapter(tmp_path, 2, 2)
        keys = "keys"
        engines.rounds(folder, [[WARM_UP], PROMPTS], tenant=keys, **lora)
    # Once more: a block that waits to be saved is saved with a step of the next request.
    good = GOOD if case in SHORT else []
    engines.rounds(folder, [[WARM_UP], *([one] for one in good), [WARM_UP]], tenant=ours, **lora)
    assert rename(shared_pool, others, ours, keys) >= 6 * len(PROMPTS)
    rounds = [[one] for one in [*good[:2], *PROMPTS, *good[2:], PROMPTS[0]]]
    loading = [[WARM_UP]] if case == "adapter" else []  # the adapter, which is no hit
    checked = {"tenant": ours, "settings": {"verify_rate": 0.1}}
    answers = engines.rounds(folder, loading + rounds, **checked, **lora)[len(loading) :]
    truth = engines.rounds(folder, rounds, **lora)
    assert [one["tokens"] for one in answers] == [one["tokens"] for one in truth]
    if good:  # the first and the third load of an engine's blocks are compared
        cached = [answer["cached"][0] for answer in answers]
        assert [cached[0], cached[1], cached[-3], cached[-2]] == [0, 192, 0, 192]
        assert cached[2:-3] == [0] * len(PROMPTS)
    lines = [line for line in engines.log.read_text().splitlines() if "other KV than" in line]
    assert f"tenant={ours} " in lines[-1]
    assert "ERROR" in lines[-1]
    assert len([line for line in lines if f"tenant={ours} " in line]) == 1
