"""`kvpool_transformers` with the real transformers, on a CPU: `make test WITH=transformers`."""

from __future__ import annotations

import _thread
import asyncio
import copy
import functools
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import kvpool.sync
from kvpool import ClientConfig, UsageError, dev
from kvpool.testing import Ran
from kvpool.testing.connector_checks import prompt

pytest.importorskip("transformers", reason="needs transformers 5.19: make test WITH=transformers")

import torch
from torch.nn import functional
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3 import modeling_qwen3

from kvpool_transformers import PooledCache, model_name, model_state, pooled_cache
from kvpool_transformers.blocks import BLOCK_TOKENS, BlockLayout, chain
from kvpool_transformers.model_state import ModelState
from tests.connector.conformance import conformance

SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def tiny(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **changes})).eval()


def pooled(pool: Any, model: Any, **settings: Any) -> PooledCache:
    """As a user's, but it loads whatever there is: computing with a tiny model is faster."""
    return PooledCache(pool, model, **{"load": "always", **settings})


class Engine:
    """transformers, as the checks for connectors drive it."""

    def __init__(self, master: str, variant: str) -> None:
        model = tiny(seed=variant == "model", num_key_value_heads=4 if variant == "layout" else 2)
        if variant == "dtype":
            model.to(torch.bfloat16)
        self.cache = pooled(
            master or None, model, salt="b" if variant == "salt" else "", load_timeout_s=1.0
        )

    @property
    def namespaces(self) -> list[kvpool.Namespace]:
        return [self.cache.namespace]

    def run(self, tokens: Sequence[int]) -> Ran:
        whole = self.cache.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=None)
        return Ran(whole, self.cache.last.loaded)

    def cancel(self, tokens: Sequence[int]) -> None:
        """Ctrl-C while it loads or computes."""
        timer = threading.Timer(0.003, _thread.interrupt_main)
        try:
            timer.start()
            self.cache.prefill(tokens)
            time.sleep(5)
        except KeyboardInterrupt:
            pass
        timer.join()

    def settle(self) -> None:
        self.cache.settle()

    def close(self) -> None:
        self.cache.close()


test_conformance = conformance(Engine)


@pytest.fixture
def pool(dev_in_thread: dev.Dev) -> Iterator[kvpool.sync.Pool]:
    with kvpool.sync.connect(dev_in_thread.address) as opened:
        yield opened


# --- a conversation ----------------------------------------------------------------------------


def talk(caches: Sequence[PooledCache]) -> tuple[list[int], int, int]:
    """Four turns, each with the next cache; all tokens, and how many were loaded and computed."""
    tokens = prompt(1, 200)
    for turn in range(4):
        cache = caches[turn % len(caches)]
        tokens = cache.generate(
            tokens + prompt(100 + turn, 40), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert cache.settle()
    counters = [cache.counters for cache in caches]
    return (
        tokens,
        sum(one["tokens_loaded"] for one in counters),
        sum(one["tokens_computed"] for one in counters),
    )


def test_a_conversation_that_changes_its_process(pool: kvpool.sync.Pool) -> None:
    """Generated tokens are loaded, too: the next turn begins with them."""
    with pooled(None, tiny()) as alone:
        expected, loaded, computed_alone = talk([alone])
        assert loaded == 0
    with pooled(pool, tiny()) as one, pooled(pool, tiny()) as other:
        tokens, loaded, computed = talk([one, other])
    assert tokens == expected
    assert loaded + computed == computed_alone
    # All full blocks of what was there before: 248 tokens and 12 more with each turn of 52.
    assert loaded == sum((251 + 52 * turn) // BLOCK_TOKENS * BLOCK_TOKENS for turn in range(3))
    assert pool.members()  # it is the caller's, and still open


PROCESS = """
import sys, torch
from tests.connector.test_transformers import pooled, tiny, prompt
torch.set_num_threads(1)
tiny(attn_implementation="eager").generate(torch.tensor([prompt(1, 40)]), max_new_tokens=3)
with pooled(sys.argv[1] or None, tiny()) as cache:
    print(cache.generate(prompt(7), max_new_tokens=10, do_sample=False, eos_token_id=None))
    print(cache.last.loaded)
"""


def test_two_processes(dev_in_thread: dev.Dev) -> None:
    """They have one name for the model, whatever the order of their sets and what has run before:
    so the third one loads what the second one has computed."""
    said = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PROCESS, address],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        ).stdout.splitlines()
        for seed, address in zip("123", ("", *[dev_in_thread.address] * 2), strict=True)
    ]
    assert [lines[-1] for lines in said] == ["0", "0", "288"]
    assert said[0][:-1] == said[1][:-1] == said[2][:-1]


