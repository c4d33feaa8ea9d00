"""One connection of the control plane, without its socket: both ends as pure state machines.

    master    greeting: whether its cluster has a secret
    (with one, all that follows is TLS 1.3)
    caller    Hello(cluster, nonce, tenant, key)
    master    Hello(nonce)
    caller    Proof        it knows the secret, for this nonce and for this certificate
    master    Proof        and so does the master

The caller proves first, so strangers learn nothing on which they could try guesses. A proof covers
the hash of the certificate that the caller was shown: who stands in the middle shows another one,
and can pass no proof on. Without a secret the two Hellos are all. Behind them come requests and
replies, each behind its size. (design: control-plane)
"""

from __future__ import annotations

import hashlib
import secrets
import ssl
from collections.abc import Callable, Generator
from typing import Final

from kvpool.errors import BadFrame, Unauthenticated, VersionMismatch
from kvpool.net.requests import (
    MESSAGE_SIZE_MAX,
    MessageReader,
    cluster_id,
    decode_envelope,
    encode_envelope,
    with_size,
)
from kvpool.types import Cluster
from kvpool.wire import auth
from kvpool.wire.messages import Hello, M, Message, Proof, decode, decode_answer, encode

#: What a master says first. ZMTP, which masters of release 0.1 spoke, begins with 0xff.
OPEN_GREETING: Final = b"kvpool-0"
SECRET_GREETING: Final = b"kvpool-1"
_ZMTP: Final = b"\xff"
_FORMER: Final = (
    "it speaks zmq, as former releases did: run the same release of kvpool in all processes of a "
    "pool"
)
#: Bytes of one record of TLS: a larger buffer is mapped anew for each message.
_RECORD_MAX: Final = 1 << 14
#: Bytes of one message, and of all, before the other end has proved itself.
_HELLO_MAX: Final = 1024
_UNPROVED_MAX: Final = 32 << 10

#: So that a proof of this plane is none of the other.
_BINDING: Final = b"kvpool control 1"
_STRANGER: Final = "its key is made from no secret that is valid here"

#: A handshake: what it yields is sent, and it is resumed with the answer.
_Handshake = Generator[Message | None, bytes, None]


def caller_context() -> ssl.SSLContext:
    """TLS for callers. No authority is asked: the proofs say whose certificate it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class _Tls:
    """TLS over bytes that somebody else carries."""

    def __init__(self, context: ssl.SSLContext, *, server: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self.open = False

    def feed(self, data: bytes) -> None:
        self._incoming.write(data)

    def take(self) -> bytes:
        """What has to be sent."""
        return self._outgoing.read()

    def shake(self) -> None:
        """Go on with the handshake; `open` says whether it is complete. Raises Unauthenticated."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as error:
            raise Unauthenticated(f"no TLS: {error.reason or error}") from None
        self.open = True

    def seal(self, data: bytes) -> bytes:
        sent = self._tls.write(data)
        while sent < len(data):
            sent += self._tls.write(data[sent:])
        return self._outgoing.read()

    def unseal(self) -> bytes:
        """What has arrived. Raises BadFrame for anything but what the other end has sealed."""
        tls, incoming, parts = self._tls, self._incoming, []
        try:
            parts.append(tls.read(_RECORD_MAX))
            while incoming.pending or tls.pending():
                parts.append(tls.read(_RECORD_MAX))
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self.open = False  # nor can anything be sealed
            raise BadFrame(f"TLS was broken: {error.reason or error}") from None
        return b"".join(parts)

    def certificate(self) -> bytes:
        """The hash of the one that this end was shown."""
        return hashlib.sha256(self._tls.getpeercert(binary_form=True) or b"").digest()


class ControlSession:
    """What both ends do."""

    def __init__(self, cluster: Cluster, handshake: _Handshake) -> None:
        self.cluster = cluster
        self._id = cluster_id(cluster.name)
        self._tls: _Tls | None = None
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
    def sealed(self) -> bool:
        """What travels is encrypted, or will be."""
        return self._tls is not None

    @property
    def heard(self) -> bool:
        """The other end has said something."""
        return self._unproved > 0

    def take(self) -> bytes:
        """What has to be sent since the last call."""
        out, self._out = b"".join(self._out), []
        return out

    def seal(self, message: bytes) -> bytes:
        """One message, as it travels on this connection only. For an open session."""
        framed = with_size(message)
        return framed if self._tls is None else self._tls.seal(framed)

    def feed(self, data: bytes) -> list[bytes]:
        """The requests or replies that are complete now; the caller looks for what to `take`.

        Raises PeerError, after which the connection has to be ended, and what an `Error` of the
        other end stands for.
        """
        if not self.open:
            return self._feed_unproved(data)
        if self._tls is None:
            return self.reader.feed(data)
        self._tls.feed(data)
        return self.reader.feed(self._tls.unseal())

    def shake(self) -> list[bytes]:
        """As `feed`, for what has arrived while this end is `shaking`. It takes some 0.2 ms."""
        tls = self._tls
        assert tls is not None
        tls.shake()
        self._out.append(tls.take())
        if not tls.open:
            return []
        self._sealed()
        return self._read(tls.unseal())

    @property
    def shaking(self) -> bool:
        """TLS is not complete."""
        return self._tls is not None and not self._tls.open

    def _feed_unproved(self, data: bytes) -> list[bytes]:
        self._unproved += len(data)
        if self._unproved > _UNPROVED_MAX:
            raise BadFrame(f"more than {_UNPROVED_MAX} bytes before it has proved itself")
        tls = self._tls
        if tls is None:
            return self._read(data)
        tls.feed(data)
        if tls.open:
            return self._read(tls.unseal())
        return self.shake() if self._shakes_at_once else []

    #: Whether `feed` goes on with the handshake of TLS, or leaves that to `shake`.
    _shakes_at_once = True

    def _sealed(self) -> None:
        """TLS is complete now."""

    def _read(self, data: bytes) -> list[bytes]:
        messages = self.reader.feed(data)
        while messages and not self.open:
            self._go_on(messages.pop(0))
        return messages

    def _go_on(self, answer: bytes | None) -> None:
        try:
            message = next(self._handshake) if answer is None else self._handshake.send(answer)
        except StopIteration:
            self.open = True
            self.reader.size_max = MESSAGE_SIZE_MAX
            if self._tls is None:  # the same, and fewer steps for each message
                self.seal, self.feed = with_size, self.reader.feed  # type: ignore[method-assign]
        else:
            self._say(message)

    def _say(self, message: Message | None) -> None:
        if message is not None:
            type, body = encode(message)
            self._out.append(self.seal(encode_envelope(type, self._id, 0, body)))


