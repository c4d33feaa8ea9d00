"""Without the ring: a process that knows no tenant admits none, and does not begin to."""

from __future__ import annotations

import pytest

from kvpool import ConfigError
from kvpool.errors import Forbidden
from kvpool.guard import Guard
from kvpool.tenants import TenantKeys
from kvpool.wire import messages as wire


def test_a_process_without_tenants_takes_no_secrets_of_theirs() -> None:
    with pytest.raises(ConfigError, match="runs without tenants"):
        Guard(TenantKeys())  # of an empty file, too


def test_no_tenant_is_admitted_or_answered_without_the_ring() -> None:
    guard = Guard(None)
    assert guard.secrets_of("acme") == guard.secrets_of("") == ()
    request = wire.Members()
    guard.check("", request)
    with pytest.raises(Forbidden):
        guard.check("acme", request)
