"""`kvpool_lmcache` with the real LMCache, on a CPU: `make test WITH=lmcache`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvpool
from kvpool import ConfigError, dev
from kvpool.testing import Ran
from kvpool.testing.connector_checks import ProcessPool, prompt

pytest.importorskip("lmcache", reason="needs LMCache 0.5.6: make test WITH=lmcache")

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from kvpool_engines.adapter_settings import AdapterSettings, check_release
from kvpool_lmcache import KVPoolL2Adapter, adapter, object_names
from tests.conftest import soon
from tests.connector.conformance import chain, computed, conformance

#: Tokens of an object of these tests.
CHUNK = 64
SHAPE = torch.Size([2, 2, CHUNK, 32])
LAYOUT = MemoryLayoutDesc([SHAPE], [torch.float16])


def fresh(shape: torch.Size = SHAPE, dtype: torch.dtype = torch.float16) -> TensorMemoryObj:
    """Memory for an object, as LMCache's allocator hands it out."""
    size = shape.numel() * dtype.itemsize
    metadata = MemoryObjMetadata(
        shape=shape,
        dtype=dtype,
        address=0,
        phy_size=size,
        ref_count=1,
        fmt=MemoryFormat.KV_2LTD,
        shapes=[shape],
        dtypes=[dtype],
    )
    return TensorMemoryObj(torch.zeros(size, dtype=torch.uint8), metadata, None)


def signalled(fd: int, timeout_s: float = 15.0) -> bool:
    ready, _, _ = select.select([fd], [], [], timeout_s)
    return bool(ready) and os.eventfd_read(fd) > 0


