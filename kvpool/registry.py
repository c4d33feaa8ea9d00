"""From a name to an implementation, by entry points.

A third party adds a transport, a tier or a policy by declaring it in its own `pyproject.toml`;
nothing here changes. Only declared entry points are ever loaded: a name from the wire or a file is
looked up among them, never imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvpool import logs
from kvpool.config import ServerConfig, TierSpec, parse_tier
from kvpool.errors import ConfigError
from kvpool.protocols import Tier, Transport
from kvpool.protocols.policy import Policy
from kvpool.units import parse_bool, parse_size

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

TRANSPORTS = "kvpool.transports"
TIERS = "kvpool.tiers"
POLICIES = "kvpool.policies"

log = logs.get("kvpool.registry")


def installed(group: str) -> dict[str, EntryPoint]:
    """What is declared in a group, by name."""
    from importlib.metadata import entry_points  # not at the top (design: import-time)

    return {entry.name: entry for entry in entry_points(group=group)}


def transport(scheme: str, settings: Mapping[str, str] | None = None) -> Transport:
    """A new transport of this scheme. Raises ConfigError when there is none or it cannot load.

    Its constructor takes nothing, or `settings` when there are any for its scheme.
    """
    make = _load(TRANSPORTS, scheme, "transport")
    made: Transport = make(settings) if settings else make()
    return made


def transports(
    schemes: Iterable[str],
    *,
    strict: bool = False,
    settings: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, Transport]:
    """Those of `schemes` that are installed, in that order; at least one must be.

    One that is declared may still lack what it stands on, an extra. It is left out, too: a client
    has others, and `kvpool doctor` says what is missing. With `strict` that is a ConfigError.
    `settings` are by scheme.
    """
    known = installed(TRANSPORTS)
    wanted = list(schemes)
    found: dict[str, Transport] = {}
    missing = []
    for scheme in wanted:
        if scheme in known:
            try:
                found[scheme] = transport(scheme, (settings or {}).get(scheme))
            except ConfigError as error:
                if strict:
                    raise
                missing.append(str(error))
                log.debug("transport left out", scheme=scheme, why=str(error))
    if not found:
        raise ConfigError(
            "; ".join(missing)
            or f"none of the transports {wanted} is installed: have {sorted(known)}"
        )
    return found


def tiers(config: ServerConfig) -> list[Tier]:
    """A server's tiers, opened, in their order. Raises ConfigError; then none is left open."""
    specs = [parse_tier(text) for text in config.tiers] or [
        TierSpec("dram", "", config.capacity, {})
    ]
    makers = [_load(TIERS, spec.name, "tier") for spec in specs]
    if any(getattr(make, "survives_restart", False) for make in makers[:-1]):
        raise ConfigError("a tier that survives restarts holds the pool: put it last")
    if not any(hasattr(make, "view") for make in makers):
        raise ConfigError(
            f"tiers {', '.join(spec.name for spec in specs)}: clients can reach none of them; "
            "put dram first, such as dram:1GiB"
        )
    opened: list[Tier] = []
    try:
        for spec in specs:  # one by one, so that those opened are known
            opened += [tier(spec, prefault=config.prefault)]
    except BaseException:
        for one in opened:
            one.close()
        raise
    return opened


def tier(spec: TierSpec, *, prefault: bool = True) -> Tier:
    """Open one tier. Raises ConfigError.

    Its constructor takes the capacity in bytes, then, if it has one, its place as text, and
    settings by name, whose defaults say what kind of value each is. One called `prefault` is set
    from the server's configuration.
    """
    make = _load(TIERS, spec.name, "tier")
    parameters = inspect.signature(make).parameters
    settings = {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
        and isinstance(parameter.default, bool | int | float | str)
    }
    values: dict[str, bool | int | float | str] = {}
    if "prefault" in settings:
        values["prefault"] = prefault
    for name, text in spec.settings.items():
        if name not in settings:
            known = ", ".join(settings) or "none"
            raise ConfigError(f"tier {spec.name!r} has no setting {name!r}; it has: {known}")
        values[name] = _converted(text, settings[name], f"{spec.name} {name}")
    places = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    if spec.place and not places:
        raise ConfigError(f"tier {spec.name!r} lies nowhere in particular: got {spec.place!r}")
    if not spec.place and places and places[0].default is places[0].empty:
        raise ConfigError(
            f"tier {spec.name!r} needs a {places[0].name}: {spec.name}:<{places[0].name}>:<size>"
        )
    made: Tier = make(spec.capacity, *([spec.place] if spec.place else []), **values)
    return made


def _converted(text: str, like: bool | int | float | str, name: str) -> bool | int | float | str:
    """`text` as a value of the type of `like`; whole numbers may be sizes."""
    if isinstance(like, bool):
        return parse_bool(text, name)
    if isinstance(like, int):
        try:
            return parse_size(text)
        except ConfigError as error:
            raise ConfigError(f"setting {name!r}: {error}") from None
    if isinstance(like, float):
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"setting {name!r}: {text!r} is no number") from None
    return text


def policy(name: str, capacity: int) -> Policy[Any]:
    """A new policy for a store of `capacity` bytes. Raises ConfigError when there is none."""
    made: Policy[Any] = _load(POLICIES, name, "policy")(capacity)
    return made


def _load(group: str, name: str, what: str) -> Callable[..., Any]:
    known = installed(group)
    if name not in known:
        raise ConfigError(f"no {what} {name!r} is installed: have {sorted(known)}")
    try:
        loaded: Callable[..., Any] = known[name].load()
    except ImportError as error:
        raise ConfigError(f"{what} {name!r} is installed but cannot be loaded: {error}") from None
    return loaded
