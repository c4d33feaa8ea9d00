"""Where the bytes of a master's map go, for each block.

    python -m benchmarks.map_memory [--blocks 3000000] [--key-size 32]

A `Directory` in this process, without a network. One server announces chains of 2,048 blocks, and
each is matched once, so that its spans are known. What a block takes depends on how full the pieces
of the map are, which repeats with each doubling, so the last line says what 16 times as many take.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import sys
from typing import Any, Final

from benchmarks.started import at_least
from kvpool.master.state import directory as state
from kvpool.master.state.server_record import Registration
from kvpool.piecewise_dict import PiecewiseDict
from kvpool.types import DIGEST_SIZE_MIN, Namespace

_NAMESPACE: Final = Namespace("memory")
_CHAIN: Final = 2048
_STEP: Final = 16  # in which Python's allocator gives memory to small objects


class _Malloc(ctypes.Structure):
    """What mallinfo2(3) says."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def free_in_malloc() -> int:
    """Bytes that malloc holds and has given to nobody."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Malloc
    return int(libc.mallinfo2().fordblks)


def allocated(one: object) -> int:
    """Bytes that Python's allocator gives for a small object."""
    return -(-sys.getsizeof(one) // _STEP) * _STEP


def tables(map: PiecewiseDict[Any, int]) -> int:
    """Bytes of its dicts, without their keys and values."""
    return sum(sys.getsizeof(piece) for piece in map.pieces()) + sys.getsizeof(map.table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.map_memory", description=__doc__)
    parser.add_argument("--blocks", type=at_least(_CHAIN), default=3_000_000)
    parser.add_argument("--key-size", type=at_least(DIGEST_SIZE_MIN), default=32)
    options = parser.parse_args()
    size = options.key_size
    held = state.Directory()
    held.servers.register(
        "server", Registration(1, "host", ("tcp://127.0.0.1:1",), ("dram",), 1 << 50), 0.0
    )
    rng = random.Random(1)
    before, free_before = resident(), free_in_malloc()
    for _ in range(options.blocks // _CHAIN):
        packed = rng.randbytes(_CHAIN * size)
        digests = [packed[at : at + size] for at in range(0, len(packed), size)]
        held.stored("server", _NAMESPACE, 0, 0, digests)
        held.match(_NAMESPACE, digests)
    count = len(held)
    all_in_all = resident() - before
    blocks = held.blocks[_NAMESPACE]
    key = allocated(digests[0])
    mark = allocated(1 << 63) + allocated(1 << 100)  # and the tag of its blocks
    parts = {
        f"a key, {sys.getsizeof(digests[0])} bytes as an object, from the allocator": key * count,
        "the dicts: a slot, an index, what is empty": tables(blocks),
        "spans: a mark, a tag, a slot for 32 blocks": tables(blocks.spans)
        + mark * len(blocks.spans),
        "holes in malloc's memory": free_in_malloc() - free_before,
    }
    parts["other"] = all_in_all - sum(parts.values())
    print(f"{count:,} blocks, keys of {size} bytes: {all_in_all / count:.1f} bytes a block")
    for name, total in parts.items():
        print(f"  {total / count:5.1f}  {name}")
    lasting = all_in_all - parts["the ring of the last changes, which does not grow"]
    print(f"without the ring, 16 times as many take {16 * lasting / (1 << 30):.1f} GiB")


if __name__ == "__main__":
    main()
