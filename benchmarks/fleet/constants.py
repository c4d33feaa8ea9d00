"""Every number that the model of a fleet is made of, with where it comes from."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, NamedTuple

from kvpool.errors import ConfigError


class Kind(enum.Enum):
    """How much a constant is worth as evidence."""

    PUBLISHED = "published"
    MEASURED = "measured by others"
    SPECIFICATION = "specification"
    COMPUTED = "computed"
    CALIBRATED = "calibrated"
    ASSUMED = "assumed"


def _constant(default: float, kind: Kind, unit: str, source: str) -> Any:
    return field(default=default, metadata={"kind": kind, "unit": unit, "source": source})


_POST = "vLLM x Mooncake, 2026-05-06"


class OtherValue(NamedTuple):
    """Of a constant, for another model."""

    name: str
    value: float
    kind: Kind
    source: str


#: A dense model of 70B with grouped-query attention in bf16, on the same engines.
DENSE_70B: Final = (
    OtherValue("kv_bytes", 327_680, Kind.COMPUTED, "80 layers x 8 heads x 128 x 2 x 2 bytes"),
    OtherValue("linear_flop", 140e9, Kind.COMPUTED, "two for each of 70e9 weights"),
    OtherValue("attention_flop", 2.6e6, Kind.COMPUTED, "80 layers x 64 heads x 2 x (128 + 128)"),
    OtherValue(
        "hbm_tokens", 1_400_000, Kind.COMPUTED, "(4 x (0.85 x 185 - 6) GB - 140 GB), by 328 KB"
    ),
    OtherValue("token_each_s", 0.25e-3, Kind.COMPUTED, "50K tokens x 328 KB / 8 ranks / 8 TB/s"),
)


@dataclass(frozen=True, slots=True)
class Constants:
    """The published case: Kimi-K2.5 NVFP4 on GB200, prefill with TP4 and decode with DP8+EP."""

    kv_bytes: float = _constant(
        38_000, Kind.PUBLISHED, "bytes/token", f"{_POST}: 3.8 GB per 100K tokens"
    )
    linear_flop: float = _constant(
        66.2e9, Kind.COMPUTED, "FLOP/token", "61 layers, d 7168, 8 + 1 experts of 2048, MLA"
    )
    attention_flop: float = _constant(
        2.5e6, Kind.COMPUTED, "FLOP/token/token", "61 layers x 64 heads x 2 x (192 + 128)"
    )
    prefill_flop_s: float = _constant(
        3.86e15,
        Kind.CALIBRATED,
        "FLOP/s",
        f"{_POST}: 2,012 tokens/s per GPU without a pool; 39 % of 4 x 2.5e15 (bf16, dense)",
    )
    prefill_start_s: float = _constant(
        0.06, Kind.ASSUMED, "s", "139 GB of weights per GPU at 8 TB/s are 17 ms; eager launches"
    )
    hbm_tokens: float = _constant(
        300_000, Kind.COMPUTED, "tokens", "0.85 x 185 GB - 139 GB - 6 GB, by 38 KB; on every rank"
    )
    pool_load_bytes_s: float = _constant(
        4.6e9,
        Kind.CALIBRATED,
        "bytes/s",
        f"{_POST}: TTFT P50 of 1.80 s; measured alone it was 9.9e9",
    )
    local_load_bytes_s: float = _constant(
        25e9, Kind.ASSUMED, "bytes/s", "host to device of one engine, an eighth of NVLink-C2C"
    )
    save_bytes_s: float = _constant(
        12e9, Kind.MEASURED, "bytes/s", "put of 11.2 GiB/s, Kimi TP4 on GB200, April 2026"
    )
    save_wait_s: float = _constant(
        5.0, Kind.ASSUMED, "s", "a save that would wait longer for its link is dropped"
    )
    decode_link_bytes_s: float = _constant(
        4.2e9, Kind.MEASURED, "bytes/s", "NIXL: 2.2 GB in 521 ms, one request at a time"
    )
    server_link_bytes_s: float = _constant(
        40e9, Kind.ASSUMED, "bytes/s", "4 x 400 Gb/s, of which a fifth is used"
    )
    disk_read_bytes_s: float = _constant(
        12e9, Kind.SPECIFICATION, "bytes/s", "a server's disk: data sheets of PCIe 5.0 x4 NVMe"
    )
    disk_write_bytes_s: float = _constant(
        6e9, Kind.SPECIFICATION, "bytes/s", "the same: 6 to 7 GB/s in order"
    )
    disk_first_byte_s: float = _constant(
        100e-6, Kind.SPECIFICATION, "s", "the same: 60 to 100 us for a read"
    )
    first_byte_s: float = _constant(
        0.010, Kind.ASSUMED, "s", "lookup and first byte; a match of the product takes 1 ms"
    )
    front_end_s: float = _constant(0.10, Kind.ASSUMED, "s", "router, tokenizer, HTTP")
    token_s: float = _constant(
        0.0357, Kind.CALIBRATED, "s", f"{_POST}, Figure 5: TPOT of 38.5 ms at 75 sessions"
    )
    token_each_s: float = _constant(
        0.043e-3, Kind.COMPUTED, "s/request", "72K tokens x 38 KB / 8 ranks / 8 TB/s"
    )
    chunk_tokens: float = _constant(
        8_192, Kind.ASSUMED, "tokens", "of prompts in a step of a mixed engine; vLLM's default"
    )
    pool_tokens: float = _constant(
        10.5e6, Kind.PUBLISHED, "tokens/server", "4 ranks x 100 GB, mooncake_config_gb200"
    )
    warm_s: float = _constant(300, Kind.ASSUMED, "s", "before that the fleet fills")

    def prefill_s(self, cached: int, tokens: int) -> float:
        """Seconds of computing tokens `cached` to `tokens` (excluded) of one prompt."""
        new = tokens - cached
        flop = self.linear_flop * new + self.attention_flop * new * (cached + new / 2)
        return self.prefill_start_s + flop / self.prefill_flop_s

    def rows(self) -> list[tuple[str, float, str, str, str]]:
        """Name, value, unit, kind and source of each."""
        return [
            (
                one.name,
                getattr(self, one.name),
                one.metadata["unit"],
                one.metadata["kind"].value,
                one.metadata["source"],
            )
            for one in fields(self)
        ]

    def changed(self, values: Mapping[str, float]) -> Constants:
        """With other values. Raises ConfigError for a name or a value that cannot be."""
        names = [one.name for one in fields(self)]
        for name, value in values.items():
            if name not in names:
                raise ConfigError(f"constant {name!r}: expected one of {', '.join(names)}")
            if not 0 <= value < float("inf"):
                raise ConfigError(f"constant {name}: {value} is not a number from 0 on")
        return replace(self, **values)
