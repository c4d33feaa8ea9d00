"""What functions compute: their code, and what they name in their modules.

Libraries that make models faster replace functions of modules (`apply_rotary_pos_emb`,
`torch.nn.functional.scaled_dot_product_attention`), methods of classes and entries in transformers'
tables of attentions, and give them the names of the old ones. A function of a release is named by
its line in a file, because the release is in the name of the blocks; any other by its code.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
import types
from collections.abc import Collection, Iterator
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.generic import GeneralInterface

#: Packages whose version is in the name of blocks.
_RELEASES: Final = ("torch", "transformers")
_FUNCTIONS: Final = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(functools._lru_cache_wrapper, functools.partial, functools.partialmethod),
)
#: What a patch may read from a module of its own.
_NUMBERS: Final = (bool, int, float, str, torch.Tensor)


def release_of(name: str | None) -> str:
    """The package of a module, if its version is in the name of blocks; else ""."""
    package = (name or "").partition(".")[0]
    return package if package in _RELEASES else ""


def functions_of(kind: type) -> Iterator[tuple[str, object]]:
    """What a class of modules defines, and those that it is made of: functions and plain values."""
    for base in kind.__mro__:
        if base is nn.Module:  # what each call of a module goes through
            yield from ((name, vars(base)[name]) for name in ("__call__", "_call_impl"))
        if base in (nn.Module, PreTrainedModel, object):
            continue
        of_release = release_of(base.__module__)
        if of_release and not issubclass(base, nn.Module):
            continue  # generate, save_pretrained and the like
        for name, member in vars(base).items():
            given = getattr(member, "fget", None) or member
            if isinstance(given, (classmethod, staticmethod)):
                given = given.__func__
            if computes(given):
                counts = name in ("forward", "__call__") or not (of_release and name[:2] == "__")
            else:
                counts = isinstance(given, (int, float, str)) and not of_release
                counts = counts and name[:2] != "__"
            if counts:
                yield f"{base.__module__}.{base.__qualname__}.{name}", given


def parts_of(
    function: types.FunctionType, follow: bool, used: Collection[str]
) -> Iterator[tuple[str, object]]:
    """What decides what it computes; of torch's functions only with `follow` what they call.

    `used` are the entries of transformers' tables that the model uses.
    """
    home = _home(function.__code__.co_filename)
    if home:
        yield "line", f"{home}:{function.__code__.co_firstlineno}"
    else:
        yield "code", code(function.__code__)
    if not home:
        yield from (("defaults", function.__defaults__), ("named", function.__kwdefaults__))
    if release_of(home) != "torch":
        for number, cell in enumerate(function.__closure__ or ()):
            yield str(number), cell.cell_contents
    elif not follow:
        return
    if is_standard(function):
        return
    for name in _names(function.__code__):
        if name in function.__globals__:
            value = function.__globals__[name]
            if isinstance(value, GeneralInterface):
                yield from ((f"{name}.{one}", value[one]) for one in sorted(value) if one in used)
            else:
                yield from _named(name, value, function, bool(home))


def computes(value: object) -> bool:
    """A function, or what a program of its own may put in the place of one."""
    if isinstance(value, _FUNCTIONS):
        return True
    package = type(value).__module__.partition(".")[0]
    known = package in (*_RELEASES, "kvpool_transformers", *sys.stdlib_module_names)
    called = callable(value) or hasattr(value, "__get__")
    return called and not known and not isinstance(value, type)


def is_standard(function: Any) -> bool:
    """Whether Python's own library has it."""
    return str(function.__module__).partition(".")[0] in sys.stdlib_module_names


def code(of: types.CodeType) -> str:
    """A hash of byte code and its constants."""
    text = f"{of.co_code.hex()} {of.co_names} {_constant(of.co_consts)}"
    return hashlib.sha256(text.encode()).hexdigest()


def _constant(one: object) -> str:
    """The same in each process: sets have another order in each."""
    if isinstance(one, types.CodeType):
        return code(one)
    if isinstance(one, (tuple, frozenset)):
        inner = [_constant(part) for part in one]
        return f"{type(one).__name__}{sorted(inner) if isinstance(one, frozenset) else inner}"
    return repr(one)


def _named(
    name: str, value: Any, function: types.FunctionType, of_release: bool
) -> Iterator[tuple[str, object]]:
    """What a name of a module stands for, where that may have been replaced."""
    if computes(value):
        yield name, value
    elif isinstance(value, types.ModuleType):
        if release_of(value.__name__) or not of_release:
            inside, numbers = vars(value), () if release_of(value.__name__) else _NUMBERS
            for inner in _names(function.__code__):
                part = inside.get(inner)
                if isinstance(part, numbers):
                    yield f"{name}.{inner}", part
                elif not isinstance(part, types.ModuleType):
                    yield from _named(f"{name}.{inner}", part, function, True)
                elif part.__name__ == f"{value.__name__}.{inner}":
                    yield from _named(f"{name}.{inner}", part, function, of_release)
    elif not of_release and not isinstance(value, (type, logging.Logger)):
        yield name, value


@functools.lru_cache(4096)
def _names(of: types.CodeType) -> tuple[str, ...]:
    """The names that a function's code has, and the functions in it."""
    names = dict.fromkeys(of.co_names)
    for one in of.co_consts:
        if isinstance(one, types.CodeType):
            names.update(dict.fromkeys(_names(one)))
    return tuple(names)


@functools.lru_cache(4096)
def _home(file: str) -> str:
    """A file of a release, from its package on; else ""."""
    for package in _RELEASES:
        root = str(sys.modules[package].__file__).removesuffix("__init__.py")
        if file.startswith(root):
            return f"{package}.{file.removeprefix(root)}"
    return ""


def modes() -> str:
    """What is switched on in this thread that changes what functions of torch do, or ""."""
    if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
        return "a hook of all modules"
    stack: list[object] = [*torch.overrides._get_current_function_mode_stack()]
    stack += torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    kinds = [type(one).__qualname__ for one in stack]
    return next((kind for kind in kinds if kind != "DeviceContext"), "")


def precision() -> str:
    """How products of float32 are made, by devices: in TF32 or bfloat16, if a program wants it."""
    on: Any = torch.backends
    rounded = (on.cuda.matmul.fp32_precision, on.mkldnn.matmul.fp32_precision)
    return " ".join("exact" if one in ("none", "ieee") else one for one in rounded)
