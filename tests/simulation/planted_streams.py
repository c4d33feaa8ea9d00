"""Planted bugs of what leaves the pool, for the worlds in `streams.py`: each is found in 40 seeds.

As in `planted.py`: `before` occurs once in its module, and is a mistake that people make.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.simulation.planted import Bug

_STREAM = "kvpool.ops.pool_stream"
_PUBLISHER = "kvpool.net.event_publisher"
_SUBSCRIBER = "kvpool.net.event_subscriber"
_RING = "kvpool.master.state.change_ring"
_FOLLOWERS = "kvpool.master.follower_requests"
_PROMISES = "kvpool_connector.records.promises"
_PLANNER = "kvpool_connector.plan.planner"
#: Events and promises are hints: what is wrong about them costs time, and is bounded.
_TIME = "G10"

BUGS: Sequence[Bug] = (
    # --- events
    Bug(
        "lost-removal",
        _TIME,
        _STREAM,
        "case PoolEventKind.STORED | PoolEventKind.REMOVED:",
        "case PoolEventKind.STORED:",
    ),
    Bug(
        "removed-from-all-tiers-but-one",
        _TIME,
        _STREAM,
        "            if was != now and not copies.lost:",
        "            if was is None and not copies.lost:",
    ),
    Bug(
        "blocks-of-a-lost-server",
        _TIME,
        _STREAM,
        "            if was != now and not copies.lost:",
        "            if was != now:",
    ),
    Bug(
        "snapshot-older-than-an-event-before-it",
        _TIME,
        _FOLLOWERS,
        """\
            self._directory.changes.last,
            [_map_change(one) for one in changes],
            *(at or MapCursor()),""",
        """\
            self._directory.changes.last + 1,
            [_map_change(one) for one in changes],
            *(at or MapCursor()),""",
    ),
    Bug(
        "part-of-a-snapshot-with-a-later-number",
        _TIME,
        _PUBLISHER,
        "reader.held = (_NUMBER.pack(self.buffer.next - 1), encode_batch(batch))",
        "reader.held = (_NUMBER.pack(self.buffer.next), encode_batch(batch))",
    ),
    Bug(
        "gap-in-the-masters-log",
        _TIME,
        _RING,
        "if first < 0 or number > self.last:",
        "if number > self.last:",
    ),
    Bug(
        "replay-that-begins-too-late",
        _TIME,
        _SUBSCRIBER,
        "if self.next is not None and number != self.next:",
        "if self.next is not None and number < self.next:",
    ),
    Bug(
        "gap-is-not-noticed",
        _TIME,
        _SUBSCRIBER,
        "if self.next is None or number == self.next:",
        "if self.next is None or number >= self.next:",
    ),
    # --- promises
    Bug(
        "promise-for-ever",
        _TIME,
        _PROMISES,
        "left_s = limit_s - self.waited_s",
        "left_s = limit_s",
    ),
    Bug(
        "promise-of-a-producer-that-has-gone",
        _TIME,
        _PROMISES,
        "left_s = min(left_s, silence_s - self._silent_s, whole_s - self.waited_s)",
        "left_s = min(left_s, whole_s - self.waited_s)",
    ),
    Bug(
        "silence-is-not-counted",
        _TIME,
        _PROMISES,
        "        self._silent_s += seconds\n",
        "",
    ),
    Bug(
        "promise-of-a-request-that-has-ended",
        _TIME,
        _PLANNER,
        "        self.quiet.forget(request_id)\n        _give_up_promise(request)\n",
        "        self.quiet.forget(request_id)\n",
    ),
    Bug(
        "load-of-a-request-that-has-ended",
        _TIME,
        _PLANNER,
        "        self._end_load(request)\n        self.saves.queue.expedite(",
        "        self.saves.queue.expedite(",
    ),
)
