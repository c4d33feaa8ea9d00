"""For authors of transports and tiers: the contracts of `kvpool.protocols`, as checks to run.

`check_transport` and `check_tier` run all of them; the two tables have them one by one, for a
test runner to parametrise over. Nothing here needs a test runner.
"""

from kvpool.testing.conformance import (
    TIER_CHECKS,
    TRANSPORT_CHECKS,
    ConformanceError,
    NotDeclared,
    check_tier,
    check_transport,
)

__all__ = [
    "TIER_CHECKS",
    "TRANSPORT_CHECKS",
    "ConformanceError",
    "NotDeclared",
    "check_tier",
    "check_transport",
]
