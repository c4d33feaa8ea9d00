"""The pool in threads: `kvpool.sync` has the same calls without `await`."""

from __future__ import annotations

import subprocess
import sys
import threading

import kvpool.sync
from kvpool import Namespace

MODEL = Namespace("example/threads")


def work(pool: kvpool.sync.Pool, number: int) -> None:
    key, data = bytes([number]) * 32, bytes([number]) * 4096
    pool.write(MODEL, [key], [data])
    buffer = bytearray(4096)
    (result,) = pool.read(MODEL, [key], [buffer])
    print(f"thread {number}: {result.status.label}, right: {buffer == data}")


command = [sys.executable, "-m", "kvpool", "dev", "--bind", "127.0.0.1:0", "--capacity", "64MiB"]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
    assert running.stdout is not None
    address = running.stdout.readline().rpartition(" ")[2].strip()
    with kvpool.sync.connect(address) as pool:
        threads = [threading.Thread(target=work, args=(pool, n)) for n in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    running.terminate()
