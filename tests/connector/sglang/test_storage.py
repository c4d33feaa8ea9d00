"""`kvpool_sglang` under SGLang's own interface, with host memory in each layout: no engine."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvpool
from kvpool import ConfigError, dev
from kvpool.testing import NotDeclared, Ran
from kvpool.testing.connector_checks import prompt

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang 0.5.23: make test WITH=sglang", allow_module_level=True)

from tests.connector.sglang import stand_ins  # noqa: F401, I001  before sglang

import msgspec
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)

from sglang.srt.server_args import ServerArgs

from kvpool_sglang import KVPoolStorage, engine_name, storage
from tests.connector.conformance import chain, computed, conformance

PAGE, LAYERS, HEADS, SIZE, PAGES = 16, 3, 2, 8, 64
LAYOUTS = ("layer_first", "page_first", "page_first_direct")


class HostPool:
    """Host memory as SGLang's `MHATokenToKVPoolHost` lays it out."""

    def __init__(self, layout: str = "layer_first", dtype: torch.dtype = torch.float16) -> None:
        self.layout, self.dtype, self.page_size = layout, dtype, PAGE
        tokens = PAGES * PAGE
        shape = {
            "layer_first": (2, LAYERS, tokens, HEADS, SIZE),
            "page_first": (2, tokens, LAYERS, HEADS, SIZE),
            "page_first_direct": (2, PAGES, LAYERS, PAGE, HEADS, SIZE),
        }[layout]
        self.kv_buffer = torch.zeros(shape, dtype=dtype)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        if self.layout == "layer_first":
            page = self.kv_buffer[:, :, index : index + PAGE]
        elif self.layout == "page_first":
            page = self.kv_buffer[:, index : index + PAGE]
        else:
            page = self.kv_buffer[:, index // PAGE : index // PAGE + 1]
        return page.flatten() if flat else page


def config(**changes: Any) -> HiCacheStorageConfig:
    extra = {"backend_name": "kvpool", "interface_v1": 1, "revision": "test"}
    extra |= changes.pop("extra", {})
    ranks = {f"{of}_rank": 0 for of in ("tp", "pp", "attn_cp")}
    sizes = {f"{of}_size": 1 for of in ("tp", "pp", "attn_cp")}
    off = ("is_mla_model", "enable_storage_metrics", "is_page_first_layout")
    fields = {"model_name": "a", **ranks, **sizes, **dict.fromkeys(off, False), **changes}
    return HiCacheStorageConfig(extra_config=extra, **fields)


def indices(first: int, pages: int) -> torch.Tensor:
    return torch.arange(first * PAGE, (first + pages) * PAGE)


def hashes(tokens: Sequence[int], salt: str = "") -> list[str]:
    """A chain as SGLang's: hexadecimal, seeded with the salt."""
    return [one.hex() for one in chain(tokens, PAGE, salt.encode())]


class Engine:
    """What HiCache's controller does for a prompt: asks, loads, computes the rest, stores it."""

    def __init__(self, master: str, variant: str = "") -> None:
        self.pool = HostPool(
            "page_first" if variant == "layout" else "layer_first",
            torch.bfloat16 if variant == "dtype" else torch.float16,
        )
        self.model = "b" if variant == "model" else "a"
        self.salt = "b" if variant == "salt" else ""
        self.storage: KVPoolStorage | None = None
        if master:
            extra = {"masters": [master], "load_timeout_s": 1.0, "pause_s": 1.0}
            extra |= {"start_wait_s": 3.0, "tenant": self.salt or "default"}
            self.storage = KVPoolStorage(config(model_name=self.model, extra=extra))
            self.storage.register_mem_pool_host(self.pool)

    @property
    def namespaces(self) -> list[kvpool.Namespace]:
        assert self.storage is not None
        return list(self.storage._names.values())

    def run(self, tokens: Sequence[int]) -> Ran:
        keys = hashes(tokens, self.salt)
        self.pool.kv_buffer.zero_()
        loaded = 0
        if self.storage is not None:
            found = self.storage.batch_exists(keys)
            got = self.storage.batch_get_v1(keys[:found], indices(0, found))
            loaded = got.index(False) if False in got else len(got)
        for number in range(loaded, len(keys)):
            page = self.pool.get_data_page(number * PAGE, flat=False)
            shaped_by = self.model, self.pool.dtype, self.pool.layout
            made = computed(bytes.fromhex(keys[number]), page.nbytes, *shaped_by)
            page.copy_(torch.frombuffer(made, dtype=page.dtype).view(page.shape))
        if self.storage is not None and loaded < len(keys):
            info = HiCacheStorageExtraInfo(prefix_keys=keys[:loaded])
            self.storage.batch_set_v1(keys[loaded:], indices(loaded, len(keys) - loaded), info)
        pages = [self.pool.get_data_page(number * PAGE) for number in range(len(keys))]
        digests = [hashlib.sha256(one.view(torch.uint8).numpy()).hexdigest() for one in pages]
        return Ran(digests, loaded)

    def cancel(self, tokens: Sequence[int]) -> None:
        raise NotDeclared("HiCache's threads end what they have begun")

    def settle(self) -> None:
        pass

    def close(self) -> None:
        if self.storage is not None:
            self.storage.close()


test_conformance = conformance(Engine)


@pytest.fixture
def make(dev_in_thread: dev.Dev) -> Iterator[Callable[..., KVPoolStorage]]:
    made: list[KVPoolStorage] = []

    def make(**changes: Any) -> KVPoolStorage:
        extra = {"masters": [dev_in_thread.address], "start_wait_s": 3.0}
        one = KVPoolStorage(config(**{"extra": extra, **changes}))
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_are_moved_in_place(make: Callable[..., KVPoolStorage], layout: str) -> None:
    """To other places of another host pool, and nothing beside them is touched."""
    one, other = HostPool(layout), HostPool(layout)
    one.kv_buffer.copy_(torch.rand(one.kv_buffer.shape).to(one.dtype))
    writer, reader = make(), make()
    writer.register_mem_pool_host(one)
    reader.register_mem_pool_host(other)
    keys = hashes(prompt(1, 4 * PAGE))
    assert writer.batch_set_v1(keys, indices(2, 4)) == [True] * 4
    assert reader.batch_exists([*keys, hashes(prompt(2, PAGE))[0]]) == 4
    assert reader.batch_get_v1(keys[::-1], indices(10, 4)) == [True] * 4
    for number in range(4):
        moved = other.get_data_page((10 + number) * PAGE)
        assert torch.equal(moved, one.get_data_page((5 - number) * PAGE))
    for untouched in (9, 14):
        assert not other.get_data_page(untouched * PAGE).any()


def test_ranks_share_nothing_and_of_mla_everything(
    make: Callable[..., KVPoolStorage],
) -> None:
    def name(**changes: Any) -> kvpool.Namespace:
        made = make(**changes)
        made.register_mem_pool_host(HostPool())
        return made._names["kv"]

    ranks = [name(tp_size=2, tp_rank=rank) for rank in (0, 1)]
    assert len({name(), *ranks, name(pp_size=2), name(attn_cp_size=2)}) == 5
    assert name(is_mla_model=True, tp_size=2, tp_rank=1) == name(is_mla_model=True, tp_size=2)
    assert name(tp_size=2, tp_rank=1, dp_rank=3) == ranks[1]


def test_pages_beside_the_cache(
    make: Callable[..., KVPoolStorage], caplog: pytest.LogCaptureFixture
) -> None:
    """Of every page (an indexer's): needed as well. Of the end only (windows, states): refused."""
    cache, indexer = HostPool(), HostPool(dtype=torch.float32)
    made = make()
    made.register_mem_pool_host(cache)
    made.register_mem_host_pool_v2(indexer, PoolName.INDEXER)
    keys = hashes(prompt(3, 3 * PAGE))
    beside = PoolTransfer(PoolName.INDEXER, indices(0, 2), keys=keys[:2])
    made.batch_set_v1(keys, indices(0, 3))
    assert made.batch_exists_v2(keys, [beside]).kv_hit_pages == 0
    assert made.batch_set_v2([beside]) == {"indexer": [True, True]}
    result = made.batch_exists_v2(keys, [beside])
    assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (2, {"indexer": 2})
    assert made.batch_get_v2([beside]) == {"indexer": [True, True]}
    window = PoolTransfer(
        PoolName.SWA, indices(0, 1), keys=keys[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES
    )
    assert made.batch_exists_v2(keys, [window]).kv_hit_pages == 0
    with caplog.at_level(logging.WARNING):
        made.register_mem_host_pool_v2(HostPool(), PoolName.SWA)
    assert "swa pages" in caplog.text
    assert made.batch_exists(keys) == 0
    assert made.batch_set_v1(keys, indices(0, 3)) == [False] * 3


def test_what_is_wrong_is_named(
    make: Callable[..., KVPoolStorage], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="tp_lcm_size 4 splits pages"):
        make(tp_lcm_size=4, should_split_heads=True)
    with pytest.raises(ConfigError, match="did you mean 'masters'"):
        make(extra={"master": ["a:1"]})
    with monkeypatch.context() as patch:
        patch.setattr(storage, "_SUPPORTED", "0.6.1")
        with pytest.raises(ConfigError, match=r"SGLang .* is not supported.*0\.6\.1, or 0\.6\.x"):
            make()
    without = SimpleNamespace(page_size=PAGE, layout="page_head", get_data_page=None)
    with pytest.raises(ConfigError, match="page_head has no pages"):
        make().register_mem_pool_host(without)
    with pytest.raises(NotImplementedError, match="interface_v1"):
        make().batch_get([])


def test_keys_and_places_that_do_not_match(make: Callable[..., KVPoolStorage]) -> None:
    """Fewer places than keys, and keys of other lengths: no error, and nothing wrong."""
    made = make()
    made.register_mem_pool_host(HostPool())
    keys = hashes(prompt(4, 3 * PAGE))
    assert made.batch_set_v1(keys, indices(0, 2)) == [False] * 3
    odd = ["not hexadecimal", keys[0], keys[1][:16], ""]
    assert made.batch_set_v1(odd, indices(0, 4)) == [True] * 4
    assert made.batch_exists(odd) == 4
    assert made.batch_get_v1(odd, indices(8, 4)) == [True] * 4
    assert made.batch_exists([]) == 0
    assert made.batch_get_v1([], indices(0, 0)) == []


@pytest.mark.parametrize("error", [OSError("none"), IndexError("page"), RuntimeError("device")])
def test_no_error_of_ours_ends_a_thread_of_sglang(
    make: Callable[..., KVPoolStorage],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    """Wherever it comes from: it is a miss, and a line in the log."""
    keys = hashes(prompt(5, 2 * PAGE))

    def fail(*of: Any, **named: Any) -> None:
        raise error

    for inner in (
        *(f"kvpool.sync.Pool.{name}" for name in ("match", "read", "write")),
        "kvpool_sglang.storage.digest",
        "kvpool_sglang.host_pages.HostPages.pieces",
        "kvpool_sglang.host_pages.HostPages.first_tokens",
    ):
        made = make()
        made.register_mem_pool_host(HostPool())
        with monkeypatch.context() as context:
            context.setattr(inner, fail)
            transfers = [PoolTransfer(name=PoolName.KV, host_indices=indices(0, 2), keys=keys)]
            set_all, get_all = made.batch_set_v2(transfers), made.batch_get_v2(transfers)
            if not inner.endswith(("match", "read")):
                assert set_all[PoolName.KV] == [False] * 2, inner
            if not inner.endswith(("match", "write")):
                assert get_all[PoolName.KV] == [False] * 2, inner
            if inner.endswith(("match", "digest")):
                assert made.batch_exists(keys) == 0, inner
        assert str(error) in caplog.text
        caplog.clear()
    without = [PoolTransfer(name=PoolName.KV, host_indices=None, keys=keys)]
    assert make().batch_get_v2(without)[PoolName.KV] == [False] * 2


def arguments(model: Path, **changes: Any) -> ServerArgs:
    found = ServerArgs(model_path=str(model), device="cpu")
    for name, value in changes.items():
        setattr(found, name, value)
    return found


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(4096))
    return tmp_path


def test_the_name_has_every_argument_with_an_effect(weights: Path) -> None:
    def name(**changes: Any) -> dict[str, str]:
        return engine_name.fields(arguments(weights, **changes), "", "")

    plain = name()
    for changes in (
        {"json_model_override_args": '{"rope_theta": 7}'},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"quantization": "fp8"},
        {"attention_backend": "triton"},
        {"context_length": 9999},
        {"load_format": "dummy"},
        {"speculative_algorithm": "EAGLE"},
    ):
        assert name(**changes) != plain, changes
    dummies = [name(load_format="dummy", random_seed=seed) for seed in (1, 2)]
    assert dummies[0] != dummies[1]
    for other in (
        {"port": 1},
        {"random_seed": 9},
        {"mem_fraction_static": 0.5},
        {"log_level": "x"},
    ):
        assert name(**other) == plain, other
    (weights / "model.safetensors").write_bytes(b"x" + bytes(4095))
    assert name() != plain


def test_arguments_without_effect_exist() -> None:
    """One that SGLang has renamed would have an effect from then on, and keep engines apart."""
    assert {one.name for one in msgspec.structs.fields(ServerArgs)} >= engine_name._WITHOUT_EFFECT


def test_weights_that_have_no_name_are_refused(weights: Path, tmp_path: Path) -> None:
    nowhere = arguments(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r'nowhere have no name .* "revision"'):
        engine_name.fields(nowhere, "", "")
    assert engine_name.fields(nowhere, "", "mine")["weights"] == "none"
    with pytest.raises(ConfigError, match="--enable-lora"):
        engine_name.fields(arguments(weights, enable_lora=True), "", "mine")
    with pytest.raises(ConfigError, match="no name but revision"):
        engine_name.fields(None, "", "")


def test_weights_that_were_changed_end_everything(
    make: Callable[..., KVPoolStorage],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = make()
    made.register_mem_pool_host(HostPool())
    keys = hashes(prompt(5, 2 * PAGE))
    assert made.batch_set_v1(keys, indices(0, 2)) == [True, True]
    monkeypatch.setattr(engine_name, "_changed", "")

    def update_weights_from_ipc() -> None: ...

    def update_weights_from_disk() -> None: ...

    for call in (update_weights_from_ipc, update_weights_from_disk, update_weights_from_disk):
        engine_name._noticed(call)()
    assert engine_name._changed == "update_weights_from_ipc"  # the first, however many follow
    with caplog.at_level(logging.WARNING):
        assert made.batch_exists(keys) == 0
        assert made.batch_get_v1(keys, indices(0, 2)) == [False, False]
        assert made.batch_set_v1(keys, indices(0, 2)) == [False, False]
    assert caplog.text.count("update_weights_from_ipc") == 1
