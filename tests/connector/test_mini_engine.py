"""The teaching engine: a pool, a cache and a batch change when tokens come, and never which."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kvpool.sync
from examples.mini_engine import connector
from examples.mini_engine.cache import BLOCK, prefix_keys
from examples.mini_engine.engine import BATCH, CHUNK, Engine, Request
from examples.mini_engine.model import Model, Shape
from kvpool import dev

HERE = Path(__file__).parents[2]
SMALL = Shape(vocabulary=500, width=64, layers=2, heads=4, kv_heads=2, head=16, hidden=128)
MODEL = Model(SMALL, seed=0)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As many threads as the engines of the example have, and time for a loaded machine."""
    monkeypatch.setattr(connector, "LOAD_S", 20.0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, dev_in_thread: dev.Dev) -> dev.Dev:
    """A pool in a thread of its own; whoever uses it has time."""
    monkeypatch.setattr(connector, "CONNECT_S", 20.0)
    monkeypatch.setattr(connector, "SAVE_S", 20.0)
    return dev_in_thread


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    """Makes engines."""
    made: list[Engine] = []

    def make(model: Model = MODEL, blocks: int = 256, pool: str | None = None) -> Engine:
        made.append(Engine(model, blocks, pool))
        return made[-1]

    yield make
    for one in made:
        one.close()


Make = Callable[..., Engine]


def prompt(name: str, length: int) -> list[int]:
    return random.Random(name).choices(range(SMALL.vocabulary), k=length)


def ask(engine: Engine, *prompts: list[int], new_tokens: int = 6) -> list[Request]:
    """Serve prompts together. The engine takes itself for a slow one: so loading is worth it."""
    engine.token_s = 1.0
    requests = [engine.add(one, new_tokens) for one in prompts]
    engine.run()
    return requests


def ask_later(engine: Engine, *prompts: list[int]) -> list[Request]:
    """The same, without waiting for what they save."""
    requests = [engine.add(one, 6) for one in prompts]
    while any(len(request.output) < 6 for request in requests):
        engine.step()
    return requests


def kept(engine: Engine, request: Request) -> bytes:
    """Keys and values of the request's whole blocks, bit by bit, as its memory has them now."""
    blocks = request.blocks[: len(request.keys)]
    return b"".join(bytes(engine._memory.buffer(block)) for block in blocks)


