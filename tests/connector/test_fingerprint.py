"""Equal copies of a model have one fingerprint; another byte of a sample makes another one."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from kvpool_engines import fingerprint, weight_files, whole_files
from kvpool_engines.whole_files import FileDigest, WholeFiles
from tests.conftest import soon
from tests.support.poisoned_memory import PoisonedMemory

KIB = 1 << 10
CONFIG = {"layers": 2, "dtype": "bf16"}


def safetensors(sizes: Mapping[str, int], data: bytes) -> bytes:
    """A file with tensors of these sizes, one after the other."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, size in sizes.items():
        header[name] = {"dtype": "BF16", "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def whole(folder: str) -> str:
    return whole_files._digest(whole_files.read(folder).values())


class Model:
    """A folder with a config and one file of weights."""

    def __init__(self, folder: Path, weights: bytes, name: str = "model.safetensors") -> None:
        folder.mkdir(parents=True)
        self.folder, self.of = folder, weight_files.files
        self.file = folder / name
        self.file.write_bytes(weights)
        (folder / "config.json").write_text(json.dumps(CONFIG))

    @property
    def fingerprint(self) -> str:
        return self.of(str(self.folder))

    def changed_at(self, position: int, size: int = 1) -> str:
        """The fingerprint with other bytes there; afterwards the file is as it was."""
        data = bytearray(whole := self.file.read_bytes())
        for changed in range(position, min(position + size, len(data))):
            data[changed] ^= 1
        self.file.write_bytes(data)
        found = self.fingerprint
        self.file.write_bytes(whole)
        return found


SIZES = {"a": 40 * KIB, "b": 3 * KIB, "c": 100 * KIB}


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path / "model", safetensors(SIZES, bytes(143 * KIB)))


def test_the_beginning_and_the_end_of_each_tensor_count(model: Model) -> None:
    size = model.file.stat().st_size
    data = size - 143 * KIB
    same = model.fingerprint
    assert len(same) == 12
    for start, end in ((0, 40), (40, 43), (43, 143)):
        assert model.changed_at(data + start * KIB) != same
        assert model.changed_at(data + start * KIB + 511) != same
        assert model.changed_at(data + end * KIB - 512) != same
        assert model.changed_at(data + end * KIB - 1) != same
    assert model.changed_at(10) != same  # the header itself
    assert model.fingerprint == same


