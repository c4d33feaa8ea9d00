"""Two releases side by side: each message as the release before reads it.

(design: protocol-versions)
"""

from __future__ import annotations

import msgspec
import pytest

from kvpool.errors import VersionMismatch
from kvpool.wire import messages
from kvpool.wire.frames import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN
from kvpool.wire.versions import SpokenVersion
from tests.wire import protocol_3
from tests.wire.samples import SAMPLES

OLD = 3
OLD_BY_NUMBER = {number: kind for kind, number in protocol_3.TYPES.items()}


def test_the_release_before_is_protocol_3() -> None:
    assert (PROTOCOL_VERSION_MIN, PROTOCOL_VERSION) == (OLD, OLD + 1)


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_the_release_before_reads_what_it_is_sent(message: messages.Message) -> None:
    if type(message) in messages.NEW_MESSAGES:
        with pytest.raises(VersionMismatch, match=f"{type(message).__name__} needs protocol 4"):
            messages.encode(message, OLD)
        return
    number, body = messages.encode(message, OLD)
    kind = OLD_BY_NUMBER[number]
    assert kind.__name__ == type(message).__name__
    old = msgspec.msgpack.decode(body, type=kind)
    now = messages.encode(message)
    assert messages.translate(*now, OLD) == body
    assert messages.translate(*now, PROTOCOL_VERSION) == now[1]
    # And the way back: what it sends has the same meaning here.
    again = messages.decode(type(message), number, msgspec.msgpack.encode(old))
    assert messages.encode(again, OLD) == (number, body)


def test_new_fields_have_defaults_and_are_new() -> None:
    """Else a message of the release before could not be read, or nobody could leave them out."""
    old_structs = vars(protocol_3)
    for kind, names in messages.NEW_FIELDS.items():
        fields = {field.name: field for field in msgspec.structs.fields(kind)}
        for name in names:
            assert not fields[name].required, (kind, name)
            assert name not in old_structs[kind.__name__].__struct_fields__
        assert kind.__struct_config__.omit_defaults, kind
    known = {kind.__name__ for kind in protocol_3.TYPES}
    assert {kind.__name__ for kind in messages.TYPES} - known == {
        kind.__name__ for kind in messages.NEW_MESSAGES
    }


def test_new_fields_are_left_out_at_any_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    new = {messages.ServerStats: frozenset({"reserved_bytes"}), messages.Unpin: {"confirm"}}
    monkeypatch.setattr(messages, "NEW_FIELDS", new)
    message = next(m for m in SAMPLES if isinstance(m, messages.MembersReply) and m.members)
    body = messages.encode(message, OLD)[1]
    (member,) = msgspec.msgpack.decode(body)["members"]
    (whole,) = msgspec.msgpack.decode(messages.encode(message)[1])["members"]
    assert whole["stats"].pop("reserved_bytes")
    assert member == whole
    assert messages.encode(messages.Unpin(confirm=True), OLD) == messages.encode(messages.Unpin())


def test_a_peer_of_the_release_before_is_asked_in_its_version_for_a_while() -> None:
    spoken = SpokenVersion()
    assert spoken.at(5.0) == PROTOCOL_VERSION
    assert not spoken.refused(PROTOCOL_VERSION, PROTOCOL_VERSION, 5.0)
    assert spoken.refused(PROTOCOL_VERSION, OLD, 5.0)
    assert not spoken.refused(OLD, OLD, 5.0)
    assert spoken.at(64.9) == OLD
    assert spoken.at(65.0) == PROTOCOL_VERSION  # it may have been upgraded
