"""Planted bugs of what policies infer, for the worlds in `guesses.py`: each is found in 40 seeds.

As in `planted.py`: `before` occurs once in its module, and is a mistake that people make.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.simulation.planted import Bug, read

BUGS: Sequence[Bug] = read(
    r"""
@@ a-guess-beats-a-hint  G9  kvpool.server.eviction.session_hints  seed 1
-if found is not None and not over and _infers(self.policy):
+if False:
@@ what-returns-has-still-ended  G9  kvpool.server.eviction.session_announcements  seed 5
-        session.ended = 0  # the last word counts
-        self.ended.pop(session, None)
-        self.expiries
+        self.expiries
@@ what-has-ended-waits-for-its-turn  G9  kvpool.server.eviction.session_hints
-            useless = self.next_useless(evictable)
+            useless = self.next_useless(evictable) if self.branches.superseded else None
@@ what-is-shared-stays  G9  kvpool.server.eviction.programs  seed 1
-numbers = range(_CLASSES) if number
+numbers = range(_SHARED) if number
@@ what-is-expected-keeps-all-out  G9  kvpool.server.eviction.programs
-            if age_s < _BYPASS_S_MAX:
+            if True:
@@ what-is-dense-keeps-all-out  G9  kvpool.server.eviction.density
-            if is_short and age_s < _BYPASS_S_MAX:  # else
+            if is_short:  # else
@@ what-was-learned-stays  G9  kvpool.server.eviction.density
-        self._ended = [count * self.KEPT for count in self._ended]
+        pass
@@ who-forks-is-remembered-for-ever  G9  kvpool.server.eviction.programs  seed 1
-for _ in range(min(over, _FORGOTTEN_MAX)):
+for _ in range(min(over, 0)):
@@ ghosts-are-never-laid  G9  kvpool.server.eviction.density
-        while len(self._ghosts) > max(_GHOSTS_MIN, _GHOSTS * self._sampled):
-            self._ghosts.popitem(last=False)
@@ what-has-left-is-shown-as-dead  G9  kvpool.server.eviction.held_programs  seed 1
-        self.blocks[program.number] -= 1
+        pass
"""
)
