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
    #: Host and port of the masters. One that answers is enough: each knows all blocks.
    masters: Annotated[list[str], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: ["127.0.0.1:7450"]
    )
    #: Name of the cluster; masters and servers of other clusters refuse the engine.
    cluster: str = "default"
    #: File with the cluster's secret. Empty: the cluster has no secret.
    secret_file: str = ""
    #: Transports to use, best first.
    transports: Annotated[list[str], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: ["shm", "tcp"]
    )
    #: Name of the tenant. Engines of different tenants share no blocks.
    tenant: str = "default"
    #: The model's name in the pool. Empty: the last part of the path or id passed to the engine.
    model: str = ""
    #: Name of this version of the weights. Empty: a fingerprint of the weight files.
    revision: str = ""
    #: `auto` loads a prefix if the estimate is that loading is faster than computing it; `always`
    #: and `never` are for experiments (design: load-or-recompute).
    load: Literal["auto", "always", "never"] = "auto"
    #: Tokens. A shorter hit is not loaded, because computing it costs less than the request.
    hit_tokens_min: Annotated[int, Meta(ge=1)] = 1
    #: Longest time that a request waits for its lookup. As a rule the planner gives a lookup less:
    #: half of the time that computing the prompt takes.
    lookup_timeout_s: Seconds = 1.0
    #: Time after which the engine computes a prompt instead of waiting for its load. The planner
    #: often ends a load earlier, when it takes much longer than estimated.
    load_timeout_s: Seconds = 10.0
    #: Time after which a save without an acknowledgement releases the engine's blocks.
    save_timeout_s: Seconds = 10.0
    #: Time for which the engine's start waits for the pool (without it the engine serves alone),
    #: and a first request for the workers' first message.
    start_wait_s: Annotated[float, Meta(ge=0, le=3600)] = 1.0
    #: Also save blocks of generated tokens, because the next turn of a conversation contains them.
    save_decode: bool = True
    #: Prompts that load at once; further prompts are computed.
    loads_max: Count = 32
    #: Reads that one process has under way at once; it may have half as many writes in addition.
    transfers_max: Count = 4
    #: Share of the engine's blocks that unfinished saves may keep from reuse; further saves wait.
    save_share_max: Annotated[float, Meta(gt=0, le=1)] = 0.25
    #: Number of further attempts of a refused save, while the engine still has its blocks.
    save_retries: Annotated[int, Meta(ge=0, le=100)] = 3
    #: Number of servers to which each block is written.
    copies: Annotated[int, Meta(ge=1, le=16)] = 1
    #: While loads are refused because they are slow, the interval at which the connector measures
    #: the pool's speed by reading a few blocks in the background.
    probe_every_s: Seconds = 5.0

    def client(self) -> ClientConfig:
        return ClientConfig(masters=self.masters, transports=self.transports)

    def member(self) -> Cluster:
        """The cluster with its secret. Raises ConfigError when the secret cannot be read."""
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
