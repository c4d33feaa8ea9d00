"""A real engine whose blocks pass through a codec says the same as one without a pool."""

from __future__ import annotations

import pytest

from tests.connector.vllm.helpers import Engine, Models, Running, prompt, transfer
from tests.support.local_pool import LocalPool

pytestmark = pytest.mark.timeout(400)


def test_an_engine_loads_what_it_has_saved_smaller(
    pool: LocalPool, model: Models, running: Running, plain: Engine
) -> None:
    pytest.importorskip("zstandard")
    prompts = [prompt(number) for number in range(60, 63)]
    expected = plain.generate(prompts)["tokens"]
    config = transfer(pool.master, transports=["tcp"], codec="lossless")
    with running(model(), kv_transfer_config=config) as engine:
        assert engine.generate(prompts)["tokens"] == expected
        pool.settled()
        engine.forget()
        again = engine.generate(prompts)
        metrics = engine.metrics()
    assert again["tokens"] == expected
    assert again["cached"] == [480] * 3
    assert metrics["vllm:kvpool_coded_blocks encoded"] > 0
    before = metrics["vllm:kvpool_coded_bytes_before"]
    assert 0 < metrics["vllm:kvpool_coded_bytes_after"] < before
