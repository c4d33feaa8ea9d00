"""Fingerprints of an engine's weights: of its tensors in memory, and of their files.

Equal for equal weights on two hosts. Neither reads everything that a large model has: positions are
drawn from a seed that is the same everywhere. (design: namespace)
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import torch

#: Bytes that are read at random positions of all tensors together, and values of each at least.
_SAMPLED_BYTES: Final = 1 << 20
_SAMPLED_VALUES_MIN: Final = 64
#: Bytes of rows that are summed, by the kind of device. A GPU reads all that it has: at 1.6 TB/s or
#: more, in less than 50 ms of its time.
SUMMED_BYTES: Final = {"cuda": 1 << 60}
SUMMED_BYTES_ELSEWHERE: Final = 64 << 20
#: Each row's sum is multiplied by another odd number, so that exchanged rows are seen.
_ROW_STEP: Final = 0x1E3779B97F4A7C15

#: Rows that are summed at a time: beside the weights, a GPU needs 3 x 8 bytes for each.
_SUMS_AT_ONCE: Final = 1 << 18

_FILE_SAMPLE: Final = 512
_FILE_SAMPLES: Final = 2048
_HEADER_MAX: Final = 100 << 20
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class MemoryFingerprint(NamedTuple):
    """`hidden` counts tensors whose values the engine keeps where they cannot be read, such as
    weights that a kernel's library has packed for itself."""

    digest: str
    hidden: int


