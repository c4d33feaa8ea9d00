"""The digest of all that is in a model's weight files, read by a process of the lowest priority.

For engines whose kernels hide weights from `fingerprint.memory`: in samples of their files some
tokens' embeddings, or a few edited values, are missed. A thread would take turns of the interpreter
with the engine. Each file is read once: its sum is kept in the user's cache, by path, size, time of
change and inode. (design: namespace)
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
import xxhash

from kvpool_engines import weight_files

_CHUNK: Final = 1 << 20
#: Files that the cache knows, the last ones that were read, and its bytes at most.
_KEPT: Final = 2048
_KEPT_BYTES: Final = 4 << 20
_Sums = dict[str, Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]]


class FileDigest(NamedTuple):
    """What weight files say; or `unknown`, and the `problem` with them."""

    digest: str
    problem: str = ""


class WholeFiles:
    """Called, the digest of the files as they were when this was made; None while they are read.

    Equal for the same tensors, in whichever files. Never waits and raises nothing. The process
    that reads may outlive this one: the next engine finds what it has read.
    """

    def __init__(self, model: str, revision: str = "") -> None:
        self._found: FileDigest | None = None
        try:
            self._files = [_key(path) for path in weight_files.paths(model, revision)]
            kept = _kept()
            if all(file in kept for file in self._files):
                self._found = FileDigest(_digest(kept[file] for file in self._files))
                return
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, model, revision],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            self._found = FileDigest("unknown", str(error))

    def __call__(self) -> FileDigest | None:
        if self._found is None and (status := self._process.poll()) is not None:
            output = self._process.communicate()[0].decode()
            files, _, digest = output.partition(" ")
            if status:
                self._found = FileDigest("unknown", output or f"their reader ended with {status}")
            elif files != _digest_of_keys(self._files):
                self._found = FileDigest("unknown", "they were changed after the engine's start")
            else:
                self._found = FileDigest(digest)
        return self._found


def read(model: str, revision: str = "") -> dict[str, str]:
    """The sum of each weight file, by what tells it from others. Files that are not in the cache
    are read, and put there. Raises OSError."""
    kept, found = _kept(), {}
    for path in weight_files.paths(model, revision):
        key = _key(path)
        if key not in kept:
            kept[key] = _sum(path)
            if _key(path) != key:
                raise OSError(f"{path} was changed while it was read")
            _keep(kept)
        found[key] = kept[key]
    return found


def _digest(sums: Iterable[str]) -> str:
    total = sum(int(one, 16) for one in sums) % (1 << 128)
    return hashlib.sha256(f"{total:x}".encode()).hexdigest()[:12]


def _digest_of_keys(files: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(files).encode()).hexdigest()


def _key(path: Path) -> str:
    whole = path.resolve()
    state = whole.stat()
    return f"{whole} {state.st_size} {state.st_ctime_ns} {state.st_ino}"  # mtime may be set back


def _sum(path: Path) -> str:
    """Of the hashes of its tensors: the same in any order, and those of two files add up."""
    total = 0
    with path.open("rb", buffering=0) as file:
        for one in weight_files.stored(path):
            hasher = xxhash.xxh3_128(f"{one.name}:{one.kind}:{one.last - one.first};".encode())
            file.seek(one.first)
            left = one.last - one.first
            while left:
                data = file.read(min(left, _CHUNK))
                if not data:
                    raise OSError(f"{path} became shorter while it was read")
                hasher.update(data)
                left -= len(data)
            total += hasher.intdigest()
    return f"{total % (1 << 128):032x}"


# --- the cache ----------------------------------------------------------------------------------


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "kvpool" / "weights.json"


def _kept() -> dict[str, str]:
    """Empty where there is none, or what is there is no such cache."""
    try:
        with _cache().open("rb") as file:
            return msgspec.json.decode(file.read(_KEPT_BYTES), type=_Sums)
    except (OSError, RuntimeError, msgspec.DecodeError):  # RuntimeError: this user has no home
        return {}


def _keep(sums: Mapping[str, str]) -> None:
    """Without a place for it, the files are read again by the next engine."""
    with contextlib.suppress(OSError, RuntimeError):
        cache = _cache()
        cache.parent.mkdir(parents=True, exist_ok=True)
        fresh = cache.with_suffix(f".{os.getpid()}")
        try:
            fresh.write_bytes(msgspec.json.encode(dict(list(sums.items())[-_KEPT:])))
            fresh.replace(cache)
        finally:
            fresh.unlink(missing_ok=True)


if __name__ == "__main__":
    os.nice(19)
    try:
        found = read(*sys.argv[1:3])
        print(_digest_of_keys(found), _digest(found.values()), end="")
    except OSError as error:
        print(error, end="")
        sys.exit(1)
