"""What it would cost to authenticate payloads on plain tcp, beside the checksum that there is.

    python -m benchmarks.macs

Each takes its turn on 16 MiB, one thread, GB/s; medians. Poly1305 and AES-GMAC need the package
cryptography. A MAC of each exchange would run twice, once at
each end; what TLS takes for a whole read is in `python -m benchmarks.tls`.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import statistics
import time
from collections.abc import Callable
from typing import Final

from kvpool.checksum import checksum

_SIZE: Final = 16 << 20
_ROUNDS: Final = 11


def _macs(data: memoryview, key: bytes) -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {
        "XXH3 (the checksum, no MAC)": lambda: checksum(data, 1),
        "BLAKE2b, keyed": lambda: hashlib.blake2b(data, key=key, digest_size=16).digest(),
        "HMAC-SHA256": lambda: hmac.digest(key, data, "sha256"),
    }
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        from cryptography.hazmat.primitives.poly1305 import Poly1305
    except ImportError:
        return found

    def gcm(*, encrypts: bool) -> None:
        context = Cipher(algorithms.AES(key), modes.GCM(bytes(12))).encryptor()
        if encrypts:
            context.update_into(data, target)
        else:
            context.authenticate_additional_data(data)
        context.finalize()

    target = bytearray(len(data))
    found["Poly1305"] = lambda: Poly1305.generate_tag(key, data)
    found["AES-256-GMAC"] = lambda: gcm(encrypts=False)
    found["AES-256-GCM (encrypts, too)"] = lambda: gcm(encrypts=True)
    return found


def main() -> None:
    """Print a line for each."""
    macs = _macs(memoryview(os.urandom(_SIZE)), os.urandom(32))
    seconds: dict[str, list[float]] = {name: [] for name in macs}
    for _ in range(_ROUNDS):
        for name, call in macs.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    first = statistics.median(next(iter(seconds.values())))
    for name, times in seconds.items():
        took = statistics.median(times)
        print(f"{name:28} {_SIZE / took / 1e9:6.2f} GB/s, {took / first:5.1f} times the checksum")


if __name__ == "__main__":
    main()
