"""`docs/api/messages.md` lists every message, `docs/wire.md` says how they are used."""

from __future__ import annotations

import enum
import re
from pathlib import Path

import msgspec
import pytest

from kvpool.types import (
    ClientUsage,
    Consumer,
    Member,
    MoveStatus,
    ReadStatus,
    ServerStats,
    TierUsage,
    WriteStatus,
)
from kvpool.wire import frames
from tests.support import messages
from tests.wire import tables
from tests.wire.samples import CLIENT, CONSUMER, KEYS, MEMBER, STATS, USAGE

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "wire.md").read_text()
MEMBERS: dict[type[msgspec.Struct], msgspec.Struct] = {
    messages.BlockChanges: messages.BlockChanges(**KEYS, part=0, tier=0, status=0),
    Member: MEMBER,
    ClientUsage: CLIENT,
    Consumer: CONSUMER,
    ServerStats: STATS,
    TierUsage: USAGE,
}


def test_the_list_of_messages_is_that_of_the_code() -> None:
    """Else: `python -m tests.wire.tables > docs/api/messages.md`."""
    assert (DOCS / "api" / "messages.md").read_text() == tables.page()


def test_every_message_and_every_struct_in_one_is_listed_with_its_fields() -> None:
    page = tables.page()
    assert "| 10 | `Data` | statuses, sizes, checksums; offsets |\n" in page
    assert "| 6 | (payload) | no body; " in page
    assert "| `ClientUsage` | name, transport; connections, " in page
    for kind in (*messages.TYPES, *tables.NESTED):
        assert page.count(f"| `{kind.__name__}` |") == 1


#: A status travels as this byte, in messages between processes of different versions.
STATUSES = {
    ReadStatus: "hit never_written evicted removed server_lost corrupt deadline being_written "
    "part_missing no_master refused buffer_too_small not_yet tier_lost",
    WriteStatus: "stored already_stored in_progress no_space reserved deadline server_lost "
    "no_master too_large bypassed not_yet",
    MoveStatus: "done here in_progress not_yet refused no_room gone corrupt lost",
}


@pytest.mark.parametrize("kind", STATUSES, ids=lambda kind: kind.__name__)
def test_numbers_of_statuses_are_for_ever(kind: type[enum.IntEnum]) -> None:
    names = STATUSES[kind].split()
    assert [status.name.lower() for status in kind][: len(names)] == names
    assert list(kind.__members__.values()) == list(range(len(kind.__members__)))


@pytest.mark.parametrize("kind", MEMBERS, ids=lambda kind: kind.__name__)
def test_figures_that_are_left_out_are_zero(kind: type[msgspec.Struct]) -> None:
    """Of a client at least one connection is there."""
    for field in msgspec.structs.fields(kind):
        with pytest.raises(AttributeError):
            setattr(MEMBERS[kind], field.name, None)
        if not field.required and field.default_factory is msgspec.NODEFAULT:
            assert field.default == (1 if field.name == "connections" else type(field.default)())
        elif not field.required:
            assert not field.default_factory()


def test_the_version_and_the_limits_are_those_of_the_code() -> None:
    assert f"Protocol version: {frames.PROTOCOL_VERSION}." in TEXT
    assert f"{frames.HEADER_SIZE} bytes" in TEXT
    assert f"at most {frames.BODY_SIZE_MAX >> 20} MiB" in TEXT
    assert f"{messages.DIGESTS_MAX:,} digests" in TEXT
    assert f"{messages.QUESTION_KEYS_MAX:,} keys in a question" in TEXT


def test_the_exchanges_name_no_message_that_is_none() -> None:
    """In the two blocks of exchanges every capitalised word is a message."""
    names = {kind.__name__ for kind in messages.TYPES}
    exchanges = "".join(re.findall(r"```\n(.*?)```", TEXT, re.DOTALL))
    words = set(re.findall(r"\b[A-Z][a-z]+(?:[A-Z][a-z]+)*\b", exchanges))
    assert words - names == set()
