"""The public face of the kit: run every check, or take them one by one.

    await check_transport(CarrierTransport)
    await check_tier(lambda capacity: FileTier(path, capacity))
    check_policy(MyPolicy)
    check_connector(make_engine)

or, with a test runner:

    @pytest.mark.parametrize("check", TRANSPORT_CHECKS.values(), ids=TRANSPORT_CHECKS)
    async def test_carrier(check):
        await check(CarrierTransport)

A check that fails raises ConformanceError, which names the check, what was expected and what
happened instead. Each opens its own server and may be run alone; all take well under a second,
except those of connectors, which run engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final, TypeAlias, TypeVar

from kvpool.errors import KvpoolError
from kvpool.protocols import Policy, Tier, Transport
from kvpool.testing import (
    channel_checks,
    connector_checks,
    loop_checks,
    ownership_checks,
    policy_checks,
    policy_costs,
    tier_checks,
    transport_checks,
)
from kvpool.testing import lifecycle_checks as ending_checks
from kvpool.testing.connector_checks import ConnectorCheck, MakeEngine
from kvpool.testing.harness import ConformanceError, NotDeclared, TransportCheck
from kvpool.testing.policy_checks import PolicyCheck
from kvpool.testing.tier_checks import TierCheck

__all__ = [
    "CONNECTOR_CHECKS",
    "POLICY_CHECKS",
    "TIER_CHECKS",
    "TRANSPORT_CHECKS",
    "ConformanceError",
    "NotDeclared",
    "check_connector",
    "check_policy",
    "check_tier",
    "check_transport",
]

C = TypeVar("C")

#: The checks that did not apply, by name, and why.
LeftOut: TypeAlias = dict[str, str]


def _defined(kind: type[C], *modules: ModuleType) -> dict[str, C]:
    """The checks of this kind that the modules define, in their order."""
    things = [item for module in modules for item in vars(module).items()]
    return {name: thing for name, thing in things if isinstance(thing, kind)}


def _installed(*names: str) -> list[ModuleType]:
    """The modules of rings that are there."""
    return [import_module(name) for name in names if find_spec(name) is not None]


#: Every check, by name. One about a capability that is not declared raises NotDeclared.
TRANSPORT_CHECKS: Final = _defined(
    TransportCheck,
    transport_checks,
    ending_checks,
    channel_checks,
    ownership_checks,
    loop_checks,
    *_installed("kvpool.testing.move_checks", "kvpool.testing.device_checks"),
)
TIER_CHECKS: Final = _defined(
    TierCheck,
    tier_checks,
    *_installed("kvpool.testing.record_checks", "kvpool.testing.durability_checks"),
    loop_checks,
)
POLICY_CHECKS: Final = _defined(PolicyCheck, policy_checks, policy_costs)
CONNECTOR_CHECKS: Final = _defined(ConnectorCheck, connector_checks)


def _some_ran(checks: Sized, left_out: LeftOut) -> LeftOut:
    """Raises ConformanceError where nothing was checked: that is no success."""
    if len(left_out) == len(checks):
        name, why = next(iter(left_out.items()))
        raise ConformanceError(name, "at least one check that applies", f"none does: {why}")
    return left_out


async def check_transport(make: Callable[[], Transport], *, address: str = "") -> LeftOut:
    """Everything that `Transport`, `Listener`, `Channel` and the capabilities that a channel
    declares (`SupportsZeroCopyView`, `SupportsDeviceRead`, `SupportsDeviceWrite`) promise.

    `make` is called once for the server's side of each check and once for the client's, which in
    production are two processes; a transport that lives inside one process returns the same
    instance each time. The server listens at `address`, or where the transport likes.
    Raises ConformanceError at the first check that fails. Returns what was not checked, and why.
    """
    left_out: LeftOut = {}
    for name, check in TRANSPORT_CHECKS.items():
        try:
            await check(make, address=address)
        except NotDeclared as why:
            left_out[name] = str(why)
    return _some_ran(TRANSPORT_CHECKS, left_out)


async def check_tier(make: Callable[[int], Tier]) -> LeftOut:
    """Everything that `Tier` and the capabilities that it declares (`Addressable`, `Mappable`,
    `PersistentTier`, `DeviceAddressable`, ...) promise.

    `make` gets a capacity. For a tier that survives a restart it opens the same storage each time.
    Raises ConformanceError at the first check that fails. Returns what was not checked, and why.
    """
    left_out: LeftOut = {}
    for name, check in TIER_CHECKS.items():
        try:
            await _emptied(make)
            await check(make)
        except NotDeclared as why:
            left_out[name] = str(why)
    return _some_ran(TIER_CHECKS, left_out)


async def _emptied(make: Callable[[int], Tier]) -> None:
    """Storage that is opened again for the next check has no records of the one before."""
    tier = make(tier_checks.CAPACITY)
    try:
        if hasattr(tier, "recover") and hasattr(tier, "erase"):
            found = [one.offset for one in await tier.recover()]
            await tier.erase(found)
    except KvpoolError:  # a wrong tier, or contents of another owner: the check says so
        pass
    finally:
        tier.close()


def check_policy(make: Callable[[int], Policy[Any]]) -> LeftOut:
    """Everything that `Policy` and `LearnsFromArrivals` promise, alone and in a real store.

    `make` gets the capacity of a store in bytes. Raises ConformanceError at the first check that
    fails. Returns what was not checked, and why.
    """
    return _each(POLICY_CHECKS, make)


def check_connector(make: MakeEngine) -> LeftOut:
    """What the engines that `make` starts promise their users, with every kind of pool.

    `make` gets the address of a master, or "" for no pool, and "" or one of `VARIANTS`: what
    differs about this engine. It raises NotDeclared for what it cannot vary. The engines load
    whatever the pool has, also where computing is faster. Raises ConformanceError at the first
    check that fails. Returns what was not checked, and why.
    """
    return _each(CONNECTOR_CHECKS, make)


def _each(checks: Mapping[str, Callable[[Any], None]], make: Any) -> LeftOut:
    left_out: LeftOut = {}
    for name, check in checks.items():
        try:
            check(make)
        except NotDeclared as why:
            left_out[name] = str(why)
    return _some_ran(checks, left_out)
