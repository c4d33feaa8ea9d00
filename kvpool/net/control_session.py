"""One connection of the control plane, without its socket: both ends as pure state machines.

    master    greeting: whether its cluster has a secret
    caller    Hello(cluster)
    master    Hello

With a secret all that follows the greeting is TLS, and both prove that they know it
(`kvpool.net.secret_sessions`). Behind the handshake come requests and replies, each behind its
size. (design: control-plane)
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Final

from kvpool.errors import BadFrame, Unauthenticated, VersionMismatch
from kvpool.guard import of_secrets
from kvpool.net.requests import (
    MESSAGE_SIZE_MAX,
    MessageReader,
    cluster_id,
    decode_envelope,
    encode_envelope,
    with_size,
)
from kvpool.types import Cluster
from kvpool.wire.messages import Hello, M, Message, decode, decode_answer, encode

#: What a master says first. ZMTP, which masters of release 0.1 spoke, begins with 0xff.
OPEN_GREETING: Final = b"kvpool-0"
SECRET_GREETING: Final = b"kvpool-1"
_ZMTP: Final = b"\xff"
_FORMER: Final = (
    "it speaks zmq, as former releases did: run the same release of kvpool in all processes of a "
    "pool"
)
#: Bytes of one message, and of all, before the other end has proved itself.
_HELLO_MAX: Final = 1024
_UNPROVED_MAX: Final = 32 << 10

#: A handshake: what it yields is sent, and it is resumed with the answer.
Handshake = Generator[Message | None, bytes, None]


class ControlSession:
    """What both ends do."""

    #: What travels is encrypted, or will be.
    sealed = False

    def __init__(self, cluster: Cluster, handshake: Handshake) -> None:
        self.cluster = cluster
        self._id = cluster_id(cluster.name)
        self.reader = MessageReader(_HELLO_MAX)
        self._handshake = handshake
        self._unproved = 0
        self._out: list[bytes] = []
        #: The handshake is complete.
        self.open = False

    def close(self) -> None:
        """Nothing comes any more. It is in no cycle now: servers collect none (design: turns)."""
        self._handshake.close()

    @property
    def heard(self) -> bool:
        """The other end has said something."""
        return self._unproved > 0

    @property
    def shaking(self) -> bool:
        """What keeps others from listening is not complete: nothing can be said yet."""
        return False

    def take(self) -> bytes:
        """What has to be sent since the last call."""
        out, self._out = b"".join(self._out), []
        return out

    def seal(self, message: bytes) -> bytes:
        """One message, as it travels on this connection only. For an open session."""
        return with_size(message)

    def feed(self, data: bytes) -> list[bytes]:
        """The requests or replies that are complete now; the caller looks for what to `take`.

        Raises PeerError, after which the connection has to be ended, and what an `Error` of the
        other end stands for.
        """
        return self._feed_unproved(data)

    def _feed_unproved(self, data: bytes) -> list[bytes]:
        self._count_unproved(data)
        return self._read(data)

    def _count_unproved(self, data: bytes) -> None:
        self._unproved += len(data)
        if self._unproved > _UNPROVED_MAX:
            raise BadFrame(f"more than {_UNPROVED_MAX} bytes before it has proved itself")

    def _read(self, data: bytes) -> list[bytes]:
        messages = self.reader.feed(data)
        while messages and not self.open:
            self._go_on(messages.pop(0))
        return messages

    def _go_on(self, answer: bytes | None) -> None:
        try:
            message = next(self._handshake) if answer is None else self._handshake.send(answer)
        except StopIteration:
            self.reader.size_max = MESSAGE_SIZE_MAX
            self._opened()
        else:
            self._say(message)

    def _opened(self) -> None:
        self.open = True
        self.seal, self.feed = with_size, self.reader.feed  # type: ignore[method-assign]

    def _say(self, message: Message | None) -> None:
        if message is not None:
            type, body = encode(message)
            self._out.append(self.seal(encode_envelope(type, self._id, 0, body)))


class CallerSession(ControlSession):
    """The end of who asks."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, self._prove())
        self._greeting: bytes | None = b""

    def _feed_unproved(self, data: bytes) -> list[bytes]:
        if self._greeting is None:
            return super()._feed_unproved(data)
        greeting = self._greeting + data
        self._greeting, data = greeting[: len(OPEN_GREETING)], greeting[len(OPEN_GREETING) :]
        whole = len(self._greeting) == len(OPEN_GREETING)
        _check_greeting(self._greeting, self.cluster)
        if not whole:
            return []
        self._greeting = None
        self._begin()
        return super()._feed_unproved(data) if data else []

    def _begin(self) -> None:
        """The greeting was right."""
        self._go_on(None)

    def _prove(self) -> Handshake:
        self._expect(Hello, (yield Hello(self.cluster.name, "caller")))

    def _expect(self, kind: type[M], message: bytes) -> M:
        envelope = decode_envelope(message, self._id)
        return decode_answer(kind, envelope.type, envelope.body)


def caller_session(cluster: Cluster) -> CallerSession:
    """That of a caller of this cluster. Raises ConfigError where this program has no secrets."""
    if not cluster.secret:
        return CallerSession(cluster)
    made: CallerSession = of_secrets("caller_session")(cluster)
    return made


def _check_greeting(greeting: bytes, cluster: Cluster) -> None:
    """Raises PeerError for anything but the greeting of a master of this kind of cluster, or its
    beginning."""
    if greeting[:1] == _ZMTP:
        raise VersionMismatch(_FORMER)
    if greeting == SECRET_GREETING and not cluster.secret:
        raise Unauthenticated("it requires a secret: set secret_file, or local_only if it has that")
    if greeting == OPEN_GREETING and cluster.secret:
        raise Unauthenticated("it has no secret, but this process has one")
    if not (OPEN_GREETING.startswith(greeting) or greeting == SECRET_GREETING):
        raise BadFrame("what listens there is no master")


class MasterSession(ControlSession):
    """The end of who answers. `tenant` and `secret` say who asks, once it is open."""

    greeting = OPEN_GREETING

    def __init__(self, cluster: Cluster, admit: Callable[[str], None]) -> None:
        """`admit` gets the tenant of a caller that has proved itself, and raises KvpoolError to
        refuse it."""
        super().__init__(cluster, self._hear())
        self._admit = admit
        self.tenant, self.secret = "", cluster.secret
        self._out.append(self.greeting)
        next(self._handshake)

    def refuse(self, error: Message) -> None:
        """Say why the connection is ended, if that can be said."""
        if not self.shaking:
            self._say(error)

    def shake_later(self, take: Callable[[Callable[[], list[bytes]]], None]) -> None:
        """It is `shaking`: call `take` with what goes on with that, when there is time for it."""

    def _feed_unproved(self, data: bytes) -> list[bytes]:
        if not self.heard and data[:1] == _ZMTP and data[4:6] != b"kM":
            raise VersionMismatch(_FORMER)
        return super()._feed_unproved(data)

    def _hear(self) -> Handshake:
        envelope = decode_envelope((yield None), self._id)
        hello = decode(Hello, envelope.type, envelope.body)
        self._admit("")
        self._say(Hello(hello.cluster, "master"))