def naive(model: Model, tokens: list[int]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """One pass over all tokens with attention as books have it; and all its keys and values."""
    known: list[tuple[Tensor, Tensor]] = []

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        known.append((key, value))
        group = SMALL.heads // SMALL.kv_heads
        keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = torch.einsum("nhd,mhd->hnm", query, keys) / SMALL.head**0.5
        future = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
        return torch.einsum(
            "hnm,mhd->nhd", scores.masked_fill(future, -torch.inf).softmax(2), values
        )

    return model.forward(torch.tensor(tokens), torch.arange(len(tokens)), attend), known


def test_paged_attention_is_attention(engine: Make) -> None:
    """Chunks, pages and a cache give what one naive pass over all tokens gives."""
    paged, tokens = engine(), prompt("naive", 2 * CHUNK + 21)
    (request,) = ask(paged, tokens, new_tokens=12)
    for token in request.output:
        hidden, known = naive(MODEL, tokens)
        assert MODEL.next_token(hidden[-1:]) == token
        tokens = [*tokens, token]
    table = torch.tensor(request.blocks)
    for layer, expected in enumerate(known):
        here = paged._memory.read(layer, table, len(tokens) - 1)
        torch.testing.assert_close(here, expected, atol=1e-4, rtol=1e-4)


def test_a_batch_says_what_each_would_say_alone(engine: Make) -> None:
    """More requests than run together, in a cache that is too small for all of them."""
    prompts = [prompt(f"batch {n}", 40 + 37 * n) for n in range(BATCH + 4)]
    alone = engine()
    expected = [ask(alone, one, new_tokens=9)[0].output for one in prompts]
    together = ask(engine(blocks=60), *prompts, new_tokens=9)
    assert [request.output for request in together] == expected
    assert len({tuple(output) for output in expected}) == len(prompts)


def test_who_decodes_beside_it_changes_no_bit(engine: Make) -> None:
    prompts = [prompt(f"beside {n}", 45) for n in range(3)]
    one, other = engine(), engine()
    alone = ask(one, prompts[0], new_tokens=20)[0]
    first = ask(other, *prompts, new_tokens=20)[0]
    length = len(prompts[0]) + 19  # the last token has never been an input
    for layer in range(SMALL.layers):
        here, there = (
            e._memory.read(layer, torch.tensor(r.blocks), length)
            for e, r in ((one, alone), (other, first))
        )
        assert torch.equal(here[0], there[0])
        assert torch.equal(here[1], there[1])


@pytest.mark.parametrize("tail", [1, 30, CHUNK - 1, CHUNK, CHUNK + BLOCK])
def test_a_hit_gives_the_same_bits(engine: Make, pool: dev.Dev, tail: int) -> None:
    """Wherever the prompt ends, what follows a loaded prefix is what follows a computed one."""
    document, end = prompt("document", 2 * CHUNK), prompt("end", tail)
    first, second = engine(pool=pool.address), engine(pool=pool.address)
    ask(first, document + prompt("other end", 40))
    (cached,), (loaded,) = ask(first, document + end), ask(second, document + end)
    computer = engine()
    (computed,) = ask(computer, document + end)
    assert (cached.from_cache, cached.from_pool) == (2 * CHUNK, 0)
    assert (loaded.from_cache, loaded.from_pool) == (0, 2 * CHUNK if tail <= CHUNK else 3 * CHUNK)
    assert (computed.from_cache, computed.from_pool) == (0, 0)
    assert cached.output == loaded.output == computed.output
    assert kept(first, cached) == kept(second, loaded) == kept(computer, computed)


def test_the_same_block_after_another_beginning_is_another(engine: Make, pool: dev.Dev) -> None:
    """What is kept of a token depends on all before it, so a key names the whole prefix."""
    beginning, rest = prompt("beginning", CHUNK), prompt("rest", 2 * CHUNK + 5)
    first, second = engine(pool=pool.address), engine(pool=pool.address)
    ask(first, beginning + rest)
    for one in first, second:
        (request,) = ask(one, rest)
        assert (request.from_cache, request.from_pool) == (0, 0 if one is first else 2 * CHUNK)
        assert request.output == ask(engine(), rest)[0].output


def test_what_an_engine_forgets_the_pool_remembers(engine: Make, pool: dev.Dev) -> None:
    small = engine(blocks=30, pool=pool.address)
    prompts = [prompt(f"document {n}", 2 * CHUNK + 9) for n in range(3)]
    before = [ask(small, one)[0] for one in prompts]
    after = [ask(small, one)[0] for one in prompts]
    assert [request.from_pool for request in before] == [0, 0, 0]
    assert [request.from_pool for request in after] == [2 * CHUNK] * 3
    assert [request.output for request in after] == [request.output for request in before]


def test_other_weights_never_hit(engine: Make, pool: dev.Dev) -> None:
    ours, theirs = engine(pool=pool.address), engine(Model(SMALL, seed=1), pool=pool.address)
    tokens = prompt("shared", 2 * CHUNK + 5)
    (one,), (other,) = ask(ours, tokens), ask(theirs, tokens)
    assert ours.namespace != theirs.namespace
    assert (one.from_pool, other.from_pool) == (0, 0)
    assert other.output == ask(engine(Model(SMALL, seed=1)), tokens)[0].output != one.output


def test_blocks_on_their_way_to_the_pool_are_given_to_nobody(
    engine: Make, pool: dev.Dev, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that takes long holds its blocks, and others wait or take the rest."""
    small = engine(blocks=40, pool=pool.address)
    slow: Future[None] = Future()
    monkeypatch.setattr(small.connector, "save", lambda keys, buffers: slow)
    (first,) = ask_later(small, prompt("saved", 2 * CHUNK + 5))
    before = kept(small, first)[: 2 * CHUNK // BLOCK * len(small._memory.buffer(0))]
    monkeypatch.setattr(small.connector, "save", lambda keys, buffers: None)
    others = [prompt(f"other {n}", CHUNK + 5) for n in range(4)]
    ask_later(small, *others)
    assert kept(small, first).startswith(before)
    slow.set_result(None)
    ask(small, prompt("long", 4 * CHUNK + 5))  # it needs nearly all
    assert not kept(small, first).startswith(before)


@pytest.mark.parametrize("size", [-1, +4096])
def test_a_block_of_another_size_is_computed(engine: Make, pool: dev.Dev, size: int) -> None:
    """Somebody has stored something else under our key, shorter or longer."""
    reader, tokens = engine(pool=pool.address), prompt("poison", 2 * CHUNK + 5)
    block = len(reader._memory.buffer(0))
    keys = prefix_keys(tokens)[: 2 * CHUNK // BLOCK]
    blocks = [bytes(block + size if n == 3 else block) for n in range(len(keys))]
    with kvpool.sync.connect(pool.address) as outsider:
        outsider.write(reader.namespace, keys, blocks)
    (request,) = ask(reader, tokens)
    assert request.from_pool == 0
    assert request.output == ask(engine(), tokens)[0].output


def test_flipped_bits_are_computed_again(engine: Make, pool: dev.Dev) -> None:
    """What was loaded before the bad block counts, in whole chunks; the rest is computed."""
    writer, reader = engine(pool=pool.address), engine(pool=pool.address)
    tokens = prompt("rot", 2 * CHUNK + 5)
    (written,) = ask(writer, tokens)
    (server,) = pool.servers
    entry = server.store.index.peek(writer.namespace, 0, prefix_keys(tokens)[CHUNK // BLOCK + 2])
    server.tier.view(entry.offset, 64)[7] ^= 1  # type: ignore[attr-defined]
    (read,) = ask(reader, tokens)
    assert read.from_pool == CHUNK
    assert read.output == written.output
    assert kept(reader, read) == kept(writer, written)


def test_no_pool_at_all(engine: Make) -> None:
    tokens = prompt("absent", 2 * CHUNK + 5)
    (request,) = ask(engine(pool="127.0.0.1:9"), tokens)
    assert request.output == ask(engine(), tokens)[0].output


def test_a_pool_that_is_killed_in_the_middle(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 while requests run: they end with the same tokens."""
    monkeypatch.setattr(connector, "PAUSE_S", 1000.0)
    monkeypatch.setattr(connector, "CONNECT_S", 20.0)
    monkeypatch.setattr(connector, "LOAD_S", 0.5)
    prompts = [prompt(f"killed {n}", CHUNK + 50 * n) for n in range(1, 6)]
    expected = [ask(engine(), one)[0].output for one in prompts]
    command = [sys.executable, "-m", "kvpool", "dev", "--bind", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        address = running.stdout.readline().rpartition(" ")[2].strip()
        writer, reader = (engine(pool=address) for _ in range(2))
        ask(writer, *prompts[:2])
        reader.token_s = 1.0
        requests = [reader.add(one, 6) for one in prompts]
        while len(requests[1].output) < 2:
            reader.step()
        running.kill()
        running.wait()
        reader.run()
    assert [request.output for request in requests] == expected
    assert [request.from_pool for request in requests[2:]] == [0, 0, 0]
    (again,) = ask(reader, prompts[0])
    assert (again.from_cache, again.output) == (CHUNK, expected[0])


def test_the_pool_is_asked_only_where_computing_takes_longer(engine: Make, pool: dev.Dev) -> None:
    writer, reader = engine(pool=pool.address), engine(pool=pool.address)
    tokens = prompt("worth", 2 * CHUNK + 5)
    ask(writer, tokens)
    assert reader.connector is not None
    keys = prefix_keys(tokens)
    buffers = [reader._memory.buffer(block) for block in range(len(keys))]
    assert reader.connector.load(keys, buffers, compute_s=1e-6) == 0
    assert reader.connector.load(keys, buffers, compute_s=1.0) == len(keys)
    # A block has taken longer than this by now: until that is forgotten, none is loaded.
    reader.connector._load_s = 0.1
    assert reader.connector.load(keys, buffers, compute_s=0.05) == 0


def test_requests_that_can_never_be_served_are_refused(engine: Make) -> None:
    small = engine(blocks=10)
    for tokens, new_tokens in (([], 1), ([1], 0), ([1] * 160, 1)):
        with pytest.raises(ValueError, match="tokens, of at most 160"):
            small.add(tokens, new_tokens)
    assert len(ask(small, [1] * 150, new_tokens=10)[0].output) == 10


def test_the_document_quotes_the_code() -> None:
    """Every Python block of docs/write-a-connector.md stands in the example, line by line."""
    code = "\n".join(
        path.read_text() for path in sorted((HERE / "examples/mini_engine").glob("*.py"))
    )
    blocks = re.findall(
        r"```python\n(.*?)```", (HERE / "docs/write-a-connector.md").read_text(), re.S
    )
    assert len(blocks) > 5
    for block in blocks:
        indents = (textwrap.indent(block, " " * spaces) for spaces in (0, 4, 8, 12))
        assert any(indented in code for indented in indents), block
    assert len((HERE / "examples/mini_engine/connector.py").read_text().splitlines()) < 150


@pytest.mark.timeout(120)
def test_the_example_runs() -> None:
    """It ends with 0 when all of its engines, each in a process of its own, said the same."""
    done = subprocess.run(
        [sys.executable, "-m", "examples.mini_engine", "--document", "256"],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=HERE,
    )
    assert done.returncode == 0, done.stderr
    assert "times sooner" in done.stdout
