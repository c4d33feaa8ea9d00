"""A valid instance of each message: what the tests and the fuzzers start from."""

from __future__ import annotations

from typing import Any, Final

from kvpool.types import ClientUsage, Consumer, Member, ServerStats, TierUsage
from tests.support import messages

DIGESTS: Final = bytes(range(32)) + bytes(range(32, 64))
TOKEN: Final = bytes(range(16))
KEYS: Final[dict[str, Any]] = {"namespace": "n", "parts": 1, "digest_size": 32, "digests": DIGESTS}
WRITE: Final = {**KEYS, "part": 0, "parents": bytes(64), "sizes": [1, 2], "wait_s": 0.5}
USAGE: Final = TierUsage("dram", "", False, 1, 2, 3, 4, 5, 0.5, 6.0, 7, 0.5, 8.0, 9, 10, 11, 12.0)
CLIENT: Final = ClientUsage("engine", "shm", 1, 2, 0.5, 3)
CONSUMER: Final = Consumer("tenant", "acme", {"dram": 1}, 2, 3, 4, {"b": 5})
STATS: Final = ServerStats(2, 3, 4, 5, 6, 0.5, {"a": 1}, [USAGE], 7, 0.5, 8, [CLIENT])
MEMBER: Final = Member("s", 1, "h", ("tcp://x:1",), ("dram",), True, 0.5, 9, STATS)
SAMPLES: Final[list[messages.Message]] = [
    messages.Error("BadMessage", "why"),
    messages.Hello("default", "client"),
    messages.Hello("default", "client", bytes(32)),
    messages.Hello("default", "client", bytes(32), False, "acme", bytes(8)),
    messages.Challenge(bytes(32), bytes(32)),
    messages.Proof(bytes(32)),
    messages.Welcome("server", 1 << 30),
    messages.Reserve(**WRITE),
    messages.Reserve(**WRITE, session="a", resume_s=2.5),
    messages.Reserved(b"\x04\x01", [7], [4096]),
    messages.Seal([7], [2**64 - 1], True, 1.0),
    messages.StatusReply(b"\x00"),
    messages.Reserve(**WRITE, checksums=[0, 2**64 - 1], visible=True),
    messages.Reserve(**WRITE, checksums=[7, 8], session="agent 7", resume_s=2.5, copies=2),
    messages.Read(**KEYS, part=0, buffer_sizes=[1, 2]),
    messages.Read(**KEYS, part=0, buffer_sizes=[1, 2], view=True),
    messages.Data(b"\x00", [10], [20]),
    messages.Data(b"\x00", [10], [20], [4096]),
    messages.Unpin(),
    messages.Unpin(confirm=True),
    messages.Remove(**KEYS),
    messages.Remove(**KEYS, part=0, checksums=[1, 2**64 - 1]),
    messages.Remove(**KEYS, part=0, corrupt=True),
    messages.Propose(**KEYS, part=0, receiver="s"),
    messages.Proposed(b"\x00\x02", [10], [20], bytes(32), [0.5], b"\x03"),
    messages.Proposed(
        b"\x00\x00", [1, 1], [2, 2], bytes(64), [0.5, 1.0], b"\x01\x00", [(2, "a", 2.5)]
    ),
    messages.Fetch(**KEYS, part=0, source="s", wait_s=0.5),
    messages.Fetch(**KEYS, part=0, source="s", wait_s=0.5, extra=True),
    messages.Prefetch(**KEYS, part=0),
    messages.SendToken(b"8 bytes."),
    messages.Namespaces("@acme/llama", 2),
    messages.HoldingsReply((9, 7, 0, 0, 0), [("n", 1, 3, 4096)], True),
    messages.RemoveAll("n", 1, (9, 7, 1, 2, 3)),
    messages.RemovedAll(3, 4096, (9, 7, 1, 2, 4)),
    messages.RemovedAll(3, 4096, None),
    messages.Drain(),
    messages.Drain(begin=True, within_s=60.0, back_in_s=5.0),
    messages.Drained(None, 0, 0, 0, 0, 0, []),
    messages.Drained(3, 10, 2, 200, 8, 800, [("n", "no room", 2, 200)]),
    messages.Register("s", 1, TOKEN, "h", ["tcp://x:1"], ["dram"], 1 << 30),
    messages.Register("s", 1, TOKEN, "h", [], ["dram"], 1 << 30, 7, True, 9),
    messages.Registered(True, "m"),
    messages.Registered(False, "m", problem="taken", heard_s=1.5, lasting=True),
    messages.Heartbeat("s", 1, TOKEN, ServerStats(2, 3, 4, 5, 6, 0.5, {"a": 1})),
    messages.Registered(True, "m", 7, 8),
    messages.Heartbeat("s", 1, TOKEN, STATS, 8, 9),
    messages.HeartbeatReply(True),
    messages.HeartbeatReply(True, others_have_room=True),
    messages.HeartbeatReply(True, [("a", 0.5, 2.5), ("b", 0.0, None)], 9),
    messages.Leave("s", 1, TOKEN),
    messages.Announce("s", 1, TOKEN, 2, [messages.BlockChanges(**KEYS, part=0, tier=0, status=0)]),
    messages.Inventory("s", 1, TOKEN, 2, 0, True, []),
    messages.Announced(True),
    messages.Announced(True, 3, "full", True),
    messages.Find(**KEYS, prefix=True),
    messages.FindReply([(0, 1, [("s", "dram", 0)])], b"\x01"),
    messages.Place(**KEYS, parent=b"", size=10, host="h", copies=1),
    messages.PlaceReply(["s"], b"\x00"),
    messages.Members(),
    messages.MembersReply("m", 1.0, 2, [], False),
    messages.MembersReply("m", 1.0, 2, [MEMBER], True),
    messages.Explain(**KEYS),
    messages.Hint("a", 2.5),
    messages.Hint("a", None),
    messages.Heartbeat("s", 1, TOKEN, STATS, 8, 9, hint_answers=[("chat", False)]),
    messages.ExplainSession("chat"),
    messages.SessionExplained([(0.5, 2.5), (0.1, None)], [("s", True, 1.5)]),
    messages.Explained([(0, "text", [])]),
    messages.Namespaces(),
    messages.NamespacesReply([("n", 1, 5)], False),
    messages.Find(**KEYS, prefix=True, session="chat"),
    messages.Find(**KEYS, prefix=False, observes=True),
    messages.Find(**KEYS, prefix=True, before=bytes(8), behind=bytes(16)),
    messages.Changes(7, 3),
    messages.ChangesReply(
        7, 4, [messages.MapChange(0, "s", "n", 1, 0, "dram", 16, bytes(16))], True, False
    ),
    messages.Snapshot("n", 1, 2),
    messages.ChangesReply(7, 4, [messages.MapChange(4, "s", host="here")], True, False, "n", 1, 3),
    messages.Demands(),
    messages.DemandsReply(60.0, [("n", 1, 1 << 40, 5)], 1.5, 0.25),
]
