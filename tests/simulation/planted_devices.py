"""Planted bugs of direct transfers and of HBM tiers, for the worlds in `devices.py` and
`device_tiers.py`: each is found in 40 seeds.

As in `planted.py`: `before` occurs once in its module, and is a mistake that people make.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.simulation.planted import Bug, read

DEVICE_BUGS: Sequence[Bug] = read(
    r"""
@@ hashed-before-the-copy-has-ended  G1  kvpool.client.device_writes
-            await wait_for_stream(blocks.values(), deadline)
@@ received-before-the-owners-work-has-ended  G1  kvpool.client.device_direct
-            await wait_for_stream(blocks.values(), deadline)
+            pass
@@ another-stream-is-waited-for  G1  kvpool.device.thread
-        with self._inference_mode(), self.on_stream():
-            try:
-                queued = queue()
-            finally:  # whatever was queued before an error runs, too
-                self._event.record()
-                self._event.synchronize()
-            return finish(queued)
+        try:
+            with self._inference_mode(), self.on_stream():
+                queued = queue()
+        finally:  # whatever was queued before an error runs, too
+            self._event.record()
+            self._event.synchronize()
+        with self._inference_mode(), self.on_stream():
+            return finish(queued)
@@ scratch-memory-of-two-rounds  G1  kvpool.client.device_arena
-start = other + taken
+start = other + taken // 2
# The scratch memory is this round's until no transfer uses it any more.
@@ given-back-before-the-bytes-have-left  G1  kvpool.client.device_writes
-                    # The scratch memory is this round's until no transfer uses it any more.
-                    written = await write_blocks(ready)
-                    done.update(zip(one.numbers, written, strict=True))
+                written = await write_blocks(ready)
+                done.update(zip(one.numbers, written, strict=True))
@@ pieces-swapped  G1  kvpool.client.device_writes
-for pair in beside(blocks[number].rows, places[number])
+for pair in beside(blocks[number].rows[::-1], places[number])
@@ scattered-from-the-start-of-the-block  G1  kvpool.device.lane
-        start += size
@@ what-has-arrived-is-trusted  G1  kvpool.client.device_direct
-if checksum != arrivals[position].checksum:
+if checksum < 0:
@@ a-cancelled-call-leaves-its-kernels  G1  kvpool.device_copy
-            cancelled = True
-            give_up()
+            give_up()
+            raise
@@ sent-when-the-pins-are-gone  G4  kvpool_transports.streams.server
-            await self._send_payload(pins, connection)
-            self._unpin_previous(connection)
+            self._unpin_previous(connection)
+            await self._send_payload(pins, connection)
@@ pins-on-a-device-outlive-their-connection  G4  kvpool.server.state.tiered_store
-            self.stores[tier].drop_owner(owner)
+            pass
@@ sent-from-the-other-memory  G4  kvpool_transports.ucx
-            if pin.tier is None:
+            if pin.tier != 0:
@@ a-copy-on-a-device-is-looked-at-elsewhere  G1  kvpool.server.tier_bytes
-read_into(extent.offset + start, part)
+read_into(start, part)
"""
)
