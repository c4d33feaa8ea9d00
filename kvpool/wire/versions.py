"""Which protocol version a peer is spoken to in (design: protocol-versions)."""

from __future__ import annotations

from typing import Final

from kvpool.wire.frames import PROTOCOL_VERSION

#: A peer of the release before may have been upgraded: after so long it is tried with ours again.
_OLDER_S: Final = 60.0


class SpokenVersion:
    """Of one peer: this release's version, until the peer has refused it in its own, older one."""

    def __init__(self) -> None:
        self._older = PROTOCOL_VERSION
        self._until = 0.0

    def at(self, now: float) -> int:
        """The version for the next question."""
        return self._older if now < self._until else PROTOCOL_VERSION

    def refused(self, asked: int, theirs: int, now: float) -> bool:
        """A question of version `asked` was answered with an error of version `theirs`: True when
        it was refused for its version, and should be asked again in theirs."""
        if theirs >= asked:  # a peer of this release answers in the version of the question
            return False
        self._older, self._until = theirs, now + _OLDER_S
        return True
