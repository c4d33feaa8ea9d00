"""The connector's settings: `kv_connector_extra_config`, with unit, default and reason."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvpool import ClientConfig, Cluster, ConfigError, read_secret

Seconds = Annotated[float, Meta(gt=0, le=3600)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    #: Any master that answers is good.
    masters: Annotated[list[str], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: ["127.0.0.1:7450"]
    )
    cluster: str = "default"
    #: A file with the cluster's secret, if it has one.
    secret_file: str = ""
    #: Transports that may be used, best first.
    transports: Annotated[list[str], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: ["shm", "tcp"]
    )
    #: Whose blocks these are: tenants share nothing.
    tenant: str = "default"
    #: The model's name in the pool; empty: the last part of the path or id that the engine got.
    model: str = ""
    #: Which weights these are; empty: a fingerprint of the weight files.
    revision: str = ""
    #: `auto` loads what is estimated to come faster than it is computed; `always` and `never`
    #: are for trials.
    load: Literal["auto", "always", "never"] = "auto"
    #: Hits of fewer tokens are not worth a load.
    hit_tokens_min: Annotated[int, Meta(ge=1)] = 1
    #: A lookup that is not back by then is a miss.
    lookup_timeout_s: Seconds = 0.05
    #: A load that is not back by then is recomputed; often it is given up earlier (planner.py).
    load_timeout_s: Seconds = 10.0
    #: A save that is not acknowledged by then lets go of the engine's blocks.
    save_timeout_s: Seconds = 10.0
    #: How long the engine's start may wait for the pool, without which it serves alone, and a first
    #: request for the workers' first word.
    start_wait_s: Annotated[float, Meta(ge=0, le=3600)] = 1.0
    #: Save what was generated, too: the next turn of a conversation contains it.
    save_decode: bool = True
    #: Loads at once; beyond it prompts are recomputed.
    loads_max: Count = 32
    #: Reads that one process has under way at once, and half as many writes beside them.
    transfers_max: Count = 4
    #: Share of the engine's blocks that saves may keep from being reused; the others wait.
    save_share_max: Annotated[float, Meta(gt=0, le=1)] = 0.25
    #: A refused save is tried again this often, while its blocks are still there.
    save_retries: Annotated[int, Meta(ge=0, le=100)] = 3
    #: Servers that each block is written to.
    copies: Annotated[int, Meta(ge=1, le=16)] = 1
    #: While loads are refused for being slow, the pool's speed is tried this often, by reading
    #: a few blocks that nobody waits for.
    probe_every_s: Seconds = 5.0

    def client(self) -> ClientConfig:
        return ClientConfig(masters=self.masters, transports=self.transports)

    def member(self) -> Cluster:
        """The cluster, with its secret. Raises ConfigError when that cannot be read."""
        return Cluster(self.cluster, read_secret(self.secret_file))


def parse(given: Mapping[str, Any]) -> Settings:
    """The settings of an engine. Raises ConfigError: one sentence that names the setting."""
    known = [field.name for field in msgspec.structs.fields(Settings)]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 1, 0.4)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise ConfigError(f"kv_connector_extra_config: unknown setting {name!r}; {hint}")
    try:
        settings = msgspec.convert(dict(given), Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from None
    for master in settings.masters:
        _check_address(master)
    return settings


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"kv_connector_extra_config: master {address!r}: expected host:port, "
            "such as 127.0.0.1:7450"
        )
