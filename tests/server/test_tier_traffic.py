"""The seconds and rates of a tier's transfers, which operators and `kvpool status` go by."""

from __future__ import annotations

from kvpool.server.tier_traffic import TransferStats


def test_transfers_that_overlap_share_their_seconds() -> None:
    stats = TransferStats()
    for begun, now in ((True, 1.0), (True, 2.0), (False, 4.0), (True, 5.0), (False, 6.0)):
        (stats.begin if begun else stats.end)(now)
        assert stats.seconds == 0.0
    stats.end(7.0)
    assert stats.seconds == 6.0
    stats.begin(10.0)
    stats.end(10.5)
    assert stats.seconds == 6.5


def test_rates_are_of_the_last_seconds() -> None:
    stats = TransferStats()
    stats.tick(100.0)
    stats.size, stats.blocks = 4_000, 8
    stats.tick(100.5)
    assert (stats.rate, stats.block_rate) == (0.0, 0.0)
    stats.tick(102.0)
    assert (stats.rate, stats.block_rate) == (2_000.0, 4.0)
    stats.size, stats.blocks = 5_000, 9
    stats.tick(103.0)
    assert (stats.rate, stats.block_rate) == (1_000.0, 1.0)
    stats.tick(104.0)
    assert (stats.rate, stats.block_rate) == (0.0, 0.0)
