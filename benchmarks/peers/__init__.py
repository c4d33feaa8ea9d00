"""kvpool, Mooncake Store and Redis on the same work, in the same minutes, on one machine.

    make bench-peers                                  # everything
    .venv-peers/bin/python -m benchmarks.peers --help # parts of it

A system is its server processes (`pool_*.py`, the `System` half) and its clients (the `Client`
half), each client a process of its own (`worker.py`). `work.py`, `sessions.py` and `failures.py`
say what is done and take turns; nothing there knows which system it speaks to.
"""