class Engine:
    """What LMCache's controllers do for a prompt: look up, load, compute the rest, store it."""

    def __init__(self, master: str, variant: str = "") -> None:
        self.model = "b" if variant == "model" else "a"
        self.dtype = torch.bfloat16 if variant == "dtype" else torch.float16
        self.shape = torch.Size([2, 2, 32, CHUNK]) if variant == "layout" else SHAPE
        self.salt = "b" if variant == "salt" else ""
        self.adapter: KVPoolL2Adapter | None = None
        if master:
            config = PluginL2AdapterConfig.from_dict(
                {
                    "module_path": "kvpool_lmcache",
                    "class_name": "KVPoolL2Adapter",
                    "adapter_params": {
                        "masters": [master],
                        "load_timeout_s": 1.0,
                        "pause_s": 1.0,
                        "start_wait_s": 3.0,
                    },
                }
            )
            self.adapter = create_l2_adapter_from_registry(config)
        #: Stores that run, and their memory: LMCache keeps it until they have ended.
        self.tasks: dict[int, object] = {}

    @property
    def namespaces(self) -> list[kvpool.Namespace]:
        assert self.adapter is not None
        names = self.adapter._names
        return list(names.of_objects(self.keys(prompt(0, CHUNK)), [fresh(self.shape, self.dtype)]))

    def keys(self, tokens: Sequence[int]) -> list[ObjectKey]:
        return [ObjectKey(one, self.model, 0, 0, self.salt) for one in chain(tokens, CHUNK)]

    def compute(self, key: ObjectKey, into: TensorMemoryObj) -> None:
        """Bytes that depend on all that shapes them."""
        shaped_by = self.model, self.dtype, self.shape, self.salt
        made = computed(key.chunk_hash, into.raw_data.numel(), *shaped_by)
        into.raw_data.copy_(torch.frombuffer(made, dtype=torch.uint8))

    def look_up(self, keys: Sequence[ObjectKey], layout: MemoryLayoutDesc = LAYOUT) -> list[bool]:
        """Which of these are there."""
        assert self.adapter is not None
        task = self.adapter.submit_lookup_and_lock_task(list(keys), {0: layout})
        assert signalled(self.adapter.get_lookup_and_lock_event_fd())
        found = self.adapter.query_lookup_and_lock_result(task)
        assert self.adapter.query_lookup_and_lock_result(task) is None  # once
        return [found.test(at) for at in range(len(keys))]

    def load(self, keys: Sequence[ObjectKey], objects: Sequence[TensorMemoryObj]) -> list[bool]:
        """Which of these were loaded."""
        assert self.adapter is not None
        task = self.adapter.submit_load_task(list(keys), list(objects))
        assert signalled(self.adapter.get_load_event_fd())
        bits = self.adapter.query_load_result(task)
        return [bits.test(at) for at in range(len(keys))]

    def store(self, keys: Sequence[ObjectKey], objects: Sequence[TensorMemoryObj] = ()) -> int:
        """Store objects, of any content if there are none; the bytes that moved."""
        assert self.adapter is not None
        made = list(objects) or [fresh() for _ in keys]
        task = self.adapter.submit_store_task(list(keys), made)
        assert signalled(self.adapter.get_store_event_fd())
        result = self.adapter.pop_completed_store_tasks()[task]
        assert result.is_successful()
        return int(result.bytes_transferred())

    def run(self, tokens: Sequence[int]) -> Ran:
        loaded: dict[ObjectKey, TensorMemoryObj] = {}
        if self.adapter is not None:
            there, objects = self.found(tokens)
            if there:
                came = zip(self.load(there, objects), there, objects, strict=True)
                loaded = {key: one for is_there, key, one in came if is_there}
                self.adapter.submit_unlock(there)
        whole, missing = [], []
        for key in self.keys(tokens):
            if key not in loaded:
                made = fresh(self.shape, self.dtype)
                self.compute(key, made)
                missing.append((key, made))
                whole.append(made)
            else:
                whole.append(loaded[key])
        if self.adapter is not None and missing:
            keys, made_objects = zip(*missing, strict=True)
            task = self.adapter.submit_store_task(list(keys), list(made_objects))
            self.tasks[task] = made_objects
        digests = [hashlib.sha256(one.byte_array).hexdigest() for one in whole]
        return Ran(digests, len(loaded))

    def found(self, tokens: Sequence[int]) -> tuple[list[ObjectKey], list[TensorMemoryObj]]:
        keys = self.keys(tokens)
        found = self.look_up(keys, MemoryLayoutDesc([self.shape], [self.dtype]))
        there = [key for key, is_there in zip(keys, found, strict=True) if is_there]
        return there, [fresh(self.shape, self.dtype) for _ in there]

    def cancel(self, tokens: Sequence[int]) -> None:
        """LMCache drops a request: its tasks end all the same, and nobody asks for the results."""
        there, objects = self.found(tokens)
        if there:
            assert self.adapter is not None
            self.adapter.submit_load_task(there, objects)
            assert signalled(self.adapter.get_load_event_fd())
        del objects  # until here: the load writes to them

    def settle(self) -> None:
        assert self.adapter is not None
        until = time.monotonic() + 15
        while self.tasks and time.monotonic() < until:
            for task in self.adapter.pop_completed_store_tasks():
                del self.tasks[task]
            time.sleep(0.02)
        assert not self.tasks

    def close(self) -> None:
        if self.adapter is not None:
            self.adapter.close()


test_conformance = conformance(Engine)


@pytest.fixture
def engine(dev_in_thread: dev.Dev) -> Iterator[Engine]:
    made = Engine(dev_in_thread.address)
    yield made
    made.close()


def test_keys_of_two_ranks_groups_and_salts_in_one_task(engine: Engine) -> None:
    """One task has all groups of a prompt; equal hashes are other objects in each."""
    of = [(0, 0, ""), (1, 0, ""), (0, 1, ""), (0, 0, "salt")]
    keys = [ObjectKey(bytes(32), "m", *one) for one in of]
    objects = [fresh() for _ in keys]
    for number, one in enumerate(objects):
        one.raw_data.fill_(number + 1)
    assert engine.store(keys, objects) == sum(one.raw_data.numel() for one in objects)
    loaded = [fresh() for _ in keys]
    assert engine.load(keys[::-1], loaded) == [True] * 4
    assert [int(one.raw_data[0]) for one in loaded] == [4, 3, 2, 1]


def test_all_ranks_and_groups_of_a_prompt_are_one_call() -> None:
    """LMCache's own benchmark has a rank for each key: a message for each took 64 times as long."""
    names = object_names.ObjectNames("", "")
    keys = [ObjectKey(bytes(32), "m", rank, group) for rank in range(8) for group in range(2)]
    (positions,) = names.of_objects(keys, [fresh() for _ in keys]).values()
    assert positions == list(range(16))
    assert len({object_names.digest(key) for key in keys}) == 16
    (positions,) = names.of_lookup(keys, {0: LAYOUT, 1: LAYOUT}).values()
    assert positions == list(range(16))