def test_between_them_random_places_are_read(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part in ten of a tensor is trained: it is seen wherever it lies, also with 128 places."""
    monkeypatch.setattr(weight_files, "_FILE_SAMPLES", 128)
    data = model.file.stat().st_size - 100 * KIB
    same = model.fingerprint
    for part in range(10):
        assert model.changed_at(data + 10 * part * KIB, 10 * KIB) != same
    assert {model.changed_at(data + n * KIB) == same for n in range(100)} == {True, False}


def test_a_file_counts_by_its_tensors_and_not_by_its_name(model: Model) -> None:
    same = model.fingerprint
    whole = model.file.read_bytes()
    model.file.write_bytes(whole + b"\0")
    assert model.fingerprint == same  # behind the last tensor
    model.file.write_bytes(whole)
    (model.folder / "README.md").write_text("not of the weights")
    model.file.rename(model.folder / "other.safetensors")
    assert model.fingerprint == same


@pytest.mark.parametrize("of", [weight_files.files, whole])
def test_the_same_tensors_in_one_file_or_in_two(
    of: Callable[[str], str], cache: Path, tmp_path: Path
) -> None:
    one = Model(tmp_path / "one", safetensors({"a": KIB, "b": 2 * KIB}, bytes(range(256)) * 12))
    data = bytes(range(256)) * 4
    two = Model(tmp_path / "two", safetensors({"a": KIB}, data), "model-1.safetensors")
    (two.folder / "model-2.safetensors").write_bytes(safetensors({"b": 2 * KIB}, data * 2))
    one.of = two.of = of
    assert two.fingerprint == one.fingerprint
    (two.folder / "model-2.safetensors").write_bytes(safetensors({"c": 2 * KIB}, data * 2))
    assert two.fingerprint != one.fingerprint  # the same bytes under another name
    (two.folder / "model-2.safetensors").unlink()
    assert two.fingerprint != one.fingerprint


def test_the_settings_of_a_model_without_the_version_that_wrote_them(model: Model) -> None:
    folder, file = str(model.folder), model.folder / "config.json"
    same = weight_files.settings(folder)
    file.write_text(json.dumps({"transformers_version": "9", **dict(reversed(CONFIG.items()))}))
    assert weight_files.settings(folder) == same
    file.write_text(json.dumps({**CONFIG, "layers": 3}))
    assert weight_files.settings(folder) != same
    file.write_text("{")
    with pytest.raises(OSError, match=r"config\.json"):
        weight_files.settings(folder)
    file.unlink()
    assert weight_files.settings(folder) == b""


def test_of_many_tensors_some_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "_FILE_SAMPLES", 8)
    many = Model(tmp_path / "m", safetensors({f"t{n}": 2 * KIB for n in range(9)}, bytes(18 * KIB)))
    data = many.file.stat().st_size - 18 * KIB
    same = many.fingerprint
    sampled = [many.changed_at(data + 2 * KIB * n) != same for n in range(9)]
    assert sampled == [True, False, False, False] * 2 + [True]


@pytest.mark.parametrize(
    "damaged",
    [
        struct.pack("<Q", 1 << 40),
        struct.pack("<Q", 40) + b"no json" + bytes(33),
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 7) + b'{"a":1}',
        struct.pack("<Q", 10) + b'{"a": {}}\n',
        struct.pack("<Q", 26) + b'{"a": {"data_offsets": []}',
        struct.pack("<Q", 31) + b'{"a": {"data_offsets": ["x"]}}\n',
        struct.pack("<Q", 2) + b"{}",
    ],
    ids=["header too large", "no json", "list", "number", "no offsets", "half", "text", "empty"],
)
def test_a_file_with_an_odd_header_is_sampled_all_over(tmp_path: Path, damaged: bytes) -> None:
    odd = Model(tmp_path / "odd", damaged.ljust(64, b"\0") + bytes(1024 * KIB))
    same = odd.fingerprint
    every = odd.file.stat().st_size // 256
    assert odd.changed_at(0) != same
    for number in (1, 2, 100, 255):
        assert odd.changed_at(every * number, 4 * KIB) != same


def test_a_small_file_of_another_kind_counts_whole(tmp_path: Path) -> None:
    for size in (5, 8, 20 * KIB):
        small = Model(tmp_path / str(size), bytes(size), "weights.bin")
        same = small.fingerprint
        assert all(small.changed_at(position) != same for position in (0, size // 2, size - 1))


def test_models_in_hugging_faces_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    cached = tmp_path / "hub" / "models--org--tiny"
    one = Model(cached / "snapshots" / "abc", bytes(100), "a.bin").fingerprint
    other = Model(cached / "snapshots" / "def", bytes(200), "a.bin").fingerprint
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc\n")
    (cached / "refs" / "v2").write_text("def")
    assert weight_files.files("org/tiny") == one
    assert weight_files.files("org/tiny", "v2") == other
    assert weight_files.files("org/tiny", "def") == other
    with pytest.raises(OSError, match="nothing"):
        weight_files.files("org/tiny", "nothing")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(OSError, match="org--tiny"):
        weight_files.files("org/tiny")


def test_a_single_file_and_a_folder_without_weights(tmp_path: Path) -> None:
    gguf = Model(tmp_path / "gguf", bytes(300), "model.gguf")
    assert weight_files.files(str(gguf.file)) == gguf.fingerprint
    (tmp_path / "empty").mkdir()
    with pytest.raises(OSError, match="no weights in"):
        weight_files.files(str(tmp_path / "empty"))


# --- all of the files, where memory shows nothing -------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/kvpool/weights.json"


def found(model: Model, meanwhile: bytes = b"") -> FileDigest | None:
    reads = WholeFiles(str(model.folder))
    if meanwhile:
        model.file.write_bytes(meanwhile)
    soon(lambda: reads() is not None, 60)
    return reads()


def test_every_byte_counts_where_all_are_read(
    cache: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_files, "_CHUNK", 1000)
    data, model.of = model.file.stat().st_size - 143 * KIB, whole
    for position in (data, data + 20_001, data + 143 * KIB - 1):
        assert model.changed_at(position) != model.fingerprint


def test_a_file_whose_times_were_set_back_is_read_again(cache: Path, model: Model) -> None:
    before, times = found(model), model.file.stat()
    data = bytearray(model.file.read_bytes())
    data[-1] ^= 1
    model.file.write_bytes(data)
    os.utime(model.file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert found(model) != before


def test_why_a_file_cannot_be_read_is_said(cache: Path, model: Model) -> None:
    model.file.unlink()
    model.file.mkdir()
    assert "Is a directory" in found(model).problem


def test_another_process_reads_a_file_once(
    cache: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    same, content = found(model), model.file.read_bytes()
    assert same == FileDigest(whole(str(model.folder)))

    def no_process(*_: object, **__: object) -> None:
        raise OSError("no process")

    monkeypatch.setattr(subprocess, "Popen", no_process)
    assert found(model) == same
    model.file.write_bytes(content)  # another time
    assert found(model) == FileDigest("unknown", "no process")
    whole(str(model.folder))
    shutil.copy2(model.file.rename(model.folder / "old"), model.file)
    assert found(model) == FileDigest("unknown", "no process")  # another inode
    cache.write_text('{"a": "of another program"}')
    whole(str(model.folder))
    assert found(model) == same


def test_what_cannot_be_read_or_changes_meanwhile_is_unknown(cache: Path, model: Model) -> None:
    cache.parent.parent.write_text("no directory, so nothing is kept")
    assert found(model) == FileDigest(whole(str(model.folder)))
    changed = found(model, meanwhile=bytes(10))
    assert changed == FileDigest("unknown", "they were changed after the engine's start")
    model.file.unlink()
    assert found(model) == FileDigest("unknown", f"no weights in {model.folder}")


# --- tensors in memory: only what a kernel reads counts -------------------------------------------


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, math.prod(shape) + 1, dtype=torch.float32).view(shape).to(dtype)


def padded_rows(dtype: torch.dtype, *shape: int, room: int) -> torch.Tensor:
    """Rows that begin `room` elements after each other, as kernels of FP8 want them."""
    weight = torch.empty(*shape[:-1], room, dtype=dtype)[..., : shape[-1]]
    return weight.copy_(values(*shape, dtype=dtype))


def aligned_scales(experts: int, rows: int, columns: int, room: int) -> torch.Tensor:
    """Column by column, each with room behind it, as TMA reads them."""
    strides = (columns * room, 1, room)
    return torch.empty_strided((experts, rows, columns), strides).copy_(
        values(experts, rows, columns)
    )


PADDED = {
    "fp8, rows": lambda: padded_rows(torch.float8_e4m3fn, 40, 72, room=256),
    "fp8, rows that are no words": lambda: padded_rows(torch.float8_e4m3fn, 40, 70, room=75),
    "bf16, experts": lambda: padded_rows(torch.bfloat16, 4, 6, 64, room=72),
    "packed fp4, transposed": lambda: padded_rows(torch.uint8, 40, 64, room=96).t(),
    "scales": lambda: aligned_scales(3, 10, 7, room=12),
    "one row": lambda: padded_rows(torch.int32, 1, 9, room=16)[0],
    "every other": lambda: padded_rows(torch.int64, 30, 3, room=4)[::2],
}


@pytest.mark.parametrize("kind", PADDED)
@pytest.mark.parametrize("summed", [None, 64])
def test_what_lies_between_rows_does_not_count(kind: str, summed: int | None) -> None:
    """Nobody has written it: equal weights on two GPUs have other bytes there."""
    found = set()
    for poison in (0x00, 0x5A, 0xFF):
        with PoisonedMemory(poison):
            weight = PADDED[kind]()
        storage = torch.empty(0, dtype=torch.uint8).set_(weight.untyped_storage())
        assert (storage == poison).sum() > 0  # there is such memory
        found.add(fingerprint.memory([("weight", weight)], summed_bytes=summed).digest)
    assert len(found) == 1


@pytest.mark.parametrize("kind", PADDED)
def test_every_value_between_paddings_counts(kind: str) -> None:
    weight = PADDED[kind]()
    same = fingerprint.memory([("weight", weight)]).digest
    whole = weight.view(fingerprint._INTEGERS[weight.element_size()])
    for position in itertools.product(*(sorted({0, size // 2, size - 1}) for size in whole.shape)):
        whole[position] ^= 1
        assert fingerprint.memory([("weight", weight)]).digest != same
        whole[position] ^= 1
    assert fingerprint.memory([("weight", weight)]).digest == same
