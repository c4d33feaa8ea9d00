"""The certificate that a master shows: made when it starts, and known by no authority.

Whose it is the proofs say, which cover its hash (`kvpool.net.secret_sessions`). Clients of tenants
know a secret with which they could prove as much to each other, so they are given the hash, too. In
a pool with tenants it is therefore the same at every start and of all masters: its key is made from
the cluster's secret. Whoever connects sees that certificate, and could try guesses of the secret on
it; each one costs him what it costs us, a tenth of a second. (design: authentication)
"""

from __future__ import annotations

import datetime
import hashlib
import os
import secrets
import ssl
from functools import lru_cache
from typing import Any, Final, NamedTuple

from kvpool.types import Cluster

#: scrypt (RFC 7914): 32 MiB and a tenth of a second for each guess.
_COST: Final = {"n": 1 << 15, "r": 8, "p": 1, "maxmem": 1 << 26}
#: Nobody looks at it, and with another one the hash would be another one.
_VALID: Final = (datetime.datetime(2020, 1, 1), datetime.datetime(2120, 1, 1))


class Certificate(NamedTuple):
    """TLS for a master, and the hash of the certificate that it shows."""

    context: ssl.SSLContext
    hash: bytes


def masters_certificate(cluster: Cluster, *, tenants: bool) -> Certificate:
    """That of a master that starts now."""
    key, certificate = _make(_seed_of(cluster) if tenants else secrets.token_bytes(32))
    from cryptography.hazmat.primitives import serialization as form

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    pem = certificate.public_bytes(form.Encoding.PEM) + key.private_bytes(
        form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()
    )
    # ssl reads files alone. This one is memory of this process: the key is on no disk, and a host
    # without a place for temporary files serves, too.
    with open(os.memfd_create("certificate"), "w+b", buffering=0) as file:
        file.write(pem)
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return Certificate(context, _hash(certificate))


@lru_cache(maxsize=4)
def masters_fingerprint(cluster: Cluster) -> bytes:
    """The hash of the certificate of all masters of a pool with tenants."""
    return _hash(_make(_seed_of(cluster))[1])


def _hash(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return hashlib.sha256(certificate.public_bytes(Encoding.DER)).digest()


@lru_cache(maxsize=4)
def _seed_of(cluster: Cluster) -> bytes:
    salt = b"kvpool masters 1" + hashlib.sha256(cluster.name.encode()).digest()
    return hashlib.scrypt(cluster.secret, salt=salt, dklen=32, **_COST)


def _make(seed: bytes) -> tuple[Any, Any]:
    """A key and its certificate, the same for the same seed."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kvpool")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, *_VALID)
    return key, builder.sign(key, None)