def test_ranks_groups_and_hashes_do_not_run_together() -> None:
    """Rank 1 of group 0x11 is not rank 0x11 of group 1, nor is a digit part of the hash."""
    keys = [
        ObjectKey(b"1" * 16, "m", 1, 0x11),
        ObjectKey(b"1" * 16, "m", 0x11, 1),
        ObjectKey(b"1" * 15, "m", 0x11, 0x11),
        ObjectKey(b"1" * 17, "m", 1, 1),
    ]
    assert len({object_names.digest(key) for key in keys}) == 4


class Listener:
    """Of LMCache's eviction; it asks the adapter back, as a controller may."""

    def __init__(self, adapter: KVPoolL2Adapter) -> None:
        self.adapter = adapter
        self.seen: list[tuple[str, int]] = []

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.adapter.report_status()
        self.seen.append(("stored", len(keys)))

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.adapter.report_status()
        self.seen.append(("accessed", len(keys)))

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        self.adapter.report_status()
        self.seen.append(("deleted", len(keys)))


def test_lmcache_counts_each_object_once_until_it_is_deleted(engine: Engine) -> None:
    """Bytes by salt are what its quotas go by; what is deleted must not stay in them."""
    assert engine.adapter is not None
    listener = Listener(engine.adapter)
    engine.adapter.register_listener(listener)
    keys = engine.keys(prompt(3, 2 * CHUNK))
    objects = [fresh() for _ in keys]
    size = objects[0].get_size()
    moved = []
    for _ in range(2):
        moved.append(engine.store([*keys, keys[0]], [*objects, objects[0]]))
        assert engine.adapter.get_usage().total_bytes_used == 2 * size
    assert moved == [2 * size, 0]
    engine.load(keys, objects)
    engine.adapter.delete(keys[:1])
    soon(lambda: engine.adapter.get_usage().total_bytes_used == size)
    assert listener.seen == [("stored", 2), ("accessed", 2), ("deleted", 1)]
    told = engine.adapter.report_status()
    assert (told["stores"], told["objects_stored"], told["objects_loaded"]) == (2, 6, 2)


def test_a_pool_that_is_gone_ends_each_task() -> None:
    """Also one for several namespaces; the failure is counted once, and then there is a pause."""
    with ProcessPool("64MiB") as pool:
        engine = Engine(pool.address)
        try:
            assert engine.adapter is not None
            engine.run(prompt(1, 2 * CHUNK))
            engine.settle()
            pool.kill()
            keys = [ObjectKey(bytes(32), "m", 0, 0, salt) for salt in ("", "a", "b")]
            assert engine.look_up(keys) == [False] * 3
            told = engine.adapter.report_status()
            assert told["lookups_failed"] == 1
            assert told["paused"]
            assert told["is_healthy"] is False
        finally:
            engine.close()


