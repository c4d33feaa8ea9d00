"""What an orchestrator's hint envelope (vLLM's and SGLang's `KvHintsEnvelope` 0.1) asks for. Pure.

An envelope is advice, whatever it says: an action that is not known, not valid or not possible is
counted with its outcome and never an error. The published protocol names one action, `kv.fetch`;
the others are those of the proposals that vLLM and SGLang discuss, with the spellings of a duration
that exist today.

| action                     | becomes                                                             |
|----------------------------|---------------------------------------------------------------------|
| fetch, prefetch, share     | nothing more: the request's own lookup asks the pool for its prompt |
| retain, pin                | the session resumes within the duration: kept until then, in budget |
| demote                     | the session ends: its blocks leave the memory first                 |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

#: Actions of one envelope that are read; the number of the others is counted.
ACTIONS_MAX: Final = 64
#: Seconds for which `retain` and `pin` keep blocks when they name no duration: the shortest that
#: providers of such caches sell.
RETAIN_S: Final = 300.0
_BY_LOOKUP: Final = frozenset({"fetch", "prefetch", "share"})
_KEEP: Final = frozenset({"retain", "pin"})
_SECONDS: Final[Mapping[str, float]] = {
    "ttl_s": 1.0,
    "ttl_seconds": 1.0,
    "duration_s": 1.0,
    "duration_ms": 0.001,
    "retention_seconds": 1.0,
    "kv_retention_ttl_seconds": 1.0,
}


class EnvelopeHints(NamedTuple):
    """`outcomes` is one text for each action: its name and what became of it."""

    resume_in_s: float | None = None
    ends: bool = False
    outcomes: Sequence[str] = ()


def read_envelope(envelope: object, *, has_session: bool, background: bool) -> EnvelopeHints:
    """The hints in an envelope: an object or a mapping, as it came.

    Without a session nothing can be kept or demoted. `background`: the request's priority is below
    the usual one, so nothing is kept for it.
    """
    if envelope is None:
        return EnvelopeHints()
    version, actions = _get(envelope, "protocol_version"), _get(envelope, "actions")
    if not isinstance(version, str) or version.split(".")[0] != "0":
        return EnvelopeHints(outcomes=["envelope unknown_version"])
    if not isinstance(actions, Sequence) or isinstance(actions, str | bytes):
        return EnvelopeHints(outcomes=["envelope not_valid"])
    found = EnvelopeHints()
    outcomes = ["envelope too_many"] * (len(actions) > ACTIONS_MAX)
    for action in actions[:ACTIONS_MAX]:
        name = _name(_get(action, "action_type"))
        outcome = "unknown"
        if name in _BY_LOOKUP:
            outcome = "by_lookup"
        elif name in _KEEP or name == "demote":
            found, outcome = _apply(found, name, action, has_session, background)
        outcomes.append(f"{name} {outcome}")
    return found._replace(outcomes=outcomes)


def _apply(
    found: EnvelopeHints, name: str, action: object, has_session: bool, background: bool
) -> tuple[EnvelopeHints, str]:
    if not has_session:
        return found, "no_session"
    if name == "demote":
        return found._replace(ends=True), "taken"
    if background:
        return found, "background"
    seconds = _seconds(_get(action, "payload"))
    if seconds is None:
        return found, "not_valid"
    longest = max(seconds, found.resume_in_s or 0.0)
    # A pin that nothing can end would freeze a full pool: it becomes a hint within the budget.
    return found._replace(resume_in_s=longest), "taken" if name == "retain" else "clipped"


def _name(action_type: object) -> str:
    """`kv.retain` and `Retain` are one action. What is not known has one name: labels are few."""
    if isinstance(action_type, str) and len(action_type) <= 32:
        name = action_type.lower().removeprefix("kv.")
        if name in _BY_LOOKUP or name in _KEEP or name == "demote":
            return name
    return "action"


def _seconds(payload: object) -> float | None:
    """The duration in a payload; None where it is no time."""
    if not isinstance(payload, Mapping):
        return RETAIN_S if payload is None else None
    for key, unit in _SECONDS.items():
        if key in payload:
            value = payload[key]
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and 0 <= value <= 1e9 / unit and math.isfinite(value):
                return float(value) * unit
            return None
    return RETAIN_S


def _get(thing: object, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)
