"""The closed set of errors.

Whose fault it was decides what the caller does next: a `UsageError` is ours to fix, a
`PeerError` closes that link, `Unavailable` means ask another replica or take a miss,
`Refused` is the pool's answer, `Corrupt` is never handed out as data.

Every edge (sockets, zmq, files) maps what it catches to one of these; no OSError escapes.
The split between *you* and *they* is h11's (LocalProtocolError, RemoteProtocolError).
"""


class KvpoolError(Exception):
    """Root of everything kvpool raises on purpose."""


# --- the caller's fault, never retried ---------------------------------------------


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
    """A setting is unknown or its value makes no sense; the text names both."""


# --- they broke the protocol; the link is aborted ------------------------------------


class PeerError(KvpoolError):
    """The peer sent something the protocol does not allow. The link is dead."""


class BadFrame(PeerError):
    """Framing is wrong: magic, length, or bytes that belong to no frame."""


class BadMessage(PeerError):
    """The frame is well formed but its message is not, or does not fit the state."""


class VersionMismatch(PeerError):
    """The peer speaks another protocol version or belongs to another cluster."""


class Unauthenticated(PeerError):
    """The peer did not prove that it knows the cluster's secret."""


# --- try another replica, else a miss -----------------------------------------------


class Unavailable(KvpoolError, ConnectionError):
    """The other side could not be asked or did not answer."""


class LinkBroken(Unavailable):
    """The connection was refused, reset or closed before the answer came."""


class DeadlineExceeded(Unavailable, TimeoutError):
    """The answer did not come by the deadline."""


class ServerLost(Unavailable):
    """No transport of this server answers."""


class MasterLost(Unavailable):
    """No master answers."""


# --- the pool said no ---------------------------------------------------------------


class Refused(KvpoolError):
    """The pool understood and declined."""


class Overloaded(Refused):
    """A bound on pending work was reached."""


# --- never returned, never ignored --------------------------------------------------


class Corrupt(KvpoolError):
    """Bytes failed their checksum."""


class InvariantViolated(KvpoolError, AssertionError):
    """A `check()` failed: this is a bug in kvpool."""
