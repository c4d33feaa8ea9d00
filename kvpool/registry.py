"""From a name to an implementation, by entry points.

A third party adds a transport, a tier or a policy by declaring it in its own `pyproject.toml`;
nothing here changes. Only declared entry points are loaded: a name from a message or a file is
looked up among them, never imported.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvpool import logs
from kvpool.config import ServerConfig, TierSpec, TransportSpec, parse_tier, parse_transport
from kvpool.errors import ConfigError
from kvpool.protocols import Tier, Transport
from kvpool.protocols.policy import Policy
from kvpool.units import parse_bool, parse_duration, parse_size

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

TRANSPORTS = "kvpool.transports"
TIERS = "kvpool.tiers"
POLICIES = "kvpool.policies"

Setting = bool | int | float | str

log = logs.get("kvpool.registry")


def installed(group: str) -> dict[str, EntryPoint]:
    """What is declared in a group, by name."""
    from importlib.metadata import entry_points  # not at the top (design: layout)

    return {entry.name: entry for entry in entry_points(group=group)}


def transport(spec: str) -> Transport:
    """A new transport from `scheme`, `scheme?setting=value` or an address with settings.

    Raises ConfigError when it is not installed, cannot be loaded, or has no such setting.
    `settings_of` explains the settings.
    """
    scheme, _, settings = parse_transport(spec)
    make = _load(TRANSPORTS, scheme, "transport")
    made: Transport = make(**settings_of(make, settings, f"transport {scheme!r}"))
    return made


def transports(specs: Iterable[str], *, strict: bool = False) -> dict[str, Transport]:
    """The installed transports among `specs`, by scheme, in that order; at least one must be.

    A transport that is installed may lack a package that it needs. It is left out, because a client
    has others, and `kvpool doctor` shows what is missing. With `strict` that is a ConfigError. A
    wrong setting is always a ConfigError.
    """
    known = installed(TRANSPORTS)
    wanted: dict[str, TransportSpec] = {}
    for spec in map(parse_transport, specs):
        first = wanted.setdefault(spec.scheme, spec)
        if spec.settings != first.settings:
            raise ConfigError(f"transport {spec.scheme!r} is given twice with different settings")
    found: dict[str, Transport] = {}
    missing = []
    for scheme, spec in wanted.items():
        if scheme not in known:
            continue
        try:
            make = _load(TRANSPORTS, scheme, "transport")
        except ConfigError as error:
            if strict:
                raise
            missing.append(str(error))
            continue
        values = settings_of(make, spec.settings, f"transport {scheme!r}")
        try:
            found[scheme] = make(**values)
        except ConfigError as error:
            if strict:
                raise
            missing.append(str(error))
            report = log.warning if values else log.debug
            report("transport left out", scheme=scheme, why=str(error))
    if not found:
        raise ConfigError(
            "; ".join(missing)
            or f"none of the transports {list(wanted)} is installed; installed: {sorted(known)}"
        )
    return found


def check_settings(specs: Iterable[str]) -> None:
    """Raises ConfigError for a setting that a transport does not have, or of another type.

    Transports that are not installed, or cannot be loaded, are not looked at.
    """
    known = installed(TRANSPORTS)
    for scheme, _, settings in map(parse_transport, specs):
        if settings and scheme in known:
            try:
                make = _load(TRANSPORTS, scheme, "transport")
            except ConfigError:
                continue
            settings_of(make, settings, f"transport {scheme!r}")


def check_transports(specs: Collection[str]) -> None:
    """Raises ConfigError for a transport that is not installed, and for a wrong setting of one.

    For a program that asks for these and no others. A client leaves transports out that are not
    installed, so one whose only transport is misspelt would never find a pool.
    """
    known = sorted(installed(TRANSPORTS))
    for scheme, _, _ in map(parse_transport, specs):
        if scheme not in known:
            close = difflib.get_close_matches(scheme, known, 1, 0.5)
            meant = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(f"unknown transport {scheme!r}; {meant}installed: {', '.join(known)}")
    check_settings(specs)


def tiers(config: ServerConfig, *, prefault: bool = True) -> list[Tier]:
    """A server's tiers, opened, in their order. Raises ConfigError; then none is left open.

    With `prefault` memory is touched in the background, because the first write to a page is slow.
    """
    specs = [parse_tier(text) for text in config.tiers] or [
        TierSpec("dram", "", config.capacity, {})
    ]
    makers = [_load(TIERS, spec.name, "tier") for spec in specs]
    end = max(1, len(specs) - getattr(makers[-1], "is_cold", False))
    below = end - 1  # where the lowest level begins: several files are one, if they can be
    joined = getattr(makers[below], "joined", None)
    while below and joined and specs[below - 1].name == specs[end - 1].name:
        below -= 1
    if any(getattr(make, "survives_restart", False) for make in makers[:below]):
        raise ConfigError("a tier that survives restarts holds all blocks: put it last")
    if not any(hasattr(make, "view") for make in makers):
        raise ConfigError(
            f"tiers {', '.join(spec.name for spec in specs)}: clients cannot reach any of them; "
            "put dram first, such as dram:1GiB"
        )
    opened: list[Tier] = []
    try:
        for spec in specs:  # one at a time, so that those already open can be closed
            opened += [tier(spec, prefault=prefault)]
        if joined and below < end - 1:
            opened[below:end] = [joined(opened[below:end])]
    except BaseException:
        for one in opened:
            one.close()
        raise
    return opened


def tier(spec: TierSpec, *, prefault: bool = True) -> Tier:
    """Open one tier. Raises ConfigError.

    Its constructor takes the capacity in bytes, then, if it has one, its place as text, and
    settings as `settings_of` explains. One called `prefault`, if it has it, is what the caller says
    unless the text says otherwise.
    """
    make = _load(TIERS, spec.name, "tier")
    parameters = inspect.signature(make).parameters
    values = settings_of(make, spec.settings, f"tier {spec.name!r}")
    if "prefault" in parameters:
        values.setdefault("prefault", prefault)
    places = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    if spec.place and not places:
        raise ConfigError(f"tier {spec.name!r} takes no path, got {spec.place!r}")
    if not spec.place and places and places[0].default is places[0].empty:
        raise ConfigError(
            f"tier {spec.name!r} needs a {places[0].name}: {spec.name}:<{places[0].name}>:<size>"
        )
    made: Tier = make(spec.capacity, *([spec.place] if spec.place else []), **values)
    return made


def settings_of(
    make: Callable[..., Any], settings: Mapping[str, str], what: str
) -> dict[str, Setting]:
    """Settings from text to what the constructor `make` of a transport or tier takes.

    Its keyword-only parameters with a default are its settings, and the default gives the type:

    | default | text |
    |---|---|
    | bool  | `yes`, `no`, `true`, `false`, `1`, `0` |
    | int   | a number or a size: `32`, `16MiB` |
    | float | a number; a duration if the name ends in `_s`: `0.9`, `250ms` |
    | str   | the text itself |

    Raises ConfigError for an unknown setting and for a value of another type.
    """
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(make).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and isinstance(parameter.default, Setting)
    }
    values: dict[str, Setting] = {}
    for name, text in settings.items():
        if name not in defaults:
            known = ", ".join(defaults) or "none"
            raise ConfigError(f"{what} has no setting {name!r}; its settings: {known}")
        try:
            values[name] = _from_text(text, defaults[name], name)
        except ConfigError as error:
            raise ConfigError(f"{what}: {error}") from None
        except ValueError:
            raise ConfigError(f"{what}: setting {name!r} is {text!r}, expected a number") from None
    return values


def _from_text(text: str, default: Setting, name: str) -> Setting:
    if isinstance(default, bool):
        return parse_bool(text, name)
    try:
        if isinstance(default, int):
            return parse_size(text)
        if isinstance(default, float) and name.endswith("_s"):
            return parse_duration(text)
    except ConfigError as error:
        raise ConfigError(f"setting {name!r}: {error}") from None
    return float(text) if isinstance(default, float) else text


def policy(name: str, capacity: int) -> Policy[Any]:
    """A new policy for a store of `capacity` bytes. Raises ConfigError when there is none.

    Without a name the default: `density`, or `lru` in an installation that has no other.
    """
    try:
        make = _load(POLICIES, name or "density", "policy")
    except ConfigError as error:
        if name:
            raise
        log.warning("the default policy is not installed", instead="lru", why=str(error))
        make = _load(POLICIES, "lru", "policy")
    made: Policy[Any] = make(capacity)
    return made


def pool_tier(tiers: Sequence[Tier]) -> Tier:
    """The one that holds the pool: the lowest but for a cold one."""
    return next(tier for tier in reversed(tiers) if not getattr(tier, "is_cold", False))


def _load(group: str, name: str, what: str) -> Callable[..., Any]:
    known = installed(group)
    if name not in known:
        raise ConfigError(f"no {what} {name!r} is installed; installed: {sorted(known)}")
    try:
        loaded: Callable[..., Any] = known[name].load()
    except ImportError as error:
        raise ConfigError(f"{what} {name!r} is installed but cannot be loaded: {error}") from None
    return loaded