def test_layers_with_other_shapes_and_types() -> None:
    past = DynamicCache()
    torch.manual_seed(3)
    for number, (heads, key, value, dtype) in enumerate(
        [(2, 24, 16, torch.float32), (1, 8, 8, torch.bfloat16)]
    ):
        past.update(
            torch.randn(1, heads, 100, key).to(dtype),
            torch.randn(1, heads, 100, value).to(dtype),
            number,
        )
    layout = BlockLayout.of(past)
    assert layout.fits(past)
    again = DynamicCache()
    layout.fill(again, layout.take(past, 0, 3))
    for one, other in zip(past.layers, again.layers, strict=True):
        assert torch.equal(one.keys[..., :96, :], other.keys)
        assert torch.equal(one.values[..., :96, :], other.values)
    assert torch.equal(layout.take(past, 1, 3), layout.take(past, 0, 3)[1:])


def test_a_prompt_is_never_loaded_whole(pool: kvpool.sync.Pool) -> None:
    """`generate` must compute a token: its logits are what it wants."""
    with pooled(pool, tiny()) as cache:
        for length in (1, 2, 31, 32, 33, 64, 65):
            tokens = prompt(5, length)
            for _ in range(2):
                assert cache.prefill(tokens).get_seq_length() == length - 1
                cache.settle()
            assert cache.last.loaded == (length - 1) // 32 * 32


def test_keys_name_all_tokens_before() -> None:
    one, other = prompt(1, 96), prompt(1, 96)
    other[0] += 1
    assert len(chain(one)) == 3
    assert not set(chain(one)) & set(chain(other))
    assert chain(one[:64]) == chain(one)[:2]


# --- what may not be shared ----------------------------------------------------------------------


def weight(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.model.layers[0].self_attn.k_proj.weight
    return found


class Scaled(torch.nn.Module):
    """A wrapper such as libraries for adapters put around a layer."""

    def __init__(self, base: torch.nn.Module, scale: float) -> None:
        super().__init__()
        self.base = base
        self.scale = scale

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) * self.scale


def add_in_place(model: Any) -> None:
    data = weight(model).data
    data += 0.01


