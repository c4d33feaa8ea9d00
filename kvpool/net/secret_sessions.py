"""Connections of the control plane in a cluster with a secret, without their sockets.

    master    greeting
    (all that follows is TLS 1.3)
    caller    Hello(cluster, nonce, tenant, key)
    master    Hello(nonce)
    caller    Proof        it knows the secret, for this nonce and for this certificate
    master    Proof        and so does the master

The caller proves first, so strangers learn nothing on which they could try guesses. A proof covers
the hash of the certificate that the caller was shown: who stands in the middle shows another one,
and can pass no proof on. (design: control-plane)
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import secrets
import ssl
from collections import deque
from collections.abc import Callable
from typing import Final

from kvpool.errors import BadFrame, Unauthenticated
from kvpool.net.control_session import (
    SECRET_GREETING,
    CallerSession,
    ControlSession,
    Handshake,
    MasterSession,
)
from kvpool.net.masters_certificate import Certificate, masters_certificate
from kvpool.net.requests import decode_envelope, with_size
from kvpool.types import Cluster
from kvpool.wire import auth
from kvpool.wire.auth import Proof
from kvpool.wire.messages import Hello, M, decode

#: Bytes of one record of TLS: a larger buffer is mapped anew for each message.
_RECORD_MAX: Final = 1 << 14
#: So that a proof of this plane is none of the other.
_BINDING: Final = b"kvpool control 1"
_STRANGER: Final = "its key is made from no secret that is valid here"
#: A turn of handshakes, which take some 0.2 ms each; then others have as long.
_TURN_S: Final = 0.002


@functools.cache
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


class _Sealed(ControlSession):
    """What both ends do: they derive from theirs without a secret first, and from this then."""

    sealed = True
    _tls: _Tls | None = None

    def seal(self, message: bytes) -> bytes:
        assert self._tls is not None
        return self._tls.seal(with_size(message))

    def feed(self, data: bytes) -> list[bytes]:
        if not self.open:
            return self._feed_unproved(data)
        assert self._tls is not None
        self._tls.feed(data)
        return self.reader.feed(self._tls.unseal())

    @property
    def shaking(self) -> bool:
        """TLS is not complete."""
        return self._tls is not None and not self._tls.open

    def shake(self) -> list[bytes]:
        """As `feed`, for what has arrived while this end is `shaking`. It takes some 0.2 ms."""
        tls = self._tls
        assert tls is not None
        tls.shake()
        self._out.append(tls.take())
        if not tls.open:
            return []
        self._shaken()
        return self._read(tls.unseal())

    def _feed_unproved(self, data: bytes) -> list[bytes]:
        self._count_unproved(data)
        tls = self._tls
        assert tls is not None
        tls.feed(data)
        if tls.open:
            return self._read(tls.unseal())
        return self.shake() if self._shakes_at_once else []

    #: Whether `feed` goes on with the handshake of TLS, or leaves that to `shake`.
    _shakes_at_once = True

    def _shaken(self) -> None:
        """TLS is complete now."""

    def _opened(self) -> None:
        self.open = True


class SecretCallerSession(CallerSession, _Sealed):
    """The end of who asks."""

    def _begin(self) -> None:
        self._tls = _Tls(caller_context(), server=False)
        self.shake()

    def _shaken(self) -> None:
        assert self._tls is not None
        if self.cluster.tenant and self._tls.certificate() != self.cluster.fingerprint:
            raise Unauthenticated("its certificate is not that of the masters of this cluster")
        self._go_on(None)

    def _prove(self) -> Handshake:
        cluster = self.cluster
        nonce = secrets.token_bytes(auth.NONCE_SIZE)
        key = auth.key_id(cluster, nonce) if cluster.tenant else b""
        answer = yield Hello(cluster.name, "caller", nonce, False, cluster.tenant, key)
        theirs = self._expect(Hello, answer)
        assert self._tls is not None
        proved = cluster, nonce, theirs.nonce, _BINDING + self._tls.certificate()
        answer = yield Proof(auth.client_proof(*proved))
        if not auth.same(self._expect(Proof, answer).proof, auth.server_proof(*proved)):
            raise Unauthenticated("it does not know this cluster's secret")

    def _expect(self, kind: type[M], message: bytes) -> M:
        try:
            return super()._expect(kind, message)
        except Unauthenticated:
            what = "it and the cluster's name are equal"
            if self.cluster.tenant:
                what = "the key of this tenant is still valid"
            raise Unauthenticated(f"it has another secret: check that {what}") from None


class SecretMasterSession(MasterSession, _Sealed):
    """The end of who answers."""

    greeting = SECRET_GREETING

    def __init__(self, masters: MasterSessions, admit: Callable[[str], None]) -> None:
        self._tls = _Tls(masters.certificate.context, server=True)
        self._certificate = masters.certificate.hash
        self._secrets_of = masters.secrets_of
        self._handshakes = masters.handshakes
        super().__init__(masters.cluster, admit)

    _shakes_at_once = False  # when there is time for it

    def shake_later(self, take: Callable[[Callable[[], list[bytes]]], None]) -> None:
        self._handshakes.go_on(lambda: take(self.shake))

    def _hear(self) -> Handshake:
        envelope = decode_envelope((yield None), self._id)
        hello = decode(Hello, envelope.type, envelope.body)
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


class MasterSessions:
    """Makes the sessions of one master. `secrets_of` has the secrets that are good for a tenant's
    clients; `certificate` is what all callers are shown."""

    def __init__(
        self,
        cluster: Cluster,
        secrets_of: Callable[[str], tuple[bytes, ...]],
        certificate: Certificate,
    ) -> None:
        self.cluster = cluster
        self.secrets_of = secrets_of
        self.certificate = certificate
        self.handshakes = _Handshakes()

    def __call__(self, admit: Callable[[str], None]) -> MasterSession:
        return SecretMasterSession(self, admit)


def master_sessions(
    cluster: Cluster, secrets_of: Callable[[str], tuple[bytes, ...]], *, tenants: bool
) -> MasterSessions:
    """Of a master that starts now."""
    return MasterSessions(cluster, secrets_of, masters_certificate(cluster, tenants=tenants))


class _Handshakes:
    """Handshakes of TLS, which go on when there is time for them."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._planned = False

    def go_on(self, shake: Callable[[], None]) -> None:
        """What has arrived on a connection is for its handshake."""
        self._waiting.append(shake)
        if not self._planned:
            self._plan(0.0)

    def _plan(self, pause_s: float) -> None:
        self._planned = True
        asyncio.get_running_loop().call_later(pause_s, self._work)

    def _work(self) -> None:
        """Work for one turn, and then leave as much time for all others."""
        loop = asyncio.get_running_loop()
        began = now = loop.time()
        try:
            while self._waiting and now < began + _TURN_S:
                self._waiting.popleft()()
                now = loop.time()
        finally:
            self._planned = False
            if self._waiting:
                self._plan(now - began)
