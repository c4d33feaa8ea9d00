"""Whose blocks a tier keeps, and with which key it encrypts them."""

from __future__ import annotations

import hashlib
import hmac

from kvpool.errors import ConfigError
from kvpool.types import Cluster


def file_owner(cluster: Cluster) -> bytes:
    """What names this cluster in a server's files, 16 bytes. It differs with name and secret."""
    return hmac.digest(cluster.secret, b"kvpool file 1" + _name(cluster), "sha256")[:16]


def storage_key(cluster: Cluster) -> bytes:
    """What a server's tiers derive the keys from with which they encrypt, 32 bytes.

    HKDF-SHA256 (RFC 5869), extracted and expanded to one block. Raises ConfigError for a cluster
    without a secret: everybody would have the key.
    """
    if not cluster.secret:
        raise ConfigError("a tier with encrypt=yes needs the cluster's secret (secret_file)")
    extracted = hmac.digest(b"kvpool storage key 1", cluster.secret, "sha256")
    return hmac.digest(extracted, _name(cluster) + b"\x01", "sha256")


def _name(cluster: Cluster) -> bytes:
    return hashlib.sha256(cluster.name.encode()).digest()
