"""The cluster's secret: both sides prove that they know it, and neither says it.

Data plane, over any stream:

    client    Hello(cluster, client, nonce)
    server    Challenge(nonce, proof)          the server knows it, for this nonce of the client
    client    Proof(proof)                     and so does the client, for this one of the server
    server    Welcome

A proof is an HMAC-SHA256 over who proves and both nonces, so none is good for another connection or
for the other side. Control plane: the same proofs inside TLS, bound to its certificate, the
caller's first (`kvpool.net.secret_sessions`).

A client of a tenant proves the tenant's secret instead. Other clients of its tenant could prove
that, too, so it also knows the hash of the masters' certificate (design: tenants).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Annotated, Final

from msgspec import Meta

from kvpool.types import Cluster
from kvpool.wire.messages import KEY_ID_SIZE, NONCE_SIZE, Message, register

__all__ = [
    "NONCE_SIZE",
    "PROOF_SIZE",
    "Challenge",
    "Proof",
    "client_proof",
    "find_tenant",
    "key_id",
    "same",
    "server_proof",
]

PROOF_SIZE: Final = 32
ProofBytes = Annotated[bytes, Meta(min_length=PROOF_SIZE, max_length=PROOF_SIZE)]


class Challenge(Message, frozen=True):
    """The server knows the secret; does the client?"""

    nonce: Annotated[bytes, Meta(min_length=NONCE_SIZE, max_length=NONCE_SIZE)]
    proof: ProofBytes


class Proof(Message, frozen=True):
    """The client does; on the control plane, also the master."""

    proof: ProofBytes


register({Challenge: 16, Proof: 17})


def server_proof(
    cluster: Cluster, client_nonce: bytes, server_nonce: bytes, binding: bytes = b""
) -> bytes:
    """That a server knows the secret, and shows the certificate that `binding` is the hash of."""
    return _proof(cluster, b"server", client_nonce, server_nonce, binding)


def client_proof(
    cluster: Cluster, client_nonce: bytes, server_nonce: bytes, binding: bytes = b""
) -> bytes:
    """That a client knows the secret, and was shown that certificate."""
    return _proof(cluster, b"client", client_nonce, server_nonce, binding)


def same(proof: bytes, expected: bytes) -> bool:
    """Compare in constant time, so that the time reveals nothing about `expected`."""
    return hmac.compare_digest(proof, expected)


def key_id(cluster: Cluster, nonce: bytes) -> bytes:
    """Which of a tenant's secrets a client has. It differs with each nonce, so that who listens
    cannot count the clients of a tenant."""
    return hmac.digest(cluster.secret, b"kvpool key id 1" + nonce, "sha256")[:KEY_ID_SIZE]


def find_tenant(
    secrets: Iterable[bytes], cluster: Cluster, tenant: str, key: bytes, nonce: bytes
) -> Cluster | None:
    """The cluster as a client of that tenant sees it, if one of its `secrets` fits to the
    `key` of its `Hello`; None if there is none, or no such tenant."""
    for secret in secrets:
        seen = Cluster(cluster.name, secret, tenant)
        if same(key_id(seen, nonce), key):
            return seen
    return None


def _proof(
    cluster: Cluster, side: bytes, client_nonce: bytes, server_nonce: bytes, binding: bytes
) -> bytes:
    message = b"kvpool proof 1" + side + _names(cluster) + client_nonce + server_nonce + binding
    return hmac.digest(cluster.secret, message, "sha256")


def _names(cluster: Cluster) -> bytes:
    """What a proof or a key is good for: the cluster, and the tenant if there is one."""
    names = hashlib.sha256(cluster.name.encode()).digest()
    return names + hashlib.sha256(cluster.tenant.encode()).digest() if cluster.tenant else names
