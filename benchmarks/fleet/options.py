"""What a fleet is, and what happens to it."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from benchmarks.fleet.constants import Constants
from benchmarks.fleet.routers import ROUTERS
from benchmarks.fleet.sessions import LOADS
from kvpool import config, registry
from kvpool.errors import ConfigError
from kvpool.tools.dry_pool import Placing
from kvpool.tools.traces import AUTO

#: An instance is 4 GPUs that prefill and 8 that decode.
GPUS_PER_INSTANCE: Final = 12
#: A mixed engine prefills and decodes on as many as prefill there.
GPUS_PER_MIXED: Final = 4


class Scope(enum.Enum):
    """What lies under the engines' device memory."""

    NONE = "none"
    LOCAL = "local"
    POOL = "pool"

    @classmethod
    def parsed(cls, text: str) -> Scope:
        """Of its name. Raises ConfigError."""
        try:
            return cls(text)
        except ValueError:
            raise ConfigError(f"scope {text!r}: expected none, local or pool") from None


class Hints(enum.Flag):
    """What clients and engines tell the pool of sessions. With any of them a write names its
    session, so that branches that a session has left are superseded."""

    NONE = 0
    END = enum.auto()  # a session has had its last answer
    ARRIVAL = enum.auto()  # a prompt has come and waits
    RESUME = enum.auto()  # after each answer: when the next prompt is expected
    ALL = END | ARRIVAL | RESUME

    @classmethod
    def parsed(cls, text: str) -> Hints:
        """Of names with commas between: `end,arrival`. Raises ConfigError."""
        hints = cls.NONE
        for name in text.split(",") if text else []:
            try:
                hints |= cls[name.strip().upper()]
            except KeyError:
                names = ", ".join(str(one.name).lower() for one in [*cls, cls.ALL])
                raise ConfigError(f"hint {name.strip()!r}: expected some of {names}") from None
        return hints


class Incident(NamedTuple):
    """At `at_s` a `server` or an `engine` with this number is lost, or all `masters` for `number`
    seconds; or it is a `restart` of the server with this number, which is killed with -9, or a
    `drain`: it hands its blocks over, in `DRAIN_S` at most, and leaves.

    A server of a pool that is lost does not come back; one that restarts has what is on its disk.
    An engine restarts with empty device memory, and the host memory of an engine that shares
    nothing restarts with what is on its disk, too.
    """

    at_s: float
    kind: str
    number: int

    @classmethod
    def parsed(cls, text: str) -> Incident:
        """Of `SECONDS:server:NUMBER`, `SECONDS:engine:NUMBER`, `SECONDS:restart:NUMBER`,
        `SECONDS:drain:NUMBER` or `SECONDS:masters:SECONDS`."""
        parts = text.split(":")
        try:
            at_s, kind, number = float(parts[0]), parts[1], int(parts[2])
        except (ValueError, IndexError):
            at_s, kind, number = math.nan, "", -1
        if len(parts) != 3 or kind not in _INCIDENTS or not 0 <= at_s < math.inf or number < 0:
            raise ConfigError(
                f"incident {text!r}: expected SECONDS:KIND:NUMBER with a kind of "
                f"{', '.join(_INCIDENTS)}, e.g. 1500:server:3"
            )
        return cls(at_s, kind, number)


