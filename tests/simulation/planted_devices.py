"""Planted bugs of direct transfers and of HBM tiers, for the worlds in `devices.py` and
`device_tiers.py`: each is found in 40 seeds.

As in `planted.py`: `before` occurs once in its module, and is a mistake that people make.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.simulation.planted import Bug

_DIRECT = "kvpool.client.device_direct"
_WRITES = "kvpool.client.device_writes"
_THREAD = "kvpool.device.thread"
_COPY = "kvpool.device_copy"
_TIERED = "kvpool.server.state.tiered_store"
_MOVER = "kvpool.server.tier_mover"
_SERVING = "kvpool_transports.streams.server"
_UCX = "kvpool_transports.ucx"

DEVICE_BUGS: Sequence[Bug] = (
    Bug(
        "hashed-before-the-copy-has-ended",
        "G1",
        _WRITES,
        "            await wait_for_stream(blocks.values(), deadline)\n",
        "",
    ),
    Bug(
        "received-before-the-owners-work-has-ended",
        "G1",
        _DIRECT,
        "            await wait_for_stream(blocks.values(), deadline)\n",
        "            pass\n",
    ),
    Bug(
        "another-stream-is-waited-for",
        "G1",
        _THREAD,
        """\
        with self._inference_mode(), self.on_stream():
            try:
                queued = queue()
            finally:  # whatever was queued before an error runs, too
                self._event.record()
                self._event.synchronize()
            return finish(queued)""",
        """\
        try:
            with self._inference_mode(), self.on_stream():
                queued = queue()
        finally:  # whatever was queued before an error runs, too
            self._event.record()
            self._event.synchronize()
        with self._inference_mode(), self.on_stream():
            return finish(queued)""",
    ),
    Bug(
        "scratch-memory-without-turns",
        "G1",
        _DIRECT,
        """\
        try:
            yield scratch.memory
        finally:
            scratch.turn.release()""",
        """\
        scratch.turn.release()
        yield scratch.memory""",
    ),
    Bug(
        "given-back-before-the-bytes-have-left",
        "G1",
        _WRITES,
        """\
                    # The scratch memory is this round's until no transfer uses it any more.
                    written = await write_blocks(ready)
                    done.update(zip(one.numbers, written, strict=True))""",
        """\
                written = await write_blocks(ready)
                done.update(zip(one.numbers, written, strict=True))""",
    ),
    Bug(
        "pieces-swapped",
        "G1",
        _WRITES,
        "sources = [row for number in one.in_rows for row in blocks[number].rows]",
        "sources = [row for number in one.in_rows for row in blocks[number].rows[::-1]]",
    ),
    Bug(
        "scattered-from-the-start-of-the-block",
        "G1",
        _DIRECT,
        "                    taken += len(row)\n",
        "",
    ),
    Bug(
        "what-has-arrived-is-trusted",
        "G1",
        _DIRECT,
        "if checksum != arrivals[position].checksum:",
        "if checksum < 0:",
    ),
    Bug(
        "a-cancelled-call-leaves-its-kernels",
        "G1",
        _COPY,
        """\
            cancelled = True
            give_up()""",
        """\
            give_up()
            raise""",
    ),
    Bug(
        "sent-when-the-pins-are-gone",
        "G4",
        _SERVING,
        """\
            await self._send_payload(pins, connection)
            self._unpin_previous(connection)""",
        """\
            self._unpin_previous(connection)
            await self._send_payload(pins, connection)""",
    ),
    Bug(
        "pins-on-a-device-outlive-their-connection",
        "G4",
        _TIERED,
        "            self.stores[tier].drop_owner(owner)\n",
        "            pass\n",
    ),
    Bug(
        "sent-from-the-other-memory",
        "G4",
        _UCX,
        "            if pin.tier is None:\n",
        "            if pin.tier != 0:\n",
    ),
    Bug(
        "a-copy-on-a-device-is-looked-at-elsewhere",
        "G1",
        _MOVER,
        "read_into(extent.offset + start, part)",
        "read_into(start, part)",
    ),
)
