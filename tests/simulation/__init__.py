"""Deterministic simulation: the real pool in a simulated world with faults.

    from tests.simulation.world import run
    report = run(1234)
    assert report.failure is None

Master, server, client, the transports' streams and sessions, the codec and the server's state are
the real code. Only the event loop, the network below the streams, memory, disks, clocks and
randomness are simulated; the real code gets them through constructors and the running loop. One
seed gives one history, and each run of that seed repeats it exactly.

This file imports nothing: `plant.py` must install its import hook before the pool is imported.
"""
