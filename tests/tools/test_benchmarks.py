"""Benchmarks that need no process run to their end; their speed is no matter of a test."""

from __future__ import annotations

import os

from benchmarks import core


def test_directory_and_store_are_measured() -> None:
    digests = [os.urandom(32) for _ in range(2000)]
    rows = [core.announced(digests), *core.matched(digests), *core.stored(digests)]
    rows += [core.directory_memory(1000), core.store_memory(1000)]
    assert all(row.what and row.measured for row in rows)
