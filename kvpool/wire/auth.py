"""The cluster's secret: both sides prove that they know it, and neither says it.

Data plane, over any stream:

    client    Hello(cluster, client, nonce)
    server    Challenge(nonce, proof)          the server knows it, for this nonce of the client
    client    Proof(proof)                     and so does the client, for this one of the server
    server    Welcome

A proof is an HMAC-SHA256 over who proves and both nonces, so none is good for another connection or
for the other side. Control plane: zmq's CURVE, which encrypts, too; the master's long-term key is
made from the secret and its public half is never sent, so that who lacks the secret can say
nothing that the master would open, nor answer in its place.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from kvpool.types import Cluster

NONCE_SIZE: Final = 32
PROOF_SIZE: Final = 32
TOKEN_SIZE: Final = 16


def server_proof(cluster: Cluster, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """That a server knows the secret."""
    return _proof(cluster, b"server", client_nonce, server_nonce)


def client_proof(cluster: Cluster, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """That a client does."""
    return _proof(cluster, b"client", client_nonce, server_nonce)


def same(proof: bytes, expected: bytes) -> bool:
    """Compare in constant time, so that the time reveals nothing about `expected`."""
    return hmac.compare_digest(proof, expected)


def master_key(cluster: Cluster) -> bytes:
    """The master's secret key for CURVE, 32 bytes."""
    name = hashlib.sha256(cluster.name.encode()).digest()
    return hmac.digest(cluster.secret, b"kvpool master key 1" + name, "sha256")


def server_token(secret: bytes, master: str) -> bytes:
    """What a server shows to the master at this address, so that no other process has its id.

    Each master gets a token of its own: one that is no real master learns nothing that it could
    show to the others (design: server-identity).
    """
    return hmac.digest(secret, b"kvpool server token 1" + master.encode(), "sha256")[:TOKEN_SIZE]


def _proof(cluster: Cluster, side: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    name = hashlib.sha256(cluster.name.encode()).digest()
    message = b"kvpool proof 1" + side + name + client_nonce + server_nonce
    return hmac.digest(cluster.secret, message, "sha256")
