"""The connector's settings: `kv_connector_extra_config`, with unit, default and reason."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from kvpool import ClientConfig, ConfigError
from kvpool_connector.form_choice import fields_of
from kvpool_engines.settings import PoolSettings, checked, naming

#: The connector's name in vLLM's configuration.
CONNECTOR: Final = "KVPoolConnector"
#: From a millisecond: whoever gives less has meant another unit.
Seconds = Annotated[float, Meta(ge=0.001, le=3600)]
#: A lower rate than one in a thousand million is none.
_RATE_MIN: Final = 1e-9
_BOTH: Final = "an engine loads and saves with kv_role kv_both"
#: Settings that are gone, and what holds in their place.
_GONE: Final = {
    "consumer_saves": _BOTH,
    "hit_tokens_min": "a hit is loaded when that is faster than computing it",
    "loads_max": "32 prompts load at once",
    "lookup_timeout_s": "a lookup has half of the time that computing takes, 1 s at most",
    "model": "revision names the weights, and a model is called by its kind, layers and width",
    "prefetch": "a request has skip_prefetch in its kv_transfer_params",
    "probe_every_s": "while loads are too slow, the pool is measured every 5 s",
    "producer_loads": _BOTH,
    "promise_wait_s": "a load waits for promised blocks while they are computed, 10 s at most",
    "save_gather_s": "generated blocks wait 0.1 s for further ones",
    "save_retries": "a refused save is tried three times more",
    "save_share_max": "unfinished saves keep a quarter of the engine's blocks",
    "save_timeout_s": "a save has 10 s",
    "start_wait_s": "the start waits for the pool for 1 s; then the engine runs without it",
    "transfers_max": "a process has four reads and two writes under way",
}


class Settings(PoolSettings, frozen=True):
    #: How blocks cross between the engine's GPU and the network. `staged`: through pinned memory.
    #: `direct`: the pool takes them where they lie, over a transport that can do that, such as
    #: ucx?tls=rc,cuda_copy,self, and nothing else (design: device-memory).
    device_path: Literal["staged", "direct"] = "staged"
    #: Parts of equal numbers of KV heads that each block is stored in, so that engines of different
    #: tensor parallel sizes share. 0: one for each tensor parallel rank, and only engines of equal
    #: sizes share. Needs `revision`.
    kv_head_parts: Annotated[int, Meta(ge=0, le=256)] = 0
    #: `auto` loads a prefix if the estimate is that loading is faster than computing it; `always`
    #: and `never` are for experiments (design: load-or-recompute).
    load: Literal["auto", "always", "never"] = "auto"
    #: Time after which the engine computes a prompt instead of waiting for its load. The planner
    #: often ends a load earlier, when it takes much longer than estimated.
    load_timeout_s: Seconds = 10.0
    #: Also save blocks of generated tokens, because the next turn of a conversation contains them.
    save_decode: bool = True
    #: Number of servers to which each block is written.
    copies: Annotated[int, Meta(ge=1, le=16)] = 1
    #: How blocks are made smaller on their way to the pool; empty: not at all. `lossless`, where it
    #: saves time (docs/codecs.md).
    codec: str = ""
    #: With KV events switched on in the engine: how blocks of the pool are announced to routers.
    #: `shared` says which are on other hosts, as vllm-router wants it; `plain` says that those are
    #: on a disk, for Dynamo and llm-d; `off`: not at all, as for `kvpool events` (docs/events.md).
    kv_events: Literal["shared", "plain", "off"] = "shared"
    #: Share of the loads of a writer that are computed instead, to compare them; 0: none
    #: (design: provenance).
    verify_rate: Annotated[float, Meta(ge=0, le=1)] = 1 / 2000

    @property
    def loads_per_check(self) -> int:
        """One of so many loads is verified; 0: none."""
        return math.ceil(1 / max(self.verify_rate, _RATE_MIN)) if self.verify_rate else 0

    def client(self) -> ClientConfig:
        return ClientConfig(
            masters=self.masters, transports=self.transports, device_path=self.device_path
        )


def parse(given: Mapping[str, Any]) -> Settings:
    """The settings of an engine. Raises ConfigError: one sentence that names the setting, what is
    expected, and the nearest name that is known."""
    with naming("kv_connector_extra_config"):
        for name in given.keys() & _GONE.keys():
            raise ConfigError(f"setting {name!r} is gone, remove it: {_GONE[name]}")
        settings = checked(Settings, given)
        if settings.kv_head_parts and not settings.revision:
            raise ConfigError(
                "kv_head_parts needs revision, a name that is the same for "
                "the same weights only: what ranks have in memory depends on how many they are"
            )
        with naming("codec"):
            fields_of(settings.codec)
        if settings.codec and settings.device_path == "direct":
            raise ConfigError("codec needs blocks in the host's memory: device_path must be staged")
    return settings


def given_settings(transfer: Any) -> Iterator[Mapping[str, Any]]:
    """The settings of each connector of this kind: alone, or in a MultiConnector."""
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector == CONNECTOR:
        yield extra
    elif transfer.kv_connector == "MultiConnector":
        for child in extra.get("connectors", ()):
            if isinstance(child, Mapping) and child.get("kv_connector") == CONNECTOR:
                yield child.get("kv_connector_extra_config", {})
