"""The closed set of errors.

The class decides what a caller does next:

- `UsageError`: the call is wrong; fix the calling program.
- `PeerError`: the peer broke the protocol; the connection to it is closed.
- `Unavailable`: ask another replica, or take a miss.
- `Refused`: the pool understood the request and declined it.
- `Corrupt`: bytes failed their checksum; they are never returned as data.

Code that uses sockets or files maps each exception there to one of these; no OSError leaves
kvpool. The split between local and remote errors follows h11 (LocalProtocolError,
RemoteProtocolError).
"""

from __future__ import annotations

from typing import Self


class KvpoolError(Exception):
    """Base class of every error that kvpool raises on purpose."""

    def fresh(self) -> Self:
        """The same error, to be raised once more, without the frames that this one has passed.

        For objects that keep an error. One that was raised refers to frames, and they to the
        object that keeps it: a cycle, which only a full collection ends
        (design: turns).
        """
        return type(self)(*self.args)


# --- errors of the caller, never retried --------------------------------------------


class UsageError(KvpoolError, ValueError):
    """The call itself is wrong; nothing was changed and retrying it will not help."""


class BadKey(UsageError):
    """A key is not 16 to 32 bytes, or the batch mixes lengths or repeats a key."""


class BadBuffer(UsageError):
    """A buffer is not contiguous bytes, not writable, empty, or too small for its block."""


class TooLarge(UsageError):
    """A block is larger than any segment, or a batch larger than the protocol allows."""


class Closed(UsageError):
    """The pool was closed, or belongs to another thread, loop or process."""


class ConfigError(UsageError):
    """A setting is unknown or its value is not valid; the text names the setting and the value."""


# --- errors of the peer; the connection is aborted ------------------------------------


class PeerError(KvpoolError):
    """The peer sent something that the protocol does not allow. The connection is closed."""


class BadFrame(PeerError):
    """A frame is wrong: its magic, its length, or bytes that belong to no frame."""


class BadMessage(PeerError):
    """The frame is valid, but its message is not, or the message is not allowed at this point."""


class VersionMismatch(PeerError):
    """The peer speaks another protocol version or belongs to another cluster."""


class Unauthenticated(PeerError):
    """The peer did not prove that it knows the cluster's secret."""


class Forbidden(PeerError):
    """A tenant asked for what is not its own, or anyone for what this server does not do."""


# --- no answer: another replica, else a miss ----------------------------------------


class Unavailable(KvpoolError, ConnectionError):
    """The other process could not be reached or did not answer."""


class LinkBroken(Unavailable):
    """The connection was refused, reset or closed before the answer came."""


class DeadlineExceeded(Unavailable, TimeoutError):
    """The answer did not come by the deadline."""


class ServerLost(Unavailable):
    """No transport of this server answers."""


class MasterLost(Unavailable):
    """No master answers."""


# --- the pool declined --------------------------------------------------------------


class Refused(KvpoolError):
    """The pool understood the request and declined it."""


class Overloaded(Refused):
    """A limit on pending work or on connections was reached."""


# --- never returned, never ignored --------------------------------------------------


class Corrupt(KvpoolError):
    """Bytes failed their checksum."""


class InvariantViolated(KvpoolError, AssertionError):
    """A `check()` failed: this is a bug in kvpool."""
