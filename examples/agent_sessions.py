"""24 sessions of agents, recorded once: what each sends and when, the same in every process.

Eight families. A root works in turns, whose new part is mostly the result of a tool; a sub-agent
begins with the first turns of its root's conversation and a task of its own; a fork goes on from
its root's second turn with another question. All share one system prompt with the tools. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

FAMILIES: Final = 8
#: Words of each part of a prompt; a word is nearly two tokens of the tiny model's.
_SYSTEM, _TASK, _TOOL, _ANSWER = 200, 120, 130, 12
_ROOT_TURNS, _OTHER_TURNS = 4, 2
_SYLLABLES: Final = [a + b for a in "bdfgklmn" for b in "aeiou"]

Message = dict[str, Any]


class Session(NamedTuple):
    """The prompt of each turn is the messages up to one of the `ends`. `after` names the session
    and the turn whose answer it needs before it can begin."""

    name: str
    parent: str
    messages: Sequence[Message]
    ends: Sequence[int]
    after: tuple[str, int] | None = None

    def prompt(self, turn: int) -> list[Message]:
        return list(self.messages[: self.ends[turn]])

    def headers(self, prefix: str) -> dict[str, str]:
        """As Codex names its conversations."""
        named = {"thread-id": f"{prefix}{self.name}"}
        if self.parent:
            named["x-codex-parent-thread-id"] = f"{prefix}{self.parent}"
        return named


def recorded(seed: int = 7) -> list[Session]:
    """The sessions, roots before those that need them."""
    rng = random.Random(seed)
    system: Message = {"role": "system", "content": _words(rng, _SYSTEM)}
    sessions = []
    for family in range(FAMILIES):
        root = _grown(rng, f"root-{family}", "", [system, _user(rng)], _ROOT_TURNS)
        begun = root.prompt(0)
        child = _grown(rng, f"child-{family}", root.name, [*begun, _user(rng)], _OTHER_TURNS)
        second = root.prompt(1)
        fork = _grown(rng, f"fork-{family}", "", [*second, _user(rng)], _OTHER_TURNS)
        sessions += [
            root,
            child._replace(after=(root.name, 0)),
            fork._replace(after=(root.name, 1)),
        ]
    return sessions


def long_session(number: int, turns: int, words: int) -> Session:
    """One whose first prompt has so many words."""
    rng = random.Random(1000 + number)
    begins: list[Message] = [{"role": "user", "content": _words(rng, words)}]
    return _grown(rng, f"long-{number}", "", begins, turns)


def _grown(
    rng: random.Random, name: str, parent: str, messages: Sequence[Message], turns: int
) -> Session:
    grown, ends = list(messages), [len(messages)]
    for _ in range(turns - 1):
        grown.append({"role": "assistant", "content": _words(rng, _ANSWER)})
        grown.append({"role": "tool", "content": _words(rng, _TOOL), "tool_call_id": "call"})
        ends.append(len(grown))
    return Session(name, parent, grown, ends)


def _user(rng: random.Random) -> Message:
    return {"role": "user", "content": _words(rng, _TASK)}


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(_SYLLABLES) + rng.choice(_SYLLABLES) for _ in range(count))
