"""Fingerprints of the files that an engine's weights come from: of samples, or of all their bytes.

Equal for equal weights on two hosts, in whichever files they are. (design: namespace)
"""

from __future__ import annotations

import hashlib
import os
import random
import struct
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

_FILE_SAMPLE: Final = 512
_FILE_SAMPLES: Final = 2048
_HEADER_MAX: Final = 100 << 20
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def paths(model: str, revision: str = "") -> list[Path]:
    """Where the weights of a model are. Raises OSError when there are none."""
    folder = _folder(model, revision or "main")
    found = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS)
    if not found:
        raise OSError(f"no weights in {folder}")
    return found


def files(model: str, revision: str = "") -> str:
    """A hash of the weights in a model's directory, whatever its files are called.

    `model` is a directory, or the name of a model in the Hugging Face cache. Tensors of safetensors
    files count by name, type and shape, in whichever file they are; each (of more than 700, an even
    choice) is read at its beginning, its end and random positions, together about 1 MiB. Raises
    OSError when a file cannot be read.
    """
    tensors = [one for path in paths(model, revision) for one in stored(path)]
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


class Stored(NamedTuple):
    """A tensor in a file, or, without a name, a file that does not list any."""

    name: str
    kind: str
    path: Path
    first: int
    last: int


def _sample(one: Stored, count: int) -> bytes:
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


def stored(path: Path) -> list[Stored]:
    """The tensors of a safetensors file; of a file that does not list them the whole of it."""
    return _listed(path) or [Stored("", "", path, 0, path.stat().st_size)]


def _listed(path: Path) -> list[Stored]:
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
            Stored(
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
