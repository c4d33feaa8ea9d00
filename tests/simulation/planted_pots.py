"""Planted bugs of what many share, for the worlds in `pots.py`: each is found in 40 seeds.

As in `planted.py`: `before` occurs once in its module, and is a mistake that people make.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.simulation.planted import Bug, read

BUGS: Sequence[Bug] = read(
    r"""
@@ a-share-is-all-that-is-free  G12  kvpool.shares
-return max((free - held) // 2, int(not held and free > 0))
+return free
@@ what-is-given-back-is-not-free  G10  kvpool.shares
-        self.used -= units
-        self._held[name] -= units
+        self._held[name] -= units
@@ the-oldest-of-all-leaves  G12  kvpool.shares
-self.pop(*next(iter(groups[self._largest])))
+self.pop(*next(iter(self._entries)))
@@ who-had-most-once-loses-all  G12  kvpool.tombstones
-if len(largest) * len(self._lines) <= self.limit:
+if not largest:
@@ reasons-of-all-are-one-line  G12  kvpool.tombstones
-tenant = tenant_of(name)
+tenant = ""
@@ one-peer-has-all-turns  G10  kvpool.server.moves.turns
-self._shares.room(peer)
+self._shares.room("")
@@ one-tenant-has-all-turns  G12  kvpool.server.moves.turns  seed 2
-self._tenants.room(tenant)
+self._tenants.room("")
@@ a-turn-stays-the-tenants  G12  kvpool.server.moves.turns
-        self._tenants.give_back(tenant)
+        pass
@@ a-turn-given-up-is-kept  G10  kvpool.server.moves.turns
-            if self._waiting.pop(turn, None) is None:  # it had come in the same moment
+            if turn.cancelled() and self._waiting.pop(turn, None) is None:
@@ a-slow-peer-counts-by-its-time  G10  kvpool.server.moves.state.fetches
-self._speeds = self._speeds * _MEMORY + moved * (moved / seconds)
+self._speeds = min(self._speeds or 1e99, moved * (moved / seconds))
@@ a-caller-is-no-place  G12  kvpool.net.control_listener
-        while not self._shares.take(holder):
+        while not self._shares.room(holder):
@@ a-caller-that-left-keeps-its-place  G10  kvpool.net.control_listener
-            self._shares.give_back(holder)
@@ a-caller-that-left-holds-its-bytes  G10  kvpool.net.control_listener
-            self.holds(end, held, 0)
+            pass
@@ one-caller-may-hold-everything  G12  kvpool.net.control_listener
-elif not self._held.take(holder, now - before):
+elif not self._held.take("", now - before):
@@ every-host-is-the-pool  G10  kvpool.net.control_listener
-self._admit(end, tenant or host)
+self._admit(end, tenant)
@@ claims-of-others-are-believed  G12  kvpool.master.state.server_record  seed 9
-return own + min(max(0.0, self._total * self._unit - own), others_max)
+return own + max(0.0, self._total * self._unit - own)
@@ hints-are-overwritten-unread  G12  kvpool.master.state.hint_log
-if not self._fresh.take(tenant, _cost(subject)):
+if not self._fresh.take("", _cost(subject)):
@@ names-are-for-the-first  G12  kvpool.server.consumers
-self._names[kind].take(tenant_of(name))
+self._names[kind].take("")
@@ one-sample-of-what-all-ask-for  G12  kvpool.master.state.demand
-sample = self._samples.get(tenant)
+sample = self._samples.get(tenant := "")
"""
)
