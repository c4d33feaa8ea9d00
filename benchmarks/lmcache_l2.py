"""LMCache's own benchmark of its second level, with kvpool and with LMCache's `fs`, in turns.

    .venv-lmcache/bin/python -m benchmarks.lmcache_l2 [--pairs 5] [--rounds 5] [--keys 64]
        [--kib 1024]

Every run is a process of its own, `lmcache bench l2 --no-skip-verify`: it stores so many objects a
round, looks them up, loads them and compares all bytes. The pool is another process on this host.
`fs` has the page cache: nothing is read from a disk.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from kvpool.testing.connector_checks import ProcessPool

OPERATIONS = ("Store", "Lookup", "Load")


def run(adapter: dict[str, Any], options: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of a round, by operation: the shortest and the median of one process."""
    command = [str(Path(sys.executable).parent / "lmcache"), "bench", "l2"]
    command += ["--l2-adapter", json.dumps(adapter), "--num-keys", str(options.keys)]
    command += ["--data-size-kb", str(options.kib), "--rounds", str(options.rounds)]
    command += ["--no-skip-verify", "--lookup-max-hit-rate", "1.0", "--quiet"]
    environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false"}
    with tempfile.NamedTemporaryFile() as file:
        command += ["--format", "json", "--output", file.name]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
        metrics = json.loads(Path(file.name).read_bytes())["metrics"]
    found: dict[str, list[float]] = {}
    for section in metrics.values():
        if (operation := section.get("operation")) is not None:
            wanted = section["total_keys"]
            if section["total_success"] != wanted:
                raise SystemExit(f"{operation}: {section['total_success']} of {wanted} keys")
            found[operation] = [section["duration_min_ms"], section["duration_p50_ms"]]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("pairs", 5), ("rounds", 5), ("keys", 64), ("kib", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    times: dict[str, dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    capacity = f"{options.pairs * (options.rounds + 2) * options.keys * options.kib + (1 << 18)}KiB"
    with ProcessPool(capacity) as pool, tempfile.TemporaryDirectory() as folder:
        for pair in range(options.pairs):
            plugin = {
                "type": "plugin",
                "module_path": "kvpool_lmcache",
                "class_name": "KVPoolL2Adapter",
                # The objects of the pair before are not these.
                "adapter_params": {"masters": [pool.address], "revision": str(pair)},
            }
            files = {"type": "fs", "base_path": f"{folder}/{pair}"}
            adapters: dict[str, dict[str, Any]] = {"kvpool": plugin, "fs": files}
            for name in sorted(adapters, reverse=bool(pair % 2)):
                for operation, took in run(adapters[name], options).items():
                    times[operation][name].append(took)
    print(
        f"{options.keys} objects of {options.kib} KiB, {options.pairs} processes of each, in turns;"
    )
    print("load of the machine:", " ".join(f"{one:.1f}" for one in os.getloadavg()))
    print(f"{'ms a round':10} {'fs: min':>8} {'median':>8} {'kvpool: min':>12} {'median':>8}")
    for operation in OPERATIONS:
        row = times[operation]
        shown = [
            (min(one[0] for one in row[name]), statistics.median(one[1] for one in row[name]))
            for name in ("fs", "kvpool")
        ]
        (fs_min, fs_median), (our_min, our_median) = shown
        print(
            f"{operation:10} {fs_min:8.2f} {fs_median:8.2f} {our_min:12.2f} {our_median:8.2f}"
            f"   kvpool takes {our_min / fs_min:.2f}x (min), {our_median / fs_median:.2f}x (median)"
        )


if __name__ == "__main__":
    main()
