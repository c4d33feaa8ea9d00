"""UCX itself: how it is loaded, what it has on this machine, and contexts with our settings."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from ucxx._lib.libucxx import UCXContext

#: Lanes of RDMA, and those of them over which a receiver can read the sender's memory.
_FABRICS: Final = ("rc", "dc", "ud", "ib", "srd", "all")
_READING: Final = frozenset({"rc", "dc"})
#: Between memory of the host and of a device, inside one process.
_TO_DEVICES: Final = ("cuda_copy", "gdr_copy")
#: Before it, UCX used the CUDA context of whichever thread called it, and had one device.
_CUDA_SINCE: Final = (1, 19)
#: Names of the UCX variables that the operator has set. Read before ucxx is imported, because ucxx
#: sets some itself.
_FROM_ENVIRONMENT: Final = tuple(name[4:] for name in os.environ if name.startswith("UCX_"))
#: With these the receiver is the active side.
_SCHEMES: Final = ("am", "get_zcopy", "get_ppln")


def load() -> None:
    """Import ucxx, which is slow, and keep it and UCX from printing what kvpool raises and logs."""
    quiet = {"UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_LOG_LEVEL": "fatal", "UCXX_LOG_LEVEL": "fatal"}
    for name, value in {**quiet, "UCXPY_LOG_LEVEL": "CRITICAL"}.items():
        os.environ.setdefault(name, value)
    try:
        importlib.import_module("ucxx")
    except (ImportError, OSError) as error:
        raise ConfigError(f"ucxx is installed but cannot be loaded: {error}") from None


def make_context(*, local: bool, settings: Mapping[str, str]) -> UCXContext:
    """A UCX context for whole blocks: `settings` first, then `UCX_...` variables, then defaults.

    Raises ConfigError when no lane is left, for a rendezvous scheme in which the sender writes into
    the receiver's memory, and for lanes to devices of a UCX that is too old for them.
    """
    from ucxx._lib.libucxx import Feature, UCXContext
    from ucxx.exceptions import UCXError

    chosen = {
        name: os.environ[f"UCX_{name}"] for name in _FROM_ENVIRONMENT if f"UCX_{name}" in os.environ
    }
    chosen |= settings
    scheme = chosen.get("RNDV_SCHEME", "am")
    if scheme not in _SCHEMES:
        raise ConfigError(
            f"UCX_RNDV_SCHEME is {scheme!r}: a sender could write into memory that its owner has "
            f"taken back; choose one of {', '.join(_SCHEMES)}, or leave it to kvpool"
        )
    if not device_lack(chosen.get("TLS", "")) and version() < _CUDA_SINCE:
        raise ConfigError(
            f"UCX {version_text()} has one CUDA device, that of the thread which calls it: install "
            f"{'.'.join(map(str, _CUDA_SINCE))} or newer, or name lanes without cuda in UCX_TLS"
        )
    config = {**defaults(chosen.get("TLS", ""), local=local), **chosen, "RNDV_THRESH": "0"}
    ours = {name: value for name, value in config.items() if chosen.get(name) != value}
    try:
        return UCXContext({**ours, **settings}, (Feature.TAG, Feature.WAKEUP))
    except (UCXError, OSError) as error:  # without a place for temporary files
        lanes = config.get("TLS")
        raise ConfigError(f"UCX cannot start: {error}; UCX_TLS is {lanes}") from None


def defaults(lanes: str, *, local: bool) -> dict[str, str]:
    """UCX's settings without their `UCX_`, for these lanes (as in `UCX_TLS`, empty: ours).

    Always rendezvous: it fills only the buffers of posted receives, and closing the endpoint ends
    it. The receiver is the active side: a sender that writes into the receiver's memory could do so
    after the receiver gave up. The receiver reads the sender's memory (`get_zcopy`) only if every
    lane can do that: over another lane UCX would send without a rendezvous.
    """
    # A lane to devices carries nothing to a peer: it is no reason for another scheme.
    words = _words(",".join(lane for lane in lanes.split(",") if lane.strip() not in _TO_DEVICES))
    chosen = {
        "RNDV_THRESH": "0",
        "RNDV_SCHEME": "get_zcopy" if words and words <= _READING else "am",
        "MAX_RNDV_RAILS": "2",
        "TCP_TX_SEG_SIZE": "256K",
        "TCP_RX_SEG_SIZE": "256K",
        # Without these two UCX leaves shared memory out when it must notice lost peers.
        "POSIX_ERROR_HANDLING": "y",
        "SYSV_ERROR_HANDLING": "y",
    }
    if not lanes:
        chosen["TLS"] = "tcp,self"
    if local:
        chosen["NET_DEVICES"] = "lo"
    return chosen


def fabric_text() -> str:
    """The RDMA devices as text, and whether this UCX can use them."""
    devices = _rdma_devices()
    if not devices:
        return "no RDMA device"
    if _has("ib"):
        return f"RDMA devices {', '.join(devices)}"
    return (
        f"RDMA devices {', '.join(devices)}, but the UCX of this wheel was built without verbs: "
        "install UCX on the system and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true"
    )


def _rdma_devices() -> list[str]:
    return sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))


def _words(lanes: str) -> set[str]:
    """Kinds of lanes: `rc_mlx5,tcp,self` are rc and tcp."""
    return {lane.strip().partition("_")[0] for lane in lanes.split(",")} - {"self", ""}


def _has(module: str) -> bool:
    """True if the wheel's UCX has this module (`ib` is verbs), or the operator has set that the
    system's UCX is used."""
    spec = importlib.util.find_spec("libucx")
    places = spec.submodule_search_locations or [] if spec is not None else []
    own = [path for place in places for path in Path(place).glob(f"lib/ucx/libuct_{module}*")]
    return bool(own) or "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY" in os.environ


def device_lack(lanes: str) -> str:
    """Why these lanes reach no memory on devices; empty where one is named and this UCX has it."""
    if not _words(lanes) & {"cuda", "gdr", "all"}:
        return (
            "ucx is given no lane to devices: name one, as in ucx?tls=rc,cuda_copy, or in UCX_TLS"
        )
    return "" if _has("cuda") else "the UCX of this machine was built without CUDA"


def has_fabric(lanes: str) -> bool:
    """Whether one of these lanes is that of a fabric, and usable."""
    named = any(lane.strip().startswith(_FABRICS) for lane in lanes.split(","))
    return named and bool(_rdma_devices()) and _has("ib")


def version_text() -> str:
    return ".".join(map(str, version()))


def version() -> tuple[int, int]:
    from ucxx._lib.libucxx import get_ucx_version

    major, minor, _ = get_ucx_version()
    return major, minor
