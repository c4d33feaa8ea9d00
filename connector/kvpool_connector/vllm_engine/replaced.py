"""What the connector replaces of vLLM's: calls that go on to vLLM's own, and do one thing more.

| call                     | in                   | the thing more                                 |
|--------------------------|----------------------|------------------------------------------------|
| `__post_init__`          | every process        | settings are checked before weights are loaded |
| `get_mm_hashes`          | who hashes pictures  | names that clients have chosen are marked      |
| `init_device`            | workers              | device memory is taken before vLLM measures it |
| updates of weights       | workers              | they are counted                               |
| `reset_prefix_cache`     | an engine's own core | saves end before                               |
"""

from __future__ import annotations

import argparse
import functools
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from kvpool import ConfigError, KvpoolError, reserve_device_memory
from kvpool_connector import settings
from kvpool_connector.memory.block_memory import stage_of
from kvpool_connector.settings import given_settings
from kvpool_connector.vllm_engine.interface import (
    KVTransferConfig,
    ProcessorInputs,
    VllmConfig,
    WorkerWrapperBase,
    engine_resets,
    worker_updates,
)

#: A block's layers beside one another, heads outside of tokens: all that kernels for GPUs take.
_ONE_ROW: Final = "BLHNC"
_MARK: Final = "client:"
#: What vLLM's hashers of contents return.
_DIGEST: Final = re.compile("[0-9a-f]{40,128}")
#: Seconds that a reset waits. A save that hangs ends before.
_WAIT_S: Final = 15.0

_weight_changes: Counter[str] = Counter()


