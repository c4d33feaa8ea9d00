"""A fingerprint of an engine's weights, from their files: equal for equal copies on two hosts.

Reading all of a large model would take minutes. The header of a safetensors file lists where its
tensors start, so 1 KiB of each tensor is enough to distinguish two checkpoints, even if most layers
are the same. Other files are sampled at even distances (design: namespace).
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

_SAMPLE: Final = 1024
_SAMPLES_MAX: Final = 4096
_HEADER_MAX: Final = 100 << 20
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def weights(model: str, revision: str = "", *, digits: int = 12) -> str:
    """A hash of the files in a model's directory. Raises OSError when a file cannot be read.

    `model` is a directory, or the name of a model in the Hugging Face cache.
    """
    folder = _folder(model, revision or "main")
    hasher = hashlib.sha256()
    files = sorted(
        path for path in folder.iterdir() if path.suffix in _WEIGHTS or path.name == "config.json"
    )
    if not files:
        raise OSError(f"no weights in {folder}")
    for path in files:
        if path.name == "config.json":
            hasher.update(_settings(path))
            continue
        hasher.update(f"{path.name}:{path.stat().st_size};".encode())
        with path.open("rb") as file:
            for offset in _offsets(file, path):
                file.seek(offset)
                hasher.update(file.read(_SAMPLE))
    return hasher.hexdigest()[:digits]


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


def _settings(path: Path) -> bytes:
    """The content of config.json, without the version that wrote it and with its keys sorted."""
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict)
    except msgspec.DecodeError as error:
        raise OSError(f"{path}: {error}") from None
    content.pop("transformers_version", None)
    return msgspec.json.encode(content, order="deterministic")


def _offsets(file: BinaryIO, path: Path) -> list[int]:
    size = path.stat().st_size
    if path.suffix == ".safetensors" and size > 8:
        (header,) = struct.unpack("<Q", file.read(8))
        if header <= min(_HEADER_MAX, size - 8):
            try:
                tensors = msgspec.json.decode(file.read(header), type=dict)
                starts = [
                    8 + header + int(tensor["data_offsets"][0])
                    for name, tensor in tensors.items()
                    if name != "__metadata__"
                ]
            except (msgspec.DecodeError, KeyError, TypeError, ValueError, IndexError):
                starts = []
            if starts:
                starts.sort()
                step = -(-len(starts) // _SAMPLES_MAX)
                return [0, *starts[::step]]
    return list(range(0, size, max(_SAMPLE, size // 256)))
