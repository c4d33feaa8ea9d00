"""What SGLang 0.5.23 imports of CUDA, so that its engine runs on a CPU. Import it before sglang.

Packages of kernels can be imported, and whatever is called in them raises. The copies between
device memory and host memory of HiCache, which exist for CUDA, ROCm and XPU, are done by torch. The
scheduler, the radix tree, HiCache's controller and its threads are SGLang's own; its kernels,
streams and page-locked memory are not seen by any test here.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

#: Packages that have no build for a CPU.
KERNELS = (
    *("sgl_kernel", "torchvision", "flashinfer", "deep_gemm", "sgl_deep_gemm", "decord"),
    *("tilelang", "quack", "flash_attn"),
)


class _Kernel:
    """Any name in such a package: it can be imported, compared and hashed, and not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self._name}.{name}")

    def __call__(self, *arguments: object, **named: object) -> None:
        raise NotImplementedError(f"{self._name} is a stand-in: there is no such kernel here")

    def __hash__(self) -> int:
        return hash(self._name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kernel) and other._name == self._name


class _KernelClass(type):
    def __getattr__(cls, name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{cls.__name__}.{name}")


class _KernelModule(types.ModuleType):
    __path__: ClassVar[list[str]] = []
    __version__ = "0.4.10"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper():  # other classes inherit from it
            return _KernelClass(name, (), {"__init__": lambda self, *of, **named: None})
        return _Kernel(f"{self.__name__}.{name}")


class _Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] in KERNELS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _KernelModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


# --- HiCache's "direct" copies --------------------------------------------------------------------


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """From pages `[pages, layers, tokens, heads, size]` to one layer `[tokens, heads, size]`."""
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        pages = src_indices[::page_size] // page_size
        target[dst_indices] = source[pages, layer_id].reshape(-1, *source.shape[3:])


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    layers = len(src_ptrs) // len(dst_ptrs)
    pages = dst_indices[::page_size] // page_size
    for number, target in enumerate(dst_ptrs):
        for layer in range(layers):
            rows = src_ptrs[number * layers + layer][src_indices]
            target[pages, layer] = rows.reshape(len(pages), page_size, *target.shape[3:])


_HOST = "sglang.srt.mem_cache.pool_host"
PATCHES: dict[str, dict[str, Any]] = {
    # 10 GiB of host memory stay free by default.
    f"{_HOST}.base": {"HICACHE_HOST_MEMORY_RESERVE_BYTES": 256 << 20},
    f"{_HOST}.mha": {
        "transfer_kv_direct": transfer_kv_direct,
        "transfer_kv_per_layer_direct_pf_lf": transfer_kv_per_layer_direct_pf_lf,
        "transfer_kv_all_layer_direct_lf_pf": transfer_kv_all_layer_direct_lf_pf,
    },
    f"{_HOST}.common": {
        "_cuda_host_register": lambda *of, **named: None,
        "_cuda_host_unregister": lambda *of, **named: None,
    },
}


class _Patched(importlib.abc.MetaPathFinder):
    """Sets names in modules of SGLang right after their import, in each of its processes."""

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            run(module)
            vars(module).update(PATCHES[name])

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Kernels())
sys.meta_path.insert(0, _Patched())