def train_a_step(model: Any) -> None:
    ids = torch.tensor([prompt(1, 8)])
    with torch.enable_grad():
        model(ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def wrap(model: Any, scale: float = 1.1) -> None:
    attention = model.model.layers[0].self_attn
    attention.k_proj = Scaled(attention.k_proj, scale).eval()


def patch_forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    before, factor = mlp.forward, torch.tensor(1.5)
    mlp.forward = lambda x: before(x) * factor


def swap_rows(model: Any) -> None:
    weight(model).data[:2] = weight(model).data[:2].flip(0).clone()


def attach_scales(model: Any) -> None:
    """As packages for quantized weights do: the scales hang on the parameter."""
    weight(model).scales = {"block": torch.ones(4)}  # type: ignore[attr-defined]


def hold_numpy(model: Any) -> None:
    """A number of numpy has neither attributes nor slots."""
    wrap(model, np.float32(1.5))  # type: ignore[arg-type]


def wrap_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new method bears the old one's name."""
    before = modeling_qwen3.Qwen3MLP.forward
    monkeypatch.setattr(
        modeling_qwen3.Qwen3MLP,
        "forward",
        functools.wraps(before)(lambda self, x: before(self, x) * 2),
    )


def patch_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Liger does: a function that the model's module names."""
    before = modeling_qwen3.apply_rotary_pos_emb

    @functools.wraps(before)
    def scaled(*of: Any, **named: Any) -> Any:
        query, key = before(*of, **named)
        return query, key * 1.1

    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", scaled)


def patch_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SageAttention does: a function of torch, which a function of transformers calls."""
    before = functional.scaled_dot_product_attention
    changed = functools.wraps(before)(lambda *of, **named: before(*of, **named) * 1.05)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", changed)


def patch_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]

    @functools.wraps(before)
    def changed(*of: Any, **named: Any) -> Any:
        output, weights = before(*of, **named)
        return output * 1.1, weights

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", changed)


#: What is changed in a process, so that a model with the same modules and bytes has other keys.
PATCHES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a method of a class": wrap_class,
    "a function of its module": patch_rope,
    "a function of torch": patch_sdpa,
    "a table of transformers": patch_registered,
    "a function of C": lambda m: m.setattr(torch, "rsqrt", lambda x: x**-0.5 * 2),
    "what calls modules": lambda m: m.setattr(torch.nn.Module, "__call__", lambda s, x: x),
}


@pytest.mark.parametrize("patch", PATCHES)
def test_replaced_code_gets_another_name(monkeypatch: pytest.MonkeyPatch, patch: str) -> None:
    model = tiny()
    before = ModelState(model).structure
    with monkeypatch.context() as context:
        PATCHES[patch](context)
        assert ModelState(model).structure != before
    assert ModelState(model).structure == before


def test_how_floats_are_multiplied_is_in_the_name() -> None:
    model = tiny()
    before = ModelState(model).structure
    try:
        torch.set_float32_matmul_precision("medium")
        assert ModelState(model).structure != before
    finally:
        torch.set_float32_matmul_precision("highest")


FACTOR = 1.0


def test_what_replaced_code_names_is_in_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of its module; and the tensor whose method it is."""
    model = tiny()
    mlp, before = model.model.layers[0].mlp, model.model.layers[0].mlp.forward
    mlp.forward = lambda x: before(x) * FACTOR
    names = {ModelState(model).structure}
    monkeypatch.setitem(globals(), "FACTOR", 1.5)
    names.add(ModelState(model).structure)
    mlp.forward = torch.full((64,), 0.5).mul
    names.add(ModelState(model).structure)
    mlp.forward = torch.full((32,), 0.5).mul
    assert ModelState(model).structure not in names
    assert len(names) == 3


class Stands:
    """In place of a function."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, *of: Any) -> Any:
        return self.factor

    def method(self, *of: Any) -> Any:
        return self.factor


@pytest.mark.parametrize(
    "made",
    [
        Stands,
        lambda factor: Stands(factor).method,
        lambda factor: functools.partial(max, factor),
        lambda factor: functools.partialmethod(max, factor),
    ],
)
@pytest.mark.parametrize("of_a_class", [False, True])
def test_what_is_no_function_is_in_the_name_where_it_replaces_one(
    monkeypatch: pytest.MonkeyPatch, of_a_class: bool, made: Callable[[float], Any]
) -> None:
    model = tiny()
    names = {ModelState(model).structure}
    place = type(model.model.layers[0].mlp) if of_a_class else modeling_qwen3
    for factor in (2.0, 3.0):
        name = "forward" if of_a_class else "apply_rotary_pos_emb"
        monkeypatch.setattr(place, name, made(factor))
        names.add(ModelState(model).structure)
    assert len(names) == 3


def test_sets_in_code_have_one_order() -> None:
    """Of code that no release has: each process would give the model another name."""
    script = (
        "from kvpool_transformers.code_state import code\n"
        "print(code((lambda x: x in {'silu', 'gelu', 'relu', 'tanh'}).__code__))"
    )

    def printed(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        arguments = [sys.executable, "-c", script]
        return subprocess.run(
            arguments, env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert printed("1") == printed("2") == printed("3")


WAYS: dict[str, Any] = {
    "an operation": lambda model: weight(model).add_(0.01),
    "through data": lambda model: weight(model).data.mul_(1.5),
    "+= on data": add_in_place,
    "another tensor as data": lambda m: setattr(weight(m), "data", weight(m).data * 1.5),
    "numpy": lambda model: weight(model).detach().numpy().__setitem__((3, 5), 0.7),
    "dlpack": lambda model: torch.from_dlpack(weight(model).detach()).__setitem__((3, 5), 0.7),
    "one bit": lambda model: model.model.norm.weight.data.view(torch.int32)[-1].bitwise_xor_(1),
    "two signs": lambda model: weight(model).data[0, :2].neg_(),
    "two rows": swap_rows,
    "an optimizer": train_a_step,
    "load_state_dict": lambda model: model.load_state_dict(tiny(1).state_dict()),
    "assign": lambda model: model.load_state_dict(tiny(1).state_dict(), assign=True),
    "another parameter": lambda model: setattr(
        model.model.layers[0].self_attn, "k_proj", tiny(1).model.layers[0].self_attn.k_proj
    ),
    "layers exchanged": lambda model: setattr(
        model.model, "layers", torch.nn.ModuleList(reversed(model.model.layers)).eval()
    ),
    "a buffer": lambda model: model.model.rotary_emb.inv_freq.data.mul_(2),
    "another type": lambda model: model.to(torch.bfloat16),
    "there and back": lambda model: model.half().float(),
    "a number": lambda model: setattr(
        model.model.layers[0].input_layernorm, "variance_epsilon", 1e-2
    ),
    "a module without weights": lambda model: setattr(
        model.model.layers[0].mlp, "act_fn", torch.nn.GELU().eval()
    ),
    "a wrapper": wrap,
    "a number of numpy": hold_numpy,
    "a patch": patch_forward,
    "tensors swapped": lambda model: torch.utils.swap_tensors(
        weight(model), model.model.layers[1].self_attn.k_proj.weight
    ),
    "another storage": lambda m: weight(m).set_((weight(m) * 1.5).detach()),  # type: ignore[call-overload]
    "an attribute of a parameter": attach_scales,
    "attention": lambda model: model.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_changes_gets_another_name(
    pool: kvpool.sync.Pool, way: str, inference: bool
) -> None:
    """However it was changed, and also where torch counts no changes."""
    if inference and way == "an optimizer":
        pytest.skip("torch refuses it")
    with torch.inference_mode(inference):
        model, tokens = tiny(), prompt(3, 100)
    with pooled(pool, model, salt=way) as cache:
        cache.prefill(tokens)
        assert cache.settle()
        cache.prefill(tokens)
        assert cache.last.loaded == 96
        before = cache.namespace
        with torch.inference_mode(inference), torch.no_grad():
            WAYS[way](model)
        past: Any = cache.prefill(tokens)
        assert cache.last.loaded == 0
        assert cache.namespace != before
        assert cache.settle()
        again: Any = cache.prefill(tokens)
        assert cache.last.loaded == 96
        assert torch.equal(past.layers[0].keys[..., :96, :], again.layers[0].keys[..., :96, :])


def test_what_a_wrapper_and_a_patch_consist_of_is_in_the_name() -> None:
    """A factor in a closure or an attribute is no weight, and decides keys all the same."""
    for change, name in ((wrap, "k_proj"), (hold_numpy, "k_proj"), (patch_forward, "mlp")):
        model = tiny()
        change(model)
        layer = model.model.layers[0]
        with pooled(None, model) as cache:
            before = cache.namespace
        if name == "k_proj":
            layer.self_attn.k_proj.scale = type(layer.self_attn.k_proj.scale)(1.2)
        else:
            layer.mlp.forward.__closure__[1].cell_contents.mul_(2)
        with pooled(None, model) as cache:
            assert cache.namespace != before


def test_equal_models_have_equal_names(tmp_path: Path) -> None:
    """One that was made, one from files, one whose tensors lie elsewhere, one that has run."""
    model = tiny()
    model.save_pretrained(tmp_path)
    loaded = Qwen3ForCausalLM.from_pretrained(tmp_path).eval()
    turned = tiny()
    turned.lm_head.weight = torch.nn.Parameter(turned.lm_head.weight.data.t().contiguous().t())
    used = tiny()
    used.generate(torch.tensor([prompt(1, 40)]), max_new_tokens=3)
    used(torch.tensor([prompt(1, 40)]), output_hidden_states=True, output_attentions=True)
    names = set()
    for one in (model, loaded, turned, used):
        with pooled(None, one) as cache:
            names.add(cache.namespace)
    assert len(names) == 1


def test_no_cache_is_saved_under_the_name_of_other_weights(pool: kvpool.sync.Pool) -> None:
    """Weights change between a prompt and the save of its answer, or while it is generated."""
    model, tokens = tiny(), prompt(12, 70)
    with pooled(pool, model) as cache:
        old = cache.prefill(tokens)
        assert cache.settle()
        stored = cache.counters["blocks_stored"]
        output = model.generate(torch.tensor([tokens]), past_key_values=old, max_new_tokens=30)
        weight(model).data.mul_(1.5)
        cache.save(output[0], copy.deepcopy(old))
        assert cache.settle()
        cache.prefill(prompt(13, 20))  # the new name is known now
        cache.save(output[0], copy.deepcopy(old))
        assert cache.settle()

        def update(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            weight(model).data.mul_(1.001)
            return scores

        cache.generate(prompt(14, 20), max_new_tokens=30, logits_processor=[update])
        wrap(model)
        cache.save(output[0], old)
        assert cache.settle()
        assert cache.counters["blocks_stored"] == stored
        assert cache.counters["saves_of_changed_weights"] == 4
        cache.save(prompt(15, 70), model(torch.tensor([prompt(15, 70)])).past_key_values)
        assert cache.settle()
        assert cache.counters["blocks_stored"] == stored


def test_every_byte_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host and on a device, which multiplies; at the ends of pieces, rows and tensors."""
    model_state._threads.cache_clear()
    base = torch.arange(9 << 20, dtype=torch.int32).view(torch.uint8)[4:-3]  # lies unevenly
    places = [0, 1, 4095, 4096, (16 << 20) - 1, 16 << 20, len(base) - 4096, len(base) - 1]

    def of_device(data: torch.Tensor) -> bytes:
        return model_state.shrunk(data).numpy().tobytes()

    for digest in (model_state._digest, of_device):
        seen = {digest(base)}
        assert digest(base.clone()) in seen
        for place in places:
            base[place] ^= 128
            seen.add(digest(base))
            base[place] ^= 128
        assert len(seen) == 1 + len(places)

    def missing(*of: Any) -> None:
        raise NotImplementedError

    assert len(of_device(base)) < 3 << 20
    monkeypatch.setattr(torch, "_int_mm", missing)
    assert of_device(base) == base.numpy().tobytes()


def test_a_hook_ends_sharing_while_it_is_there(pool: kvpool.sync.Pool) -> None:
    model, tokens = tiny(), prompt(16, 70)
    with pooled(pool, model) as cache:
        cache.prefill(tokens)
        cache.settle()
        hook = model.model.layers[0].mlp.register_forward_hook(lambda *of: of[-1] * 2)
        cache.prefill(tokens)
        assert cache.last.loaded == 0
        assert "layers.0.mlp has a hook" in cache.last.why
        hook.remove()
        cache.prefill(tokens)
        assert cache.last.loaded == 64


def test_the_unreadable_is_refused(
    pool: kvpool.sync.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start with an error; later with a reason and one warning."""
    model, tokens = tiny(), prompt(17, 70)
    with pooled(pool, model) as cache:
        cache.prefill(tokens)
        cache.settle()
        model.model.norm.extra = [torch.eye(3).to_sparse()]
        for _ in range(2):
            cache.prefill(tokens)
            assert cache.last.loaded == 0
            assert "cannot be read" in cache.last.why
        assert caplog.text.count("cannot be read") == 1
        with pytest.raises(UsageError, match=r"model.norm.extra.0 .* cannot be read"):
            PooledCache(None, model)
        del model.model.norm.extra
        model.peft_config = {"default": object()}
        cache.prefill(tokens)
        assert "merge_and_unload" in cache.last.why


class Doubling(torch.overrides.TorchFunctionMode):
    """Whatever torch is asked for in this thread, it gets it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is functional.linear else result


@pytest.mark.parametrize(
    "moment", ["training", "a part in training", "autocast", "hook of all modules", "Doubling"]
)
def test_moments_at_which_nothing_is_shared(pool: kvpool.sync.Pool, moment: str) -> None:
    model, tokens = tiny(), prompt(4)
    with pooled(pool, model) as cache:
        if "training" in moment:
            (model if moment == "training" else model.model.layers[1]).train()
            cache.prefill(tokens)
            model.eval()
        elif moment == "Doubling":
            with Doubling():
                cache.prefill(tokens)
        elif "hook" in moment:
            hook = torch.nn.modules.module.register_module_forward_hook(lambda *of: None)
            cache.prefill(tokens)
            hook.remove()
        else:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                cache.prefill(tokens)
        assert (moment if "hook" in moment else moment.split()[-1]) in cache.last.why
        cache.settle()
        cache.prefill(tokens)
        assert cache.last.loaded == 0


def models_to_refuse() -> dict[str, Any]:
    window = {**SIZES, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_scaling": {"type": "longrope", **factors}, "original_max_position_embeddings": 99}
    bidirectional = tiny()
    bidirectional.config.is_causal = False
    adapters = tiny()
    adapters.peft_config = {"default": object()}
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    return {
        "sliding windows": Gemma3ForCausalLM(Gemma3TextConfig(**window)),
        "length of the whole text": Phi3ForCausalLM(Phi3Config(**SIZES, **rope)),
        "'dynamic'": tiny(**dynamic),
        "encoder": T5ForConditionalGeneration(
            T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=64)
        ),
        "later tokens": bidirectional,
        "merge_and_unload": adapters,
    }


def test_models_whose_prefixes_cannot_be_shared() -> None:
    for why, model in models_to_refuse().items():
        with pytest.raises(UsageError, match=why):
            PooledCache(None, model.eval())


@pytest.mark.parametrize(
    ("release", "ends"), [("4.57.1", True), ("5.18.0", True), ("6.0.0", True), ("5.20.1", False)]
)
def test_other_releases(monkeypatch: pytest.MonkeyPatch, release: str, ends: bool) -> None:
    monkeypatch.setattr(model_name.transformers, "__version__", release)
    if ends:
        with pytest.raises(UsageError, match=rf"transformers {release} .* expected 5\.19"):
            model_name.check_version()
    else:
        assert release in model_name.check_version()


def test_what_is_no_single_text() -> None:
    with pooled(None, tiny()) as cache:
        for wrong in ([], torch.zeros((2, 5), dtype=torch.long), [1.5, 2.5], torch.zeros(4)):
            with pytest.raises(UsageError, match="one text"):
                cache.prefill(wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="auto, always or never"):
            PooledCache(None, tiny(), load="sometimes")  # type: ignore[arg-type]


def test_a_cache_of_another_shape_is_not_saved(pool: kvpool.sync.Pool) -> None:
    """Of beams, or of another model: the caller's mistake saves nothing."""
    with pooled(pool, tiny()) as cache:
        past = cache.prefill(prompt(9))
        cache.settle()
        stored = cache.counters["blocks_stored"]
        past.batch_repeat_interleave(2)
        cache.save(prompt(10), past)
        with pooled(None, tiny(num_hidden_layers=3)) as other:
            cache.save(prompt(11), other.prefill(prompt(11)))
        cache.settle()
        assert cache.counters["blocks_stored"] == stored > 0


# --- when it is worth it -------------------------------------------------------------------------


def test_what_is_computed_faster_is_not_loaded(pool: kvpool.sync.Pool) -> None:
    with pooled(pool, tiny(), load="auto") as cache:
        cache.prefill(prompt(20))
        cache.settle()
        cache._compute_s, cache._load_s = 1e-6, 1.0
        cache.prefill(prompt(20))
        assert (cache.last.loaded, cache.last.why) == (0, "computing is faster")
        cache._compute_s, cache._load_s = 1.0, 1e-6
        cache.prefill(prompt(20))
        assert cache.last.loaded == 288


def test_waiting_saves_are_bounded(pool: kvpool.sync.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(PooledCache, "_store", lambda self, *of: go_on.wait(10))
    with pooled(pool, tiny()) as cache:
        for number in range(pooled_cache.SAVES_MAX + 3):
            cache.prefill(prompt(30 + number, 40))
        assert cache.counters["saves_dropped"] == 3
        go_on.set()


def test_saves_for_which_there_is_no_thread_are_not_kept(
    pool: kvpool.sync.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pooled(pool, tiny()) as cache:

        def no_thread(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            for number in range(3):
                cache.prefill(prompt(30 + number, 40))
        assert cache.counters["saves_failed"] == 3
        assert not cache._saver._work_queue.qsize()
        cache.prefill(prompt(50, 40))
        assert cache.settle(5)
        assert cache.counters["saves_failed"] == 3


def test_a_pool_that_is_not_there_costs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = ClientConfig(masters=["127.0.0.1:1"], timeout_s=0.2)
    with caplog.at_level(logging.WARNING), pooled(config, tiny()) as cache:
        time.sleep(1.5)
        for _ in range(3):
            cache.prefill(prompt(40))
        assert cache.last.why == "no pool"
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "no pool yet" in warnings[0]


FAILURES: dict[str, tuple[str, Exception]] = {
    "kvpool_transformers.blocks.BlockLayout.fill": ("loads_failed", torch.OutOfMemoryError()),
    "kvpool_transformers.blocks.BlockLayout.take": ("saves_failed", MemoryError("of the host")),
    "kvpool_transformers.blocks.BlockLayout.fits": ("saves_failed", OSError("no device")),
    "concurrent.futures.ThreadPoolExecutor.submit": ("saves_failed", RuntimeError("no thread")),
    "kvpool_transformers.pooled_cache.PooledCache._store": ("saves_failed", TimeoutError()),
    "kvpool.sync.Pool.match": ("", OSError("too many files")),
    "kvpool.sync.Pool.read": ("", msgspec.DecodeError("a reply")),
    "kvpool.sync.Pool.write": ("", asyncio.InvalidStateError()),
}


@pytest.mark.parametrize("inner", FAILURES)
def test_no_error_of_ours_ends_a_prompt(
    pool: kvpool.sync.Pool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    inner: str,
) -> None:
    """It is counted and logged, and the answer is that of a model without a pool."""
    counter, error = FAILURES[inner]
    tokens = prompt(40, 70)

    def fail(*of: Any, **named: Any) -> None:
        if inner.endswith("fill"):  # half of it is there
            of[1].update(torch.zeros(1, 2, 32, 16), torch.zeros(1, 2, 32, 16), 0)
        raise error

    with pooled(None, tiny()) as alone:
        expected = alone.generate(tokens, max_new_tokens=4, do_sample=False)
    with pooled(pool, tiny()) as cache:
        cache.prefill(tokens)
        assert cache.settle()
    with pooled(pool, tiny()) as cache, monkeypatch.context() as context:
        context.setattr(inner, fail)
        for text in (tokens, prompt(41, 70)):
            found = cache.generate(text, max_new_tokens=4, do_sample=False)
            if text is tokens:
                assert found == expected
        assert cache.settle()
        if counter:
            assert cache.counters[counter]
        assert caplog.text.count("WARNING") == 1
        assert type(error).__name__ in caplog.text


def test_options_that_make_another_prompt_of_the_tokens() -> None:
    with pooled(None, tiny()) as cache:
        for name, value in (
            ("position_ids", torch.arange(40)[None] + 7),
            ("attention_mask", torch.tensor([[0] * 10 + [1] * 30])),
            ("inputs_embeds", torch.zeros(1, 40, 64)),
        ):
            with pytest.raises(UsageError, match=f"{name} changes what the tokens mean"):
                cache.generate(prompt(1, 40), max_new_tokens=2, **{name: value})
        plain = cache.generate(prompt(1, 40), max_new_tokens=2, do_sample=False)
        assert plain == cache.generate(
            prompt(1, 40),
            max_new_tokens=2,
            do_sample=False,
            attention_mask=torch.ones(1, 40),
            position_ids=None,
            return_dict_in_generate=True,
        )


def test_the_example() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "examples.transformers_chat", "--tokens", "8"],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert "the same answers: True" in done.stdout
    assert "turn 2, process B" in done.stdout
    assert " 0 loaded" not in done.stdout.partition("with the pool")[2]
