"""For authors of plug-ins: the contracts of `kvpool.protocols`, as checks to run.

`check_transport`, `check_tier`, `check_policy` and `check_connector` run all of
them; four tables have them one by one, for a test runner to parametrise over. Nothing here needs a
test runner.
"""

from kvpool.testing.conformance import (
    CONNECTOR_CHECKS,
    POLICY_CHECKS,
    TIER_CHECKS,
    TRANSPORT_CHECKS,
    ConformanceError,
    NotDeclared,
    check_connector,
    check_policy,
    check_tier,
    check_transport,
)
from kvpool.testing.connector_checks import VARIANTS, Ran, TestedEngine

__all__ = [
    "CONNECTOR_CHECKS",
    "POLICY_CHECKS",
    "TIER_CHECKS",
    "TRANSPORT_CHECKS",
    "VARIANTS",
    "ConformanceError",
    "NotDeclared",
    "Ran",
    "TestedEngine",
    "check_connector",
    "check_policy",
    "check_tier",
    "check_transport",
]