@pytest.mark.parametrize("error", [OSError("none"), msgspec.DecodeError("bad"), TimeoutError()])
def test_no_error_of_ours_stays_in_a_task(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It is a miss, is counted, and takes nothing from the other namespaces of the task."""
    made = engine.adapter
    assert made is not None
    keys = [ObjectKey(bytes(32), "m", 0, 0, salt) for salt in ("", "a", "b")]
    engine.store(keys)
    contains, calls = kvpool.Pool.contains, 0

    async def fail(*of: Any, **named: Any) -> list[bool]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise error
        await asyncio.sleep(0.05)
        return await contains(*of, **named)

    monkeypatch.setattr(kvpool.Pool, "contains", fail)
    assert engine.look_up(keys) == [True, False, True]
    told = made.report_status()
    assert told["lookups_failed"] == 1
    assert told["paused"]


def test_a_listener_that_fails_ends_no_task(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine.adapter
    assert made is not None

    def fail(*of: object) -> None:
        raise RuntimeError("a listener's mistake")

    for listeners in ("_notify_keys_stored", "_notify_keys_deleted"):
        monkeypatch.setattr(made, listeners, fail)
    keys = [ObjectKey(bytes(32), "m", 0, 0, salt) for salt in ("", "a")]
    engine.store(keys)
    made.delete(keys)
    soon(lambda: caplog.text.count("a listener of LMCache's failed") >= 3)


def test_unasked_results_are_bounded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a salt that is no text has a name."""
    made = engine.adapter
    assert made is not None
    monkeypatch.setattr(adapter, "_RESULTS_MAX", 3)
    keys = [ObjectKey(bytes(32), "m", 0, 0, "\ud800")]
    tasks = [made.submit_lookup_and_lock_task(keys, {0: LAYOUT}) for _ in range(5)]
    soon(lambda: made.query_lookup_and_lock_result(tasks[-1]) is not None)
    results = [made.query_lookup_and_lock_result(task) is not None for task in tasks[:4]]
    assert results == [False, False, True, True]


def test_hashes_of_other_lengths(engine: Engine) -> None:
    """Of 8 bytes, and of 32 and 16 in one task: LMCache's hash is a setting of the engine."""
    keys = [ObjectKey(bytes([n]) * size, "m", 0) for n, size in enumerate((8, 16, 32, 40), 1)]
    engine.store(keys)
    assert engine.look_up(keys) == [True] * 4


def test_a_deleted_object_is_gone(engine: Engine) -> None:
    assert engine.adapter is not None
    engine.run(prompt(1, 2 * CHUNK))
    engine.settle()
    engine.adapter.delete(engine.keys(prompt(1, 2 * CHUNK))[:1])
    soon(lambda: engine.run(prompt(1, 2 * CHUNK)).loaded != 2)


def test_another_revision_and_another_tenant_share_nothing() -> None:
    key = ObjectKey(bytes(32), "m", 0)
    names = {
        space
        for tenant, revision in (("a", ""), ("b", ""), ("a", "2"))
        for space in object_names.ObjectNames(tenant, revision).of_objects([key], [fresh()])
    }
    assert len(names) == 3


def test_a_lookup_without_a_layout_has_that_of_the_last_store() -> None:
    names = object_names.ObjectNames("", "")
    key = ObjectKey(bytes(32), "m", 0)
    assert not names.of_lookup([key], {})
    stored = names.of_objects([key], [fresh()])
    assert names.of_lookup([key], {}) == stored
    assert names.of_lookup([key], {0: MemoryLayoutDesc([], [])}) == stored
    assert names.of_lookup([key], {0: LAYOUT}) == stored
    assert names.of_lookup([key], {0: MemoryLayoutDesc([SHAPE], [torch.bfloat16])}) != stored


def test_what_is_wrong_is_named() -> None:
    for params, says in (
        ({"master": ["a:1"]}, "did you mean 'masters'"),
        ({"masters": "a:1"}, "masters is 'a:1'"),
        ({"masters": []}, "masters is"),
        ({"load_timeout_s": -1}, "load_timeout_s is -1"),
        ({"pause_s": True}, "pause_s is True"),
    ):
        with pytest.raises(ConfigError, match=says):
            AdapterSettings.parse(params, "adapter_params")
    for release in ("0.4.9", "0.6.0", "1.0.0"):
        with pytest.raises(ConfigError, match=rf"LMCache {release} is not supported.*0\.5\.6"):
            check_release("LMCache", release, adapter._SUPPORTED, adapter.log)
    check_release("LMCache", "0.5.7", adapter._SUPPORTED, adapter.log)


def test_lmcaches_own_benchmark_verifies_the_bytes(dev_in_thread: dev.Dev) -> None:
    plugin = {
        "type": "plugin",
        "module_path": "kvpool_lmcache",
        "class_name": "KVPoolL2Adapter",
        "adapter_params": {"masters": [dev_in_thread.address]},
    }
    command = [str(Path(sys.executable).parent / "lmcache"), "bench", "l2"]
    options = ["--num-keys", "16", "--data-size-kb", "256", "--rounds", "2", "--no-skip-verify"]
    done = subprocess.run(
        [*command, "--l2-adapter", json.dumps(plugin), *options, "--lookup-max-hit-rate", "1.0"],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "LMCACHE_TRACK_USAGE": "false"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "All 16 keys data verified OK" in done.stdout