_INCIDENTS: Final = ("server", "engine", "masters", "restart", "drain")
#: Seconds for which a server is drained at most: `--drain` of deploy/kubernetes.
DRAIN_S: Final = 240.0


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """`sessions` in all, `concurrent` of them at a time; `memory_tokens` of all servers together.

    `resume_error` is the relative error of the pauses that are announced (the sigma of a lognormal
    factor); `events_late_s` how late a precise router learns what engines hold; with `admit` as
    many sessions are served at a time as the pool says that fit, and others wait; `hog_prompts_s`
    prompts a second of another client, which nobody asks for again. That client is another tenant,
    and `guaranteed` is the share of the memory that the sessions' tenant has for itself. With
    `trace` the prompts of that file come at `trace_rate` times their speed, and no `load`. `block`
    in tokens. `engines` are split (some prefill and others decode) or mixed. `disk_tokens` fit on
    the disks below the servers' memory, which is written through or back (`write_mode`). With
    `disk_turns` a disk reads and writes in turns, else beside each other. With `direct`, engines
    read what lies on their own host at the rate of host memory. With `spread`, an agent's context
    is brought to all hosts when it begins to wait for its children. Raises ConfigError.
    """

    gpus: int = GPUS_PER_INSTANCE
    load: str = "codex"
    sessions: int = 610
    concurrent: int = 50
    scope: Scope = Scope.POOL
    router: str = "round-robin"
    events_late_s: float = 0.5
    policy: str = "lru"
    planner: str = "auto"
    hints: Hints = Hints.NONE
    resume_error: float = 0.25
    admit: bool = False
    hog_prompts_s: float = 0.0
    guaranteed: float = 0.0
    incidents: Sequence[Incident] = ()
    memory_tokens: int | None = None
    disk_tokens: int = 0
    write_mode: str = config.WRITE_THROUGH
    disk_turns: bool = False
    placing: Placing = Placing.CHAINS
    direct: bool = False
    spread: bool = False
    block: int = 512
    engines: str = "split"
    trace: str | None = None
    trace_format: str = AUTO
    time_unit: str | None = None
    trace_rate: float = 1.0
    seed: int = 1
    constants: Constants = field(default_factory=Constants)

    def __post_init__(self) -> None:
        if self.gpus < GPUS_PER_INSTANCE or self.gpus % GPUS_PER_INSTANCE:
            raise ConfigError(f"gpus: {self.gpus} is not a multiple of {GPUS_PER_INSTANCE}")
        if self.load not in LOADS:
            raise ConfigError(f"load {self.load!r}: expected one of {', '.join(LOADS)}")
        if self.planner not in ("auto", "always", "never"):
            raise ConfigError(f"planner {self.planner!r}: expected auto, always or never")
        if self.router not in ROUTERS:
            raise ConfigError(f"router {self.router!r}: expected one of {', '.join(ROUTERS)}")
        registry.policy(self.policy, 1 << 30)  # raises for a name that is not installed
        if not 0 < self.concurrent <= self.sessions:
            raise ConfigError(f"concurrent: {self.concurrent} is not 1 to {self.sessions} sessions")
        if not 16 <= self.block <= 4096:
            raise ConfigError(f"block: {self.block} tokens, expected 16 to 4096")
        if self.disk_tokens < 0:
            raise ConfigError(f"disk_tokens: {self.disk_tokens} is not a number from 0 on")
        if self.write_mode not in (config.WRITE_THROUGH, config.WRITE_BACK):
            raise ConfigError(
                f"write_mode {self.write_mode!r}: expected {config.WRITE_THROUGH} or "
                f"{config.WRITE_BACK}"
            )
        if self.engines not in ("split", "mixed"):
            raise ConfigError(f"engines {self.engines!r}: expected split or mixed")
        if not 0 < self.trace_rate < math.inf:
            raise ConfigError(f"trace_rate: {self.trace_rate} is not a number above 0")
        for name in ("resume_error", "events_late_s", "hog_prompts_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name}: {getattr(self, name)} is not a number from 0 on")
        if not 0 <= self.guaranteed <= 1:
            raise ConfigError(f"guaranteed: {self.guaranteed} is not a share from 0 to 1")
        if self.disk_tokens and any(one.kind == "drain" for one in self.incidents):
            raise ConfigError("incident: a drain of servers with disks is not modelled")
        if self.disk_turns and not self.disk_tokens:
            raise ConfigError("disk_turns: there are no disks; give disk_tokens, too")
        for incident in self.incidents:
            if incident.kind != "masters" and incident.number >= self.instances:
                what = "engine" if incident.kind == "engine" else "server"
                raise ConfigError(
                    f"incident: there is no {what} {incident.number}, "
                    f"the fleet has {self.instances}"
                )

    @property
    def instances(self) -> int:
        """Engines that prefill: of mixed ones each has four GPUs, too."""
        each = GPUS_PER_INSTANCE if self.engines == "split" else GPUS_PER_MIXED
        return self.gpus // each

    @property
    def memory(self) -> int:
        """Tokens that fit into the memory of all servers together."""
        default = int(self.constants.pool_tokens) * (self.gpus // GPUS_PER_INSTANCE)
        return default if self.memory_tokens is None else self.memory_tokens
