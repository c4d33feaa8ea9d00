"""What decides a model's keys and values now: modules, code, and every byte of its tensors.

Nobody tells of a change. torch counts none that goes through `.data`, numpy or DLPack, and none of
tensors that were made in inference mode; so each look walks the modules and hashes all bytes.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import os
import re
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch
import xxhash
from torch import nn
from transformers import PreTrainedConfig

from kvpool import UsageError
from kvpool_transformers import code_state

#: Fields of a configuration that change no key and no value. Tensors tell their types themselves.
NAMES_ONLY: Final = {
    *("_name_or_path", "transformers_version", "architectures", "use_cache", "dtype"),
    *("eos_token_id", "output_attentions", "output_hidden_states", "return_dict"),
}
#: Attributes of modules and tensors that do not either: torch's own, which are looked at apart;
#: paths, and plans of loading, sharding, training and sampling. What is not here counts.
_IGNORED: Final = {
    *vars(nn.Module()),
    *re.findall(
        r"\w+",
        """
        name_or_path generation_config loss_type gradient_checkpointing all_tied_weights_keys
        warnings_issued hf_device_map hf_quantizer is_quantized quantization_method model_tags
        _is_hf_initialized _use_kernels _weight_conversions _compiled_call_impl _device_mesh
        _output_capturing_hooks_installed persistent _is_buffer
        _tp_size _tp_plan _ep_plan _pp_plan _fsdp_plan _no_split_modules _skip_keys_device_placement
        _keep_in_fp32_modules _keep_in_fp32_modules_strict _keys_to_ignore_on_save
        _keys_to_ignore_on_load_missing _keys_to_ignore_on_load_unexpected
        """,
    ),
}
#: Whose hooks compute nothing: they collect outputs, or move them between devices.
_KNOWN_HOOKS: Final = ("transformers.", "accelerate.")
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)
#: One object or two equal ones: that is the same.
_ALIKE: Final = (tuple, frozenset, type, torch.device, enum.Enum)
_DEPTH_MAX: Final = 16
#: Bytes that one thread hashes at a time; fewer than this in all are not worth a second one.
_PIECE_BYTES: Final = 16 << 20
#: On a device, rows of so many bytes are multiplied by a matrix of so many columns.
_ROW_BYTES: Final = 4096
_COLUMNS: Final = 16
#: What is left of a tensor then goes to the host.
_LEFT_BYTES: Final = 1 << 20


class ModelState:
    """One look at a model: what it is made of, and its tensors where they are.

    Takes some milliseconds, in the thread that uses the model; `digest` may be called in any.
    Raises UsageError, with the reason, where something that decides keys cannot be named.
    """

    def __init__(self, model: nn.Module) -> None:
        #: What makes keys at this moment that nobody else may have; empty if nothing does.
        self.moment = ""
        self._words = [code_state.precision()]
        self._tensors: list[torch.Tensor] = []
        self._seen: dict[int, str] = {}
        self._kept: list[object] = []  # so that no id is used twice in one look
        self._kinds: set[type] = set()
        self._used: set[str] = set()  # entries of tables of attentions, say
        self._functions: deque[tuple[str, types.FunctionType, bool]] = deque()
        if mode := code_state.modes():
            self.moment = f"{mode} is there that may change its keys"
        self._module("", model)
        while self._functions:  # one by one, because they name one another
            path, function, follow = self._functions.popleft()
            for name, part in code_state.parts_of(function, follow, self._used):
                self._value(f"{path}.{name}", part, 1)
        #: Equal for models that differ in nothing but the bytes of their tensors.
        self.structure = hashlib.sha256("\n".join(self._words).encode()).hexdigest()[:12]

    def digest(self) -> str:
        """A hash of all bytes of all tensors."""
        hashed: dict[tuple[object, ...], bytes] = {}
        total = hashlib.sha256()
        for tensor in self._tensors:  # tied weights are read once
            place = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
            if place not in hashed:
                hashed[place] = _digest(tensor)
            total.update(hashed[place])
        return total.hexdigest()[:12]

    # --- inside --------------------------------------------------------------------------

    def _module(self, path: str, module: nn.Module, depth: int = 0) -> None:
        if self._again(path, module):
            return
        kind = type(module)
        self._words.append(f"{path} {_path_of(kind)} {_path_of(kind.forward)}")
        where = path or "the model"
        self._kind(kind)
        if module.training:
            self.moment = self.moment or f"{where} is in training mode: call model.eval()"
        for hook in [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]:
            if not _path_of(hook).startswith(_KNOWN_HOOKS):
                why = f"{where} has a hook ({_path_of(hook)}) that may change its keys"
                self.moment = self.moment or why
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                self._tensor(f"{path}.{name}", tensor, depth + 1)
        self._values(path, vars(module), depth)
        for name, child in module._modules.items():
            if isinstance(child, nn.Module):
                self._module(f"{path}.{name}" if path else name, child, depth)
            else:
                self._value(f"{path}.{name}", child, depth + 1)  # torch's packed parameters

    def _kind(self, kind: type) -> None:
        """The code of a class of modules."""
        if kind not in self._kinds:
            self._kinds.add(kind)
            for path, member in code_state.functions_of(kind):
                self._value(path, member, 1, follow=True)

    def _values(self, path: str, values: Mapping[str, object], depth: int) -> None:
        for name, value in values.items():
            if name not in _IGNORED:
                self._value(f"{path}.{name}", value, depth + 1)

    def _value(self, path: str, value: object, depth: int, follow: bool = False) -> None:
        """An attribute: as text if it is plain, else what it consists of."""
        if isinstance(value, _PLAIN):
            self._words.append(f"{path}={value!r}")
        elif isinstance(value, torch.Tensor):
            self._tensor(path, value, depth)
        elif isinstance(value, nn.Module):
            self._module(path, value, depth)
        elif isinstance(value, types.FunctionType):
            if not self._again(path, value):
                self._words.append(f"{path}: {_path_of(value)}")
                self._functions.append((path, value, follow))
        elif depth > _DEPTH_MAX:
            raise UsageError(f"{path} is nested too deep to be named")
        elif isinstance(value, _ALIKE) or not self._again(path, value):
            self._words.append(f"{path}: {_path_of(type(value))}")
            if isinstance(value, PreTrainedConfig):
                self._used.update(map(str, _implementations(value).values()))
            for name, part in _parts(path, value):
                self._value(f"{path}.{name}", part, depth + 1)

    def _tensor(self, path: str, tensor: torch.Tensor, depth: int) -> None:
        shape = "x".join(map(str, tensor.shape))
        self._words.append(f"{path}: {_path_of(type(tensor))} {tensor.dtype} {shape}")
        if vars(tensor) and not self._again(f"{path}:", vars(tensor)):
            self._values(path, vars(tensor), depth)  # of quantized weights, how to read them
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:
            inner, context = flatten()
            self._value(f"{path}:", context, depth + 1)
            for name in inner:
                self._value(f"{path}.{name}", getattr(tensor, name), depth + 1)
            return
        readable = tensor.layout == torch.strided and not tensor.is_quantized
        if not readable or tensor.is_meta or not tensor.untyped_storage().nbytes():
            raise UsageError(f"{path} is a tensor whose bytes cannot be read: it has no name")
        self._tensors.append(tensor.detach().as_subclass(torch.Tensor))

    def _again(self, path: str, value: object) -> bool:
        """Whether this object was seen before: then where is all there is to say."""
        first = self._seen.setdefault(id(value), path)
        if first == path:
            self._kept.append(value)
            return False
        self._words.append(f"{path} is {first}")
        return True


def _parts(path: str, value: Any) -> Iterator[tuple[object, object]]:
    """What an object consists of, with names that are equal in two processes."""
    if isinstance(value, PreTrainedConfig):
        settings = {k: v for k, v in value.to_dict().items() if k not in NAMES_ONLY}
        yield "settings", json.dumps(settings, sort_keys=True, default=str)
        yield from _implementations(value).items()
    elif isinstance(value, torch.device):
        yield "type", value.type
    elif isinstance(value, enum.Enum):
        yield "name", value.name
    elif isinstance(value, np.ndarray | bytearray | memoryview):
        shape = getattr(value, "shape", len(value))
        kind = getattr(value, "dtype", getattr(value, "format", ""))
        yield "bytes", f"{kind} {shape} {hashlib.sha256(bytes(value)).hexdigest()}"
    elif isinstance(value, Mapping):
        for number, (key, one) in enumerate(value.items()):
            yield (key, one) if isinstance(key, str) else (number, [key, one])
    elif isinstance(value, list | tuple | deque):
        yield from enumerate(value)
    elif isinstance(value, set | frozenset):
        yield from enumerate(sorted(value, key=repr))
    elif isinstance(value, type):
        yield "path", _path_of(value)
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from (("of", value.__self__), ("function", value.__func__))
    elif isinstance(value, functools._lru_cache_wrapper):
        yield "of", value.__wrapped__
    elif isinstance(value, torch.ScriptObject):
        raise UsageError(f"{path} has tensors that cannot be read: it has no name")
    elif isinstance(value, types.BuiltinFunctionType):
        yield "path", _path_of(value)
        if not isinstance(value.__self__, types.ModuleType | None):
            yield "of", value.__self__
    elif not type(value).__module__.startswith("kvpool"):  # what hangs here may be ours
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        attributes |= getattr(value, "__dict__", {})
        yield from ((key, one) for key, one in attributes.items() if key not in _IGNORED)
        for name in ("__call__", "__get__"):
            if isinstance(called := getattr(type(value), name, None), types.FunctionType):
                yield name, called
        if not attributes and " at 0x" not in (text := repr(value)):
            yield "text", text  # numbers of numpy, say


def _implementations(config: PreTrainedConfig) -> dict[str, object]:
    """What a configuration chooses without listing it among its settings."""
    kinds = ("attention", "_attn_implementation"), ("experts", "_experts_implementation")
    return {kind: getattr(config, name, None) or "eager" for kind, name in kinds}


def _path_of(value: Any) -> str:
    """Where a class or a function is defined."""
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"{getattr(value, '__module__', '')}.{name}"


# --- bytes --------------------------------------------------------------------------------


def _digest(tensor: torch.Tensor) -> bytes:
    """A hash of a tensor's bytes, in the order of its indices."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if not tensor.is_contiguous():  # piece by piece, so that no second tensor of its size is made
        size = tensor.numel() * tensor.element_size()
        if tensor.ndim and size > _PIECE_BYTES and tensor.shape[0] > 1:
            return b"".join(map(_digest, tensor.split(-(-tensor.shape[0] * _PIECE_BYTES // size))))
        tensor = tensor.contiguous()
    flat = tensor.reshape(-1).view(torch.uint8)
    if tensor.device.type != "cpu":
        flat = shrunk(flat)
    pieces = [piece.numpy() for piece in flat.split(_PIECE_BYTES)]
    hashes: Callable[..., Iterator[bytes]] = map if len(pieces) == 1 else _threads().map
    return b"".join(hashes(xxhash.xxh3_128_digest, pieces))


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), "kvpool-hash")


os.register_at_fork(after_in_child=_threads.cache_clear)  # a child has none of its threads


def shrunk(flat: torch.Tensor) -> torch.Tensor:
    """At most 1 MiB and a rest, on the host, which tell these bytes of a device from any others.

    Rows are multiplied by a fixed matrix of random bytes, by the device's unit for products of
    integers, which are exact: two rows that differ have equal products in all of its 16 columns
    with a probability of 2^-128 at most. The device reads its memory once, and writes 1/64 of it.
    """
    rests, level = [], 0
    while flat.numel() > _LEFT_BYTES:
        rows = flat.numel() // _ROW_BYTES
        whole, rest = flat[: rows * _ROW_BYTES], flat[rows * _ROW_BYTES :]
        rests.append(rest.cpu())
        if whole.data_ptr() % 16:
            whole = whole.clone()
        matrix = whole.view(torch.int8).view(rows, _ROW_BYTES)
        try:
            products = torch._int_mm(matrix, _factors(level, flat.device))
        except (RuntimeError, NotImplementedError):  # this device has no such unit
            return torch.cat([whole.cpu(), *reversed(rests)])
        flat, level = products.view(-1).view(torch.uint8), level + 1
    return torch.cat([flat.cpu(), *reversed(rests)])


@functools.cache
def _factors(level: int, device: torch.device) -> torch.Tensor:
    stream = hashlib.shake_256(f"kvpool {level}".encode()).digest(_ROW_BYTES * _COLUMNS)
    values = np.frombuffer(stream, np.int8).reshape(_ROW_BYTES, _COLUMNS)
    return torch.from_numpy(values.copy()).to(device)