def memory(
    tensors: Iterable[tuple[str, torch.Tensor]], *, summed_bytes: int | None = None
) -> MemoryFingerprint:
    """A hash of tensors where they are, on a CPU or a GPU, with their names, types and shapes.

    It depends on how they lie in memory, which is the same in engines that pack alike. Of each
    tensor it takes the first and the last value and values at random positions, together at
    least 1 MiB (or all there is), and the sum of every row; of tensors that are not on a GPU it
    sums as many rows, evenly spread, as have `summed_bytes` (64 MiB) together.
    """
    plain = [part for name, tensor in tensors for part in _plain(name, tensor)]
    total = sum(tensor.numel() * tensor.element_size() for _, tensor in plain) or 1
    hasher = hashlib.sha256()
    values: dict[torch.device, list[torch.Tensor]] = {}
    hidden = 0
    for name, tensor in plain:
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        if not tensor.numel() or tensor.device.type == "meta":
            hidden += 1
            continue
        integers = _as_integers(tensor.detach())
        share = _SAMPLED_BYTES / total
        on_device = values.setdefault(tensor.device, [])
        on_device.append(_sampled(name, integers, share))
        limit = SUMMED_BYTES.get(tensor.device.type, summed_bytes or SUMMED_BYTES_ELSEWHERE)
        on_device.append(_summed(integers, -(-total // limit)))
    for of_device in values.values():  # one copy from each device, whatever the number of tensors
        hasher.update(torch.cat(of_device).cpu().numpy().tobytes())
    return MemoryFingerprint(hasher.hexdigest()[:12], hidden)


def _plain(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor, or those that a wrapper (TorchAO's quantized weights, say) is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield name, tensor
        return
    for inner in flatten()[0]:
        yield from _plain(f"{name}.{inner}", getattr(tensor, inner))


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers: comparing and adding them is exact, also of NaN."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def _sampled(name: str, integers: torch.Tensor, share: float) -> torch.Tensor:
    count = integers.numel()
    wanted = min(count, max(_SAMPLED_VALUES_MIN, int(count * share) + 1))
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    positions = torch.randint(count, (wanted,), generator=generator)
    positions[0], positions[-1] = 0, count - 1
    # By coordinates: the tensor may be a view whose rows are not contiguous.
    where = torch.unravel_index(positions.to(integers.device), integers.shape)
    return (integers[where] if integers.ndim else integers.reshape(1)).to(torch.int64)


def _summed(integers: torch.Tensor, every: int) -> torch.Tensor:
    rows = integers[::every] if integers.ndim > 1 else integers
    if rows.ndim > 1 and rows[0].is_contiguous() and rows.stride(-1) == 1 and _wide(rows):
        rows = rows.view(torch.int64)  # adding words of 8 bytes is 20 times faster than converting
    inner = math.prod(rows.shape[1:-1])
    step = max(1, _SUMS_AT_ONCE // inner)
    total = torch.zeros(1, dtype=torch.int64, device=rows.device)
    for first in range(0, rows.shape[0] if rows.ndim else 1, step):
        some = rows[first : first + step] if rows.ndim else rows
        sums = (some.sum(-1, dtype=torch.int64) if rows.ndim > 1 else some.to(torch.int64)).ravel()
        start = 2 * first * inner + 1
        numbers = torch.arange(start, start + 2 * sums.numel(), 2, device=sums.device)
        total += (sums * numbers.mul_(_ROW_STEP)).sum()
    return total


def _wide(rows: torch.Tensor) -> bool:
    """Whether rows can be seen as words of 8 bytes."""
    words = 8 // rows.element_size()
    parts = [rows.shape[-1], rows.storage_offset(), *rows.stride()[:-1]]
    return all(part % words == 0 for part in parts)


def files(model: str, revision: str = "") -> str:
    """A hash of the weights in a model's directory, whatever its files are called.

    `model` is a directory, or the name of a model in the Hugging Face cache. Tensors of safetensors
    files count by name, type and shape, in whichever file they are; each (of more than 700, an even
    choice) is read at its beginning, its end and random positions, together about 1 MiB. Raises
    OSError when a file cannot be read.
    """
    folder = _folder(model, revision or "main")
    found = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS)
    if not found:
        raise OSError(f"no weights in {folder}")
    tensors: list[_Stored] = []
    for path in found:
        tensors += _stored_tensors(path) or [_Stored("", "", path, 0, path.stat().st_size)]
    tensors.sort(key=lambda one: (one.name, one.kind, one.last - one.first))
    hasher = hashlib.sha256()
    for one in tensors:
        hasher.update(f"{one.name}:{one.kind}:{one.last - one.first};".encode())
    chosen = tensors[:: -(-len(tensors) * 3 // _FILE_SAMPLES)]
    total = sum(one.last - one.first for one in chosen) or 1
    shares = (_FILE_SAMPLES * (one.last - one.first) // total for one in chosen)
    # Sorted: files that list no tensors have no name that counts.
    for sample in sorted(_sample(*one) for one in zip(chosen, shares, strict=True)):
        hasher.update(sample)
    return hasher.hexdigest()[:12]


def settings(model: str, revision: str = "") -> bytes:
    """The model's config.json, without the version that wrote it and with its keys sorted; empty if
    there is none. Raises OSError when it cannot be read."""
    path = _folder(model, revision or "main") / "config.json"
    if not path.is_file():
        return b""
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict)
    except msgspec.DecodeError as error:
        raise OSError(f"{path}: {error}") from None
    content.pop("transformers_version", None)
    return msgspec.json.encode(content, order="deterministic")


def _folder(model: str, revision: str) -> Path:
    path = Path(model)
    if path.is_file():  # a single GGUF
        return path.parent
    if path.is_dir():
        return path
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    cached = cache / f"models--{model.replace('/', '--')}"
    named = cached / "refs" / revision
    commit = named.read_text().strip() if named.is_file() else revision
    return cached / "snapshots" / Path(commit).name


class _Stored(NamedTuple):
    """A tensor in a file, or, without a name, a file that does not list any."""

    name: str
    kind: str
    path: Path
    first: int
    last: int


def _sample(one: _Stored, count: int) -> bytes:
    """A hash of about `count` places of it: its beginning, its end, and random ones."""
    first, last = one.first, one.last
    size = last - first
    end = max(0, size - _FILE_SAMPLE)
    rng = random.Random(f"{one.name} {size}")
    places = {0, end, *(rng.randrange(max(1, end)) for _ in range(count - 2))}
    hasher = hashlib.sha256(f"{one.name} {size};".encode())
    with one.path.open("rb") as file:
        for place in sorted(places):
            file.seek(first + place)
            hasher.update(file.read(min(_FILE_SAMPLE, size - place)))
    return hasher.digest()


def _stored_tensors(path: Path) -> list[_Stored]:
    """The tensors of a safetensors file; empty for a file that does not list them."""
    size = path.stat().st_size
    if path.suffix != ".safetensors" or size <= 8:
        return []
    with path.open("rb") as file:
        (header,) = struct.unpack("<Q", file.read(8))
        if header > min(_HEADER_MAX, size - 8):
            return []
        text = file.read(header)
    begin = 8 + header
    try:
        tensors: dict[str, Any] = msgspec.json.decode(text, type=dict)
        found = [
            _Stored(
                name,
                f"{tensor.get('dtype')} {tensor.get('shape')}",
                path,
                begin + int(tensor["data_offsets"][0]),
                begin + int(tensor["data_offsets"][1]),
            )
            for name, tensor in tensors.items()
            if name != "__metadata__"
        ]
    except (msgspec.DecodeError, AttributeError, LookupError, TypeError, ValueError):
        return []
    if any(not begin <= one.first <= one.last <= size for one in found):
        return []
    return found
