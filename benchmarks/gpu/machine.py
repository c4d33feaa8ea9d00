"""What this machine has: a GPU and its driver, Triton, UCX with CUDA and verbs, GPUDirect, vLLM."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Final

import torch

#: What takes the place of a GPU: the host's memory, and the fake device of the tests (`fake.py`).
CPU, FAKE = "cpu", "fake"
IN_PLACE: Final = (CPU, FAKE)
#: Attributes of a device, by their numbers in cuda.h.
_RDMA_SUPPORTED, _WRITES_ORDERING, _DMA_BUF_SUPPORTED = 116, 118, 124
_ORDERINGS: Final = {
    0: "none: a flush is needed before a kernel may read what a network card wrote",
    100: "owner: kernels of the device that start after the completion see the bytes",
    200: "all devices",
}


def present(device: str) -> dict[str, str | None]:
    """By need, None if it is there, else why not. `IN_PLACE` of a GPU others may be."""
    gpu = device in IN_PLACE or torch.cuda.is_available()
    ucx = importlib.util.find_spec("ucxx") is not None
    no_gpu = None if gpu else "no GPU"
    if device == FAKE and importlib.util.find_spec("pytest") is None:
        no_gpu = "no pytest for the fake device"
    alone = device != FAKE
    return {
        "gpu": no_gpu,
        "cuda": no_gpu or _unless(device != "cpu", "no memory apart from the host's"),
        "triton": no_gpu
        or _unless(alone, "the fake device runs no kernels")
        or _unless(importlib.util.find_spec("triton") is not None, "no triton"),
        "connector": _unless(
            importlib.util.find_spec("kvpool_connector") is not None, "no kvpool_connector"
        ),
        "pytest": _unless(alone, "no other process has the fake device")
        or _unless(
            all(map(importlib.util.find_spec, ("pytest", "pytest_asyncio"))),
            "no pytest with pytest-asyncio",
        ),
        "ucx": _unless(ucx, "no UCX"),
        "ucx-cuda": no_gpu
        or _unless(device in IN_PLACE or bool(_libraries("uct_cuda")), "no UCX for CUDA"),
        "vllm": no_gpu or _unless(_vllm() is not None, "no vLLM for GPUs"),
    }


def gpu(device: str) -> str:
    if device in IN_PLACE:
        return f"the device {device} in place of a GPU: figures mean nothing"
    if not torch.cuda.is_available():
        return f"none: torch {torch.__version__} finds no CUDA device"
    properties = torch.cuda.get_device_properties(device)
    return (
        f"{properties.name}, {properties.total_memory >> 30} GiB, driver "
        f"{_first(['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader'])}, "
        f"torch {torch.__version__}"
    )


def ucx() -> str:
    if importlib.util.find_spec("ucxx") is None:
        return "none: ucxx is not installed"
    cuda = ", ".join(_libraries("uct_cuda")) or "none"
    verbs = ", ".join(_libraries("uct_ib")) or "none"
    devices = ", ".join(p.name for p in Path("/sys/class/infiniband").glob("*")) or "none"
    return f"for CUDA: {cuda}; for verbs: {verbs}; RDMA devices: {devices}"


def gpudirect(device: str) -> str:
    modules = _read("/proc/modules")
    names = [name for name in ("nvidia_peermem", "nv_peer_mem") if name in modules]
    words = [f"module {name}" for name in names] or ["no nvidia-peermem"]
    if device not in IN_PLACE and torch.cuda.is_available():
        supported = _attribute(device, _DMA_BUF_SUPPORTED)
        words.append("dmabuf" if supported else "no dmabuf")
        words.append(
            f"RDMA to the device: {'yes' if _attribute(device, _RDMA_SUPPORTED) else 'no'}"
        )
    return ", ".join(words)


def writes_ordering(device: str) -> str:
    """What a kernel may take for granted after a network card has written to the device."""
    if device == "cpu":
        return "the device cpu: writes are seen at once"
    value = _attribute(device, _WRITES_ORDERING)
    return _ORDERINGS.get(value, f"unknown ({value})")


def topology() -> str:
    return _first(["nvidia-smi", "topo", "-m"], whole=True)


def vllm() -> str:
    return _vllm() or "none for GPUs"


def _vllm() -> str | None:
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None
    return None if "cpu" in version else f"vLLM {version}"


def _attribute(device: str, number: int) -> int:
    """An attribute as the driver has it. Raises OSError without a driver, RuntimeError with its
    code when it refuses."""
    driver, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(-1)
    index = torch.device(device).index or 0
    for code in (
        driver.cuInit(0),  # torch may have asked for devices in another way
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, index),
    ):
        if code:
            raise RuntimeError(f"the driver answered {code} for attribute {number}")
    return value.value


def _libraries(name: str) -> list[str]:
    spec = importlib.util.find_spec("libucx")
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    folders = [Path(place) / "lib" / "ucx" for place in places]
    folders += [Path(f"/usr/{one}/ucx") for one in ("lib", "lib64", "lib/x86_64-linux-gnu")]
    return sorted({path.name for folder in folders for path in folder.glob(f"lib{name}*.so")})


def _unless(there: bool, why: str) -> str | None:
    return None if there else why


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _first(command: list[str], *, whole: bool = False) -> str:
    """What a command prints, or its first line; `unknown` where it is not installed or fails."""
    if shutil.which(command[0]) is None:
        return "unknown"
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    text = done.stdout.strip()
    return (text if whole else text.partition("\n")[0]) or "unknown"
