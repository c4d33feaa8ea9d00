"""Sessions instead of blocks: with little memory, some are served to their end before others begin.

With less memory than the sessions need that live at a time, a policy that treats all alike gives
every one of them misses. Those that are admitted keep their context in memory; the others wait.
"""

from __future__ import annotations


class Admission:
    """Of sessions whose contexts have at most `tokens` together; one is always admitted."""

    def __init__(self, tokens: float) -> None:
        self._room = tokens
        self._admitted: dict[int, int] = {}  # tokens of its last prompt, by session
        self._used = 0

    def admits(self, session: int, tokens: int) -> bool:
        """Whether this session's next prompt, so many tokens long, may be served now.

        A session that was admitted stays so until `end`, also when it grows beyond the room.
        """
        known = self._admitted.get(session)
        if known is None and self._admitted and self._used + tokens > self._room:
            return False
        self._admitted[session] = tokens
        self._used += tokens - (known or 0)
        return True

    def end(self, session: int) -> None:
        """The session has had its last answer."""
        self._used -= self._admitted.pop(session, 0)
