"""TLS: tcp on a network that is not trusted. Encrypted, and no peer in the middle.

With a secret no authority is needed: the proof of the handshake covers the server's certificate, as
the channel binding `tls-server-end-point` of RFC 5929 does, so a peer in the middle, who has
another certificate, cannot relay it. With `ca` a client checks the certificate itself, and a server
asks its clients for theirs. (design: authentication)
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import ssl
from functools import partial
from typing import Final, NamedTuple

from kvpool.addresses import join, listening_socket, parse
from kvpool.errors import ConfigError, KvpoolError, LinkBroken, Unauthenticated
from kvpool.protocols import BlockStore, Listener
from kvpool.types import Cluster
from kvpool_transports.certificates import Certificates, Files, read
from kvpool_transports.streams.server import HELLO_S, Sessions
from kvpool_transports.streams.stream import Stream, address_of
from kvpool_transports.tcp import BACKLOG, TcpTransport, tune

#: After an accept that failed.
_ACCEPT_AGAIN_S: Final = 0.1


class TlsTransport(TcpTransport):
    """`tls://host:port`, TLS 1.3. Settings, all of them names of PEM files:

    A server needs `cert` and `key`. With `ca` it admits only clients with a certificate of that
    authority (`requires_certificates`). A client needs the cluster's secret, or a tenant's, or
    `ca`, the authority of servers' certificates; with `check_name` a certificate must also have
    the server's name or address. It shows `cert` to servers that ask for one.
    """

    scheme = "tls"

    def __init__(
        self, *, cert: str = "", key: str = "", ca: str = "", check_name: bool = True
    ) -> None:
        if bool(cert) != bool(key):
            raise ConfigError("tls: cert and key are given together, or none of them")
        super().__init__()
        self._files = Files(cert, key, ca)
        self._check_name = check_name
        self._of_client: Certificates | None = None
        for path in filter(None, self._files):
            read(path)  # a wrong path is told at the start, not with the first connection

    @property
    def requires_certificates(self) -> bool:
        """A server asks its clients for a certificate, which is good in place of a secret."""
        return bool(self._files.ca)

    async def listen(self, address: str, store: BlockStore) -> Listener:
        if not self._files.cert:
            raise ConfigError(f"{address or 'tls'}: a server needs tls?cert=FILE&key=FILE")
        certificates = Certificates(self._files, ssl.PROTOCOL_TLS_SERVER, self._for_server)
        sessions = Sessions(store, mapped=False, scheme="tls")
        return _TlsListener(sessions, certificates, _listen(address))

    async def _open(self, host: str, port: int, cluster: Cluster) -> tuple[Stream, bytes]:
        if not self._files.ca and not cluster.secret:
            raise ConfigError(
                "tls without a secret needs tls?ca=FILE: nothing else says whose server it is"
            )
        if self._of_client is None:
            self._of_client = Certificates(self._files, ssl.PROTOCOL_TLS_CLIENT, self._for_client)
        context, _ = await self._of_client.current()
        try:
            transport, stream = await asyncio.get_running_loop().create_connection(
                Stream, host, port, ssl=context, server_hostname=host
            )
        except ssl.SSLError as error:
            raise LinkBroken(f"no TLS with {host}:{port}: {error.reason or error}") from None
        tune(transport)
        shown = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return stream, hashlib.sha256(shown or b"").digest()

    def _for_server(self, context: ssl.SSLContext) -> None:
        if self._files.ca:
            context.verify_mode = ssl.CERT_REQUIRED

    def _for_client(self, context: ssl.SSLContext) -> None:
        context.check_hostname = bool(self._files.ca) and self._check_name
        if not self._files.ca:
            context.verify_mode = ssl.CERT_NONE  # the proof covers the certificate


class _TlsListener:
    """Accepts connections by itself, and not by the loop: a connection counts as a stranger's from
    its first byte on, before TLS, so that silent ones are bounded (design: bounds)."""

    def __init__(
        self, sessions: Sessions, certificates: Certificates, listening: socket.socket
    ) -> None:
        self._sessions = sessions
        self._certificates = certificates
        self._listening = listening
        self._address = f"tls://{join(*listening.getsockname()[:2])}"
        self._loop = asyncio.get_running_loop()
        self._paused: asyncio.TimerHandle | None = None
        self._listen()

    @property
    def address(self) -> str:
        return self._address

    async def close(self) -> None:
        if self._listening.fileno() != -1:
            self._loop.remove_reader(self._listening)
            self._listening.close()
        if self._paused is not None:
            self._paused.cancel()
        await self._sessions.close()

    def _listen(self) -> None:
        self._paused = None
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(BACKLOG):
            try:
                accepted, peer = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor is free: not again in each turn of the loop
                self._loop.remove_reader(self._listening)
                self._paused = self._loop.call_later(_ACCEPT_AGAIN_S, self._listen)
                return
            accepted.setblocking(False)
            address = address_of(peer)
            if not self._sessions.admits(address):  # before TLS, which costs a signature
                accepted.close()
                continue
            arriving = self._sessions.start(self._arrive(accepted, address))
            arriving.add_done_callback(partial(_hang_up_cancelled, accepted))

    async def _arrive(self, accepted: socket.socket, address: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        arrival, stream = _Arrival(task), Stream()
        if self._sessions.strangers.arrived(arrival, address):
            self._sessions.count("displaced_handshakes")
        try:
            context, binding = await self._certificates.current()
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: stream, accepted, ssl=context, ssl_handshake_timeout=HELLO_S
            )
        except OSError as error:  # ssl.SSLError is one
            self._sessions.refused(address, _why(error), costly=True)
            error.__traceback__ = None  # asyncio's frame there refers to the error, and to TLS
            return
        finally:
            self._sessions.strangers.left(arrival)
        tune(transport)
        self._sessions.accept(stream, binding)


def _why(error: OSError) -> KvpoolError:
    """No TLS is as good as no proof; who has hung up may have been nothing but a probe."""
    if isinstance(error, ssl.SSLError):
        return Unauthenticated(f"no TLS: {error.reason or error}")
    return LinkBroken(f"no TLS: {error.strerror or error}")


def _hang_up_cancelled(accepted: socket.socket, arriving: asyncio.Task[None]) -> None:
    """A transport of asyncio that is closed before its first step goes on with the handshake."""
    if arriving.cancelled():
        with contextlib.suppress(OSError):
            accepted.shutdown(socket.SHUT_RDWR)


class _Arrival(NamedTuple):
    """A connection before its TLS handshake."""

    task: asyncio.Task[None]

    def abort(self) -> None:
        """End it: there are too many of them."""
        self.task.cancel()


def _listen(address: str) -> socket.socket:
    """Raises ConfigError."""
    host, port = parse(address or "tls://127.0.0.1:0", "tls")
    try:
        return listening_socket(host, port, BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {address}: {error.strerror or error}; choose another address"
        ) from None