class CallerSession(ControlSession):
    """The end of who asks."""

    def __init__(self, cluster: Cluster, context: Callable[[], ssl.SSLContext]) -> None:
        """`context` makes that of TLS, if it is needed."""
        super().__init__(cluster, self._prove())
        self._context = context
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
        if self.cluster.secret:
            self._tls = _Tls(self._context(), server=False)
            self.shake()
        else:
            self._go_on(None)
        return super()._feed_unproved(data) if data else []

    def _sealed(self) -> None:
        assert self._tls is not None
        if self.cluster.tenant and self._tls.certificate() != self.cluster.fingerprint:
            raise Unauthenticated("its certificate is not that of the masters of this cluster")
        self._go_on(None)

    def _prove(self) -> _Handshake:
        cluster = self.cluster
        nonce = secrets.token_bytes(auth.NONCE_SIZE) if cluster.secret else b""
        key = auth.key_id(cluster, nonce) if cluster.tenant else b""
        answer = yield Hello(cluster.name, "caller", nonce, False, cluster.tenant, key)
        theirs = self._expect(Hello, answer)
        if not cluster.secret:
            return
        assert self._tls is not None
        proved = cluster, nonce, theirs.nonce, _BINDING + self._tls.certificate()
        answer = yield Proof(auth.client_proof(*proved))
        if not auth.same(self._expect(Proof, answer).proof, auth.server_proof(*proved)):
            raise Unauthenticated("it does not know this cluster's secret")

    def _expect(self, kind: type[M], message: bytes) -> M:
        envelope = decode_envelope(message, self._id)
        try:
            return decode_answer(kind, envelope.type, envelope.body)
        except Unauthenticated:
            what = "it and the cluster's name are equal"
            if self.cluster.tenant:
                what = "the key of this tenant is still valid"
            raise Unauthenticated(f"it has another secret: check that {what}") from None


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

    def __init__(
        self,
        cluster: Cluster,
        secrets_of: Callable[[str], tuple[bytes, ...]],
        context: ssl.SSLContext | None,
        certificate: bytes,
        admit: Callable[[str], None],
    ) -> None:
        """With a `context`, of TLS, which shows the certificate of this hash. `secrets_of` has
        those of a tenant. `admit` gets the tenant of a caller that has proved itself, and raises
        KvpoolError to refuse it."""
        super().__init__(cluster, self._hear())
        self._secrets_of = secrets_of
        self._admit = admit
        self._certificate = certificate
        self.tenant, self.secret = "", cluster.secret
        self._out.append(OPEN_GREETING if context is None else SECRET_GREETING)
        if context is not None:
            self._tls = _Tls(context, server=True)
        next(self._handshake)

    def refuse(self, error: Message) -> None:
        """Say why the connection is ended, if that can be said."""
        if not self.shaking:
            self._say(error)

    _shakes_at_once = False  # when the listener has time for it

    def _feed_unproved(self, data: bytes) -> list[bytes]:
        if not self.heard and data[:1] == _ZMTP and data[4:6] != b"kM":
            raise VersionMismatch(_FORMER)
        return super()._feed_unproved(data)

    def _hear(self) -> _Handshake:
        envelope = decode_envelope((yield None), self._id)
        hello = decode(Hello, envelope.type, envelope.body)
        if self._tls is None:
            self._admit("")
            self._say(Hello(hello.cluster, "master"))
            return
        seen: Cluster | None = self.cluster
        if hello.tenant:
            good = self._secrets_of(hello.tenant)
            seen = auth.find_tenant(good, self.cluster, hello.tenant, hello.key, hello.nonce)
        if seen is None or len(hello.nonce) != auth.NONCE_SIZE:
            raise Unauthenticated(_STRANGER)
        nonce = secrets.token_bytes(auth.NONCE_SIZE)
        envelope = decode_envelope((yield Hello(hello.cluster, "master", nonce)), self._id)
        proof = decode(Proof, envelope.type, envelope.body).proof
        proved = seen, hello.nonce, nonce, _BINDING + self._certificate
        if not auth.same(proof, auth.client_proof(*proved)):
            raise Unauthenticated(_STRANGER)
        self._admit(seen.tenant)
        self.tenant, self.secret = seen.tenant, seen.secret
        self._say(Proof(auth.server_proof(*proved)))
