"""Planted bugs of what leaves the pool, for the worlds in `streams.py`: each is found in 40 seeds.

As in `planted.py`: `before` occurs once in its module, and is a mistake that people make.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.simulation.planted import Bug, read

BUGS: Sequence[Bug] = read(
    r"""
# --- events
@@ lost-removal  G10  kvpool.ops.pool_stream  seed 3
-case PoolEventKind.STORED | PoolEventKind.REMOVED:
+case PoolEventKind.STORED:
@@ removed-from-all-tiers-but-one  G10  kvpool.ops.pool_stream  seed 1
-            if was != now and not copies.lost:
+            if was is None and not copies.lost:
@@ blocks-of-a-lost-server  G10  kvpool.ops.pool_stream  seed 2
-            if was != now and not copies.lost:
+            if was != now:
@@ snapshot-older-than-an-event-before-it  G10  kvpool.master.follower_requests  seed 13
-last, listed = self.log.last, [
+last, listed = self.log.last + 1, [
@@ part-of-a-snapshot-with-a-later-number  G10  kvpool.net.event_publisher  seed 1
-reader.held = (_NUMBER.pack(self.buffer.next - 1), encode_batch(batch))
+reader.held = (_NUMBER.pack(self.buffer.next), encode_batch(batch))
@@ gap-in-the-masters-log  G10  kvpool.master.state.change_ring  seed 2
-if first < 0 or number > self.last:
+if number > self.last:
@@ replay-that-begins-too-late  G10  kvpool.net.event_subscriber  seed 3
-if self.next is not None and number != self.next:
+if self.next is not None and number < self.next:
@@ gap-is-not-noticed  G10  kvpool.net.event_subscriber  seed 1
-if self.next is None or number == self.next:
+if self.next is None or number >= self.next:
# --- promises
@@ promise-for-ever  G10  kvpool_connector.records.promises  seed 0
-left_s = limit_s - self.waited_s
+left_s = limit_s
@@ promise-of-a-producer-that-has-gone  G10  kvpool_connector.records.promises  seed 2
-left_s = min(left_s, silence_s - self._silent_s, whole_s - self.waited_s)
+left_s = min(left_s, whole_s - self.waited_s)
@@ silence-is-not-counted  G10  kvpool_connector.records.promises  seed 2
-        self._silent_s += seconds
@@ promise-of-a-request-that-has-ended  G10  kvpool_connector.plan.planner  seed 0
-        _give_up_promise(request)
-        self.lookups.prefetches.drop(request_id)
+        self.lookups.prefetches.drop(request_id)
@@ load-of-a-request-that-has-ended  G10  kvpool_connector.plan.planner  seed 0
-        self._end_load(request)
-        self.saves.queue.expedite(
+        self.saves.queue.expedite(
# --- loads over several ways
@@ what-waits-goes-to-the-frozen-way  G6  kvpool.client.ways  seed 1
-                candidates[position].sort(key=self._is_good)
+                candidates[position].sort(key=self._is_good, reverse=True)
@@ a-frozen-way-is-as-good-as-it-was  G6  kvpool.client.ways  seed 12
-        return server not in self._fruitless and server not in self.unresponsive
+        return True
@@ a-slow-way-is-never-left  G6  kvpool.client.ways  seed 1
-        return passed >= self.hedge_s and alone * speed >= piece.size * _LEAVE_AFTER
+        return False
# --- blocks of another codec
@@ a-version-is-no-part-of-the-name  G1  kvpool_codecs.codec  seed 0
-    exact = f"{codec.name}/{codec.version}"
+    exact = codec.name
@@ whatever-was-lost-is-one-codec  G1  kvpool_codecs.codec  seed 1
-    return f"{exact}/{codec.tolerance:g}" if codec.tolerance else exact
+    return exact
@@ another-codecs-tail-is-opened  G1  kvpool_codecs.coded_tail  seed 0
-    if found_codec != codec:
+    if len(found_codec) != len(codec):
@@ the-name-says-no-codec  G1  kvpool_connector.form_choice  seed 1
-    return {"codec": full_name(codec_of(codec))}
+    return {}
"""
)
