"""kvpool, Mooncake Store, Redis and LMCache on the same work, in the same minutes, on one machine.

    make bench-peers                                  # everything
    .venv-peers/bin/python -m benchmarks.peers --help # parts of it

A system is its server processes (`pool_*.py`, the `System` half) and its clients (the `Client`
half). Each client is a process of its own (`worker.py`). `work.py`, `sessions.py` and `failures.py`
hold the tasks, and run each of them on one system after the other. They contain no code for a
particular system.
"""
