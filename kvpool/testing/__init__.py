"""For authors of plug-ins: the contracts of `kvpool.protocols`, as checks to run.

`check_transport`, `check_tier` and `check_policy` run all of them; the three tables have them one
by one, for a test runner to parametrise over. Nothing here needs a test runner.
"""

from kvpool.testing.conformance import (
    POLICY_CHECKS,
    TIER_CHECKS,
    TRANSPORT_CHECKS,
    ConformanceError,
    NotDeclared,
    check_policy,
    check_tier,
    check_transport,
)

__all__ = [
    "POLICY_CHECKS",
    "TIER_CHECKS",
    "TRANSPORT_CHECKS",
    "ConformanceError",
    "NotDeclared",
    "check_policy",
    "check_tier",
    "check_transport",
]
