"""What requests say about their conversation: which field counts, and what an envelope becomes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.client.checks import check_session
from kvpool_connector.hints.kv_hints import ACTIONS_MAX, RETAIN_S, read_envelope
from kvpool_connector.hints.request_params import Asked, parse_request
from kvpool_connector.records.values import RequestHints
from kvpool_engines.session_names import GIVEN_MAX, child_name, in_tenant, session_name

KEY = {"prompt_cache_key": "key"}
CONTEXT = {"agentic_context": json.dumps({"session_id": "agent", "kv_retention_ttl_seconds": 60})}


def envelope(*actions: tuple[str, Any], version: str = "0.1") -> dict[str, Any]:
    return {
        "protocol_version": version,
        "message_id": "m",
        "actions": [
            {"action_id": str(n), "action_type": name, "action_version": "1.0", "payload": payload}
            for n, (name, payload) in enumerate(actions)
        ],
    }


@pytest.mark.parametrize(
    ("asked", "session"),
    [
        (Asked({"kvpool": {"session_id": "own"}, "session_id": "flat"}, "engine", KEY), "own"),
        (Asked({"kvpool": {}, "session_id": "flat"}, "engine", KEY), "flat"),
        (Asked({}, "engine", {**KEY, "session_id": "argument"}), "engine"),
        (Asked({}, None, {**KEY, "session_id": "argument"}), "argument"),
        (Asked(None, "", {**KEY, **CONTEXT}), "key"),
        (Asked(None, None, CONTEXT), "agent"),
        (Asked(None, None, {"agentic_context": {"session_id": "object"}}), "object"),
        (Asked(None, None, {"agentic_context": "{" * 9}), ""),
        (Asked(None, None, {"agentic_context": "[" * 16_384}), ""),
        (Asked(None, None, {"agentic_context": json.dumps({"session_id": "x" * 16_384})}), ""),
        (Asked(None, None, {"prompt_cache_key": 7}), ""),
        (Asked(None, None, "nonsense"), ""),
        (Asked({"kvpool": {"session_id": 7}}, "engine"), "engine"),
        (Asked("nonsense", "engine"), "engine"),
        (Asked([1]), ""),
        (Asked(None, "a" * 16_385), ""),
    ],
)
def test_the_first_field_that_names_a_session_counts(asked: Asked, session: str) -> None:
    assert parse_request(asked).hints.session == session


@pytest.mark.parametrize(
    ("given", "hints", "wrong"),
    [
        ({"session_id": "s", "resume_in_s": 0}, RequestHints("s", 0), ""),
        ({"session_id": "s", "resume_in_s": 0.5}, RequestHints("s", 0.5), ""),
        ({"session_id": "s", "resume_in_s": 1e9}, RequestHints("s", 1e9), ""),
        ({"session_id": "s", "resume_in_s": 1e9 + 1}, RequestHints("s"), "resume_in_s"),
        ({"session_id": "s", "resume_in_s": -0.1}, RequestHints("s"), "resume_in_s"),
        ({"session_id": "s", "resume_in_s": float("nan")}, RequestHints("s"), "resume_in_s"),
        ({"session_id": "s" * 128}, RequestHints("s" * 128), ""),
        (
            {"session_id": "s" * 16_385, "resume_in_s": True},
            RequestHints(),
            "session_id, resume_in_s",
        ),
        ({"resume_in_s": 3}, RequestHints(), ""),  # of no session
        ({"session_id": "s", "end_session": True}, RequestHints("s", None, True), ""),
        ({"session_id": "s", "end_session": None}, RequestHints("s"), ""),
        ({"session_id": "s", "end_session": "yes"}, RequestHints("s"), "end_session"),
        ({"session_id": 7, "end_session": 1}, RequestHints(), "session_id, end_session"),
    ],
)
def test_values_that_make_no_sense_are_left_out(
    given: dict[str, Any], hints: RequestHints, wrong: str
) -> None:
    found, mistakes, _ = parse_request(Asked(given))
    assert found == hints
    assert ", ".join(one.partition(" is ")[0] for one in mistakes) == wrong
    assert all(len(one) < 150 for one in mistakes)


def test_own_keys_may_be_apart_from_those_of_other_connectors() -> None:
    own = {"session_id": "s", "resume_in_s": 3, "skip_save": True, "max_load_tokens": 64}
    hints, mistakes, _ = parse_request(Asked({"do_remote_decode": True, "kvpool": own}))
    assert (hints.session, hints.resume_in_s, hints.skip_save) == ("s", 3, True)
    assert (hints.max_load_tokens, mistakes) == (64, [])
    hints, mistakes, _ = parse_request(Asked({"kvpool": 7, "skip_load": True}))
    assert hints.skip_load
    assert mistakes == ["kvpool is 7, expected an object"]
    _, (mistake,), _ = parse_request(Asked({"kvpool": {"sesion_id": "s"}}))
    assert "did you mean 'session_id'?" in mistake


@pytest.mark.parametrize("given", ["a" * 129, "a" * GIVEN_MAX, "new\nline", "\ud800", "\0"])
def test_a_name_that_the_pool_cannot_take_becomes_a_hash(given: str) -> None:
    name = session_name(given)
    check_session(name)
    assert name == session_name(given)
    assert name != session_name(given + "x")
    assert parse_request(Asked({"session_id": given})).hints.session == name


@pytest.mark.parametrize("given", ["", None, 7, b"bytes", "a" * (GIVEN_MAX + 1), "a" * 10_000_000])
def test_what_is_no_name_is_none(given: object) -> None:
    assert session_name(given) == ""


def test_a_name_stays_as_it_is_up_to_the_pools_limit() -> None:
    assert session_name("a" * 128) == "a" * 128
    assert child_name("session", "agent") == "session/agent"
    check_session(child_name("s" * 128, "agent"))
    assert child_name("s" * 128, "one") != child_name("s" * 128, "two")


def test_sessions_of_two_tenants_are_two_whatever_clients_call_them() -> None:
    given = ["s", "s" * 128, "blue/s", "a/b", "tenant=blue/s", "tenant=blue/" + "s" * 128, "é"]
    tenants = ["default", "blue", "blue/s", "a", "a/b", "a%2Fb", "t" * 500, "\n"]
    names = [in_tenant(tenant, session_name(one)) for tenant in tenants for one in given]
    for name in names:
        check_session(name)
    assert len(set(names)) == len(names)
    assert in_tenant("default", "s") == "s"
    assert in_tenant("blue", "s") == "tenant=blue/s"
    assert in_tenant("blue", "") == ""


@pytest.mark.parametrize(
    ("action", "payload", "resume_in_s", "ends", "outcome"),
    [
        ("kv.fetch", {"block_hashes": [1], "mode": "copy"}, None, False, "fetch by_lookup"),
        ("kv.prefetch", {}, None, False, "prefetch by_lookup"),
        ("Share", {}, None, False, "share by_lookup"),
        ("kv.retain", {"ttl_s": 60}, 60.0, False, "retain taken"),
        ("kv.retain", {"duration_ms": 1500}, 1.5, False, "retain taken"),
        ("retain", {}, RETAIN_S, False, "retain taken"),
        ("kv.pin", {"ttl_s": 60}, 60.0, False, "pin clipped"),
        ("kv.demote", {}, None, True, "demote taken"),
        ("kv.retain", {"ttl_s": -1}, None, False, "retain not_valid"),
        ("kv.retain", {"ttl_s": float("nan")}, None, False, "retain not_valid"),
        ("kv.retain", {"ttl_s": True}, None, False, "retain not_valid"),
        ("kv.retain", {"ttl_s": "60"}, None, False, "retain not_valid"),
        ("kv.retain", {"ttl_s": 10**400}, None, False, "retain not_valid"),
        ("kv.retain", [60], None, False, "retain not_valid"),
        ("kv.explode", {}, None, False, "action unknown"),
        ("x" * 10_000_000, {}, None, False, "action unknown"),
        (None, {}, None, False, "action unknown"),
    ],
)
def test_each_action_becomes_a_hint_or_is_counted(
    action: Any, payload: Any, resume_in_s: float | None, ends: bool, outcome: str
) -> None:
    given = envelope((action, payload))
    hints, mistakes, outcomes = parse_request(Asked({}, "s", None, given))
    assert (hints.resume_in_s, hints.ends) == (resume_in_s, ends)
    assert (list(outcomes), mistakes) == ([outcome], [])
    as_object = SimpleNamespace(**{**given, "actions": [SimpleNamespace(**given["actions"][0])]})
    assert parse_request(Asked({}, "s", None, as_object)) == (hints, [], outcomes)
    assert parse_request(Asked({"kvpool": {"kv_hints": given}}, "s")) == (hints, [], outcomes)


@pytest.mark.parametrize(
    ("given", "outcomes"),
    [
        ("nonsense", ["envelope unknown_version"]),
        ({}, ["envelope unknown_version"]),
        (envelope(version="1.0"), ["envelope unknown_version"]),
        ({**envelope(), "actions": "retain"}, ["envelope not_valid"]),
        ({**envelope(), "actions": None}, ["envelope not_valid"]),
        ({**envelope(), "actions": [7]}, ["action unknown"]),
        (envelope(), []),
    ],
)
def test_an_envelope_that_is_not_understood_is_counted(given: Any, outcomes: list[str]) -> None:
    assert list(parse_request(Asked({}, "s", None, given)).outcomes) == outcomes


def test_an_envelope_is_read_up_to_a_limit() -> None:
    given = envelope(*[("kv.fetch", {})] * 100_000)
    outcomes = parse_request(Asked({}, "s", None, given)).outcomes
    assert outcomes[0] == "envelope too_many"
    assert len(outcomes) == ACTIONS_MAX + 1


def test_what_a_request_says_itself_counts_before_an_envelope() -> None:
    given = envelope(("kv.retain", {"ttl_s": 60}), ("kv.retain", {"ttl_s": 30}), ("kv.demote", {}))
    hints = parse_request(Asked({}, "s", None, given)).hints
    assert (hints.resume_in_s, hints.ends) == (60, True)
    hints = parse_request(Asked({"resume_in_s": 5, "end_session": False}, "s", None, given)).hints
    assert (hints.resume_in_s, hints.ends) == (5, False)
    retention = parse_request(Asked({}, "s", CONTEXT)).hints
    assert retention.resume_in_s == 60


def test_nothing_is_kept_for_a_request_without_a_session_or_of_low_priority() -> None:
    given = envelope(("kv.retain", {"ttl_s": 60}), ("kv.pin", {}), ("kv.demote", {}))
    none = parse_request(Asked({}, None, None, given))
    assert (none.hints.resume_in_s, none.hints.ends) == (None, False)
    assert list(none.outcomes) == ["retain no_session", "pin no_session", "demote no_session"]
    low = parse_request(Asked({}, "s", CONTEXT, given, priority=1))
    assert (low.hints.resume_in_s, low.hints.ends) == (None, True)
    assert list(low.outcomes) == ["retain background", "pin background", "demote taken"]
    assert parse_request(Asked({"resume_in_s": 5}, "s", priority=1)).hints.resume_in_s == 5
    assert read_envelope(None, has_session=True, background=False).outcomes == ()
