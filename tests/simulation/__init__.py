"""Deterministic simulation: the real pool in a world where anything can go wrong.

    from tests.simulation import run
    report = run(1234)
    assert report.failure is None

Master, server, client, transports' streams and sessions, codec and core are the real ones. Only
the event loop, the network below the streams, memory, clocks and randomness are simulated; they
come in through constructors and the running loop. One seed is one history, always the same.
"""

from tests.simulation.world import Plan, Report, run

__all__ = ["Plan", "Report", "run"]
