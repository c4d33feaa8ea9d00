"""Planted bugs of what many share, for the worlds in `pots.py`: each is found in 40 seeds.

As in `planted.py`: `before` occurs once in its module, and is a mistake that people make.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.simulation.planted import Bug

_SHARES = "kvpool.shares"
_TURNS = "kvpool.server.moves.turns"
_TOMBSTONES = "kvpool.tombstones"
_FETCHES = "kvpool.server.moves.state.fetches"
_CONTROL_LISTENER = "kvpool.net.control_listener"
_RECORD = "kvpool.master.state.server_record"
_HINTS = "kvpool.master.state.hint_log"
_DEMAND = "kvpool.master.state.demand"
_CONSUMERS = "kvpool.server.consumers"
#: Nobody waits without a bound, whatever another one does.
_TIME = "G10"
_TENANTS = "G12"

BUGS: Sequence[Bug] = (
    Bug(
        "a-share-is-all-that-is-free",
        _TENANTS,
        _SHARES,
        "return max((free - held) // 2, int(not held and free > 0))",
        "return free",
    ),
    Bug(
        "what-is-given-back-is-not-free",
        _TIME,
        _SHARES,
        """\
        self.used -= units
        self._held[name] -= units""",
        """\
        self._held[name] -= units""",
    ),
    Bug(
        "the-oldest-of-all-leaves",
        _TENANTS,
        _SHARES,
        "self.pop(*next(iter(groups[self._largest])))",
        "self.pop(*next(iter(self._entries)))",
    ),
    Bug(
        "who-had-most-once-loses-all",
        _TENANTS,
        _TOMBSTONES,
        "if len(largest) * len(self._lines) <= self.limit:",
        "if not largest:",
    ),
    Bug(
        "reasons-of-all-are-one-line",
        _TENANTS,
        _TOMBSTONES,
        "tenant = tenant_of(name)",
        'tenant = ""',
    ),
    Bug(
        "one-peer-has-all-turns",
        _TIME,
        _TURNS,
        "if self._shares.room(peer):",
        'if self._shares.room(""):',
    ),
    Bug(
        "a-turn-given-up-is-kept",
        _TIME,
        _TURNS,
        "            if self._waiting.pop(turn, None) is None:  # it had come in the same moment",
        "            if turn.cancelled() and self._waiting.pop(turn, None) is None:",
    ),
    Bug(
        "a-slow-peer-counts-by-its-time",
        _TIME,
        _FETCHES,
        "self._speeds = self._speeds * _MEMORY + moved * (moved / seconds)",
        "self._speeds = min(self._speeds or 1e99, moved * (moved / seconds))",
    ),
    Bug(
        "a-caller-is-no-place",
        _TENANTS,
        _CONTROL_LISTENER,
        "        while not self._shares.take(holder):\n",
        "        while not self._shares.room(holder):\n",
    ),
    Bug(
        "a-caller-that-left-keeps-its-place",
        _TIME,
        _CONTROL_LISTENER,
        "            self._shares.give_back(holder)\n",
        "",
    ),
    Bug(
        "a-caller-that-left-holds-its-bytes",
        _TIME,
        _CONTROL_LISTENER,
        "            self.holds(end, held, 0)\n",
        "            pass\n",
    ),
    Bug(
        "one-caller-may-hold-everything",
        _TENANTS,
        _CONTROL_LISTENER,
        "elif not self._held.take(holder, now - before):",
        'elif not self._held.take("", now - before):',
    ),
    Bug(
        "every-host-is-the-pool",
        _TIME,
        _CONTROL_LISTENER,
        "self._admit(end, tenant or host)",
        "self._admit(end, tenant)",
    ),
    Bug(
        "claims-of-others-are-believed",
        _TENANTS,
        _RECORD,
        "return own + min(max(0.0, self._total * self._unit - own), others_max)",
        "return own + max(0.0, self._total * self._unit - own)",
    ),
    Bug(
        "hints-are-overwritten-unread",
        _TENANTS,
        _HINTS,
        "if not self._fresh.take(tenant):",
        'if not self._fresh.take(""):',
    ),
    Bug(
        "names-are-for-the-first",
        _TENANTS,
        _CONSUMERS,
        "self._names[kind].take(tenant_of(name))",
        'self._names[kind].take("")',
    ),
    Bug(
        "one-sample-of-what-all-ask-for",
        _TENANTS,
        _DEMAND,
        "sample = self._samples.get(tenant)",
        'sample = self._samples.get(tenant := "")',
    ),
)