def _replace(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """From now on `owner.name` is `call`, which gets vLLM's own before the arguments."""
    own = getattr(owner, name)

    @functools.wraps(own)
    def replaced(*arguments: Any, **named: Any) -> Any:
        return call(own, *arguments, **named)

    setattr(owner, name, replaced)


@functools.cache  # as all of these: called again, they do nothing
def replace_at_start() -> None:
    """What each of vLLM's processes needs."""
    # The parser of the command line makes the first. A program may have made its own before vLLM
    # has loaded the plug-in: then the second is checked.
    for config in (KVTransferConfig, VllmConfig):
        _replace(config, "__post_init__", _check)
    _replace(ProcessorInputs, "get_mm_hashes", _mark_client_names)
    _replace(WorkerWrapperBase, "init_device", _reserve)


# --- settings ---------------------------------------------------------------------------------


class RefusedSettings(KvpoolError, argparse.ArgumentTypeError):
    """A setting is wrong; the text names it.

    Of this type, because `vllm serve` prints the text of such an error as its last line. A
    ValueError would get lost in the middle of the report that pydantic makes of it.
    """


def _check(post_init: Any, config: Any) -> None:
    """vLLM makes a connector after the weights are loaded, and no method that it calls on one
    earlier is always called."""
    post_init(config)
    transfer = getattr(config, "kv_transfer_config", config)
    if transfer is not config and transfer is not None:  # MultiConnector makes others of it
        transfer.kvpool_alone = transfer.kv_connector == settings.CONNECTOR
    for given in given_settings(transfer) if transfer is not None else ():
        try:
            settings.parse(given).member()
        except ConfigError as error:
            raise RefusedSettings(str(error)) from None


def wanted_layout(vllm_config: Any) -> str | None:
    """The layout of a KV cache in which each block is one row; None: as vLLM likes.

    vLLM takes another where its attention backend cannot. Beside other connectors nothing is
    wanted: vLLM refuses to start when two want different layouts. On a CPU it has one only.
    """
    alone = getattr(vllm_config.kv_transfer_config, "kvpool_alone", False)
    return _ONE_ROW if alone and vllm_config.device_config.device_type != "cpu" else None


# --- pictures, audio and video ----------------------------------------------------------------


def _mark_client_names(hashes: Any, inputs: Any, *args: Any, **kwargs: Any) -> dict[str, list[str]]:
    """vLLM takes the `uuid` of a content part for the hash of its contents. In one engine a lie
    costs its own cache; in a pool it would give every engine the KV of another picture, and stay on
    disks. So what comes from a `uuid` is marked, and no digest looks like a mark."""
    found: dict[str, list[str]] = hashes(inputs, *args, **kwargs)
    for modality, names in (inputs.mm_uuid_items or {}).items():
        if modality in found:
            found[modality] = [
                digest if name is None else f"{_MARK}{digest}"
                for digest, name in zip(found[modality], names, strict=True)
            ]
    return found


def named_by_client(features: Sequence[Any]) -> bool:
    """Whether one of a request's media has a name that is no digest of its contents."""
    return any(
        _DIGEST.fullmatch(feature.mm_hash or feature.identifier) is None for feature in features
    )


# --- a worker's memory and weights ------------------------------------------------------------


def _reserve(init_device: Any, wrapper: Any) -> None:
    """vLLM makes a connector after it has measured how much memory is left for the KV cache, and
    asks none before how much it needs. (design: device-memory)"""
    init_device(wrapper)
    device, transfer = wrapper.worker.device, wrapper.vllm_config.kv_transfer_config
    if device is None or device.type == "cpu" or transfer is None:
        return
    for given in given_settings(transfer):
        # Of the connector, or of its client, which takes the blocks where they lie.
        if given.get("device_path") == "direct":
            reserve_device_memory(device)
        else:
            stage_of(device)


@functools.cache
def count_updates() -> None:
    """From now on updates of weights by vLLM's own calls are counted: vLLM tells a connector of
    none, and what is computed after one must not get the name of the old weights.
    (design: namespace)"""
    worker, calls = worker_updates()
    for name in calls:
        _replace(worker, name, _count)


def count_loads(models: Iterable[Any]) -> None:
    """From now on calls of these models' `load_weights` are counted: all that other code calls."""
    for model in models:
        if hasattr(model, "load_weights"):
            _replace(model, "load_weights", _count)


def weight_changes() -> int:
    """How many calls in this process may have changed weights."""
    return _weight_changes.total()


def _count(call: Any, *arguments: Any, **named: Any) -> Any:
    try:
        return call(*arguments, **named)
    finally:  # also when it fails: a part may have been written
        _weight_changes[call.__qualname__] += 1


# --- resets -----------------------------------------------------------------------------------


@functools.cache
def drain_before_resets() -> None:
    """From now on resets, pauses and sleep of an engine in this process wait for its saves.

    Blocks that are being saved are pinned, and the cache cannot be cleared while one is. The engine
    hears of the end of a save when it steps; a process of its own steps on until there are none,
    but one in the user's process (VLLM_ENABLE_V1_MULTIPROCESSING=0) only while requests run.
    """
    core, process, paused = engine_resets()

    def drained(reset: Any, engine: Any, *arguments: Any, **named: Any) -> Any:
        if not isinstance(engine, process):
            _drain(engine, paused)
        return reset(engine, *arguments, **named)

    _replace(core, "reset_prefix_cache", drained)


def _drain(engine: Any, paused: Any) -> None:
    scheduler, own = engine.scheduler, engine.step_fn
    if engine.batch_queue:  # tokens are on their way, which a step here would lose
        return
    kept: deque[Any] = deque()
    if isinstance(own, functools.partial) and own.func is _next_kept:  # of an earlier drain
        _, own, kept = own.args
    until, before = time.monotonic() + _WAIT_S, scheduler.pause_state
    try:
        while scheduler.connector.has_pending_push_work() and time.monotonic() < until:
            if scheduler.pause_state != paused:
                scheduler.set_pause_state(paused)  # steps compute nothing
            outputs, _ = own()
            if any(map(_has_news, (outputs or {}).values())):
                kept.append(outputs)
                engine.step_fn = functools.partial(_next_kept, engine, own, kept)
    finally:
        if scheduler.pause_state != before:
            scheduler.set_pause_state(before)


def _next_kept(engine: Any, own: Any, kept: deque[Any]) -> tuple[Any, bool]:
    """In place of an engine's `own` step, until it has returned what the steps of drains have."""
    outputs = kept.popleft()
    if not kept:
        engine.step_fn = own
    return outputs, False


def _has_news(one: Any) -> bool:
    """Counters of saves, or the end of a request, as of one whose load has failed."""
    counted = one.scheduler_stats is not None and one.scheduler_stats.kv_connector_stats
    return bool(one.outputs or one.finished_requests or counted)
