"""What a request asks of the connector: its `kv_transfer_params`, which clients write. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from kvpool_connector.settings import nearest
from kvpool_connector.values import RequestHints

#: Keys of vLLM's own connectors, for which a request with a MultiConnector may be meant, too.
OTHERS: Final = frozenset(
    {
        "dcp_size",
        "disagg_spec",
        "do_remote_decode",
        "do_remote_prefill",
        "hidden_states_path",
        "include_output_tokens",
        "is_request_leader",
        "max_offload_tokens",
        "num_lmcache_extra_cached_tokens",
        "pp_size",
        "prompt_token_ids",
        "remote_block_ids",
        "remote_block_size",
        "remote_blocks_expiry_time",
        "remote_bootstrap_addr",
        "remote_dp_rank",
        "remote_dp_rank_override",
        "remote_dp_size",
        "remote_dp_size_local",
        "remote_engine_id",
        "remote_handshake_port",
        "remote_host",
        "remote_hosts",
        "remote_notify_port",
        "remote_num_tokens",
        "remote_port",
        "remote_prefill_cached_tokens",
        "remote_request_id",
        "remote_tp_size",
        "tp_size",
        "transfer_id",
    }
)
#: An engine logs so many different mistakes: clients choose the keys.
_MISTAKES_MAX: Final = 32
_SHOWN_MAX: Final = 64


class _Param(NamedTuple):
    expected: str
    valid: Callable[[Any], bool]


def _is_number(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and len(value) <= 128 and value.isprintable()


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


_PARAMS: Final[Mapping[str, _Param]] = {
    "session_id": _Param("printable text of at most 128 characters", _is_name),
    "resume_in_s": _Param(
        "seconds, from 0 to 1e9",
        lambda value: _is_number(value, (int, float)) and 0 <= value <= 1e9,
    ),
    "end_session": _Param("true or false", _is_bool),
    "skip_save": _Param("true or false", _is_bool),
    "skip_load": _Param("true or false", _is_bool),
    "max_load_tokens": _Param(
        "a whole number from 0", lambda value: _is_number(value, int) and value >= 0
    ),
}


def parse_params(params: Any, session_id: str | None = None) -> tuple[RequestHints, list[str]]:
    """The hints in a request's `kv_transfer_params`, and a sentence for each key that is ignored.

    `session_id` is the engine's own, where a request has one: a name in `params` counts before it.

    Keys of vLLM's own connectors (`OTHERS`), and keys that begin with `_`, are ignored without a
    sentence. A null is as if the key were not there.
    """
    mistakes: list[str] = []
    found: dict[str, Any] = {}
    if session_id:
        params = {"session_id": session_id} | dict(params if isinstance(params, Mapping) else {})
    if not isinstance(params, Mapping):
        return RequestHints(), []
    for key, value in params.items():
        name = str(key)
        param = _PARAMS.get(name)
        if param is None:
            if name not in OTHERS and not name.startswith("_"):
                mistakes.append(_unknown(name))
        elif value is not None:
            if param.valid(value):
                found[name] = value
            else:
                mistakes.append(f"{name} is {_shown(value)}, expected {param.expected}")
    session = found.get("session_id", "")
    hints = RequestHints(
        session,
        found.get("resume_in_s") if session else None,
        found.get("end_session", False),
        skip_save=found.get("skip_save", False),
        skip_load=found.get("skip_load", False),
        max_load_tokens=found.get("max_load_tokens"),
    )
    return hints, mistakes


class Mistakes:
    """Those that an engine logs: each once, and not without end."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def new(self, mistakes: list[str]) -> list[str]:
        """Those of a request that were not logged before."""
        found = []
        for mistake in mistakes:
            if mistake not in self._logged and len(self._logged) < _MISTAKES_MAX:
                self._logged.add(mistake)
                found.append(mistake)
        return found


def _unknown(name: str) -> str:
    close = nearest(name[:_SHOWN_MAX], _PARAMS)
    hint = f"did you mean {close!r}?" if close else f"known: {', '.join(_PARAMS)}"
    return f"unknown key {_shown(name)}; {hint}"


def _shown(value: object) -> str:
    text = ascii(value[:_SHOWN_MAX]) if isinstance(value, str | bytes) else type(value).__name__
    return ascii(value) if isinstance(value, bool | float) or _is_small(value) else text


def _is_small(value: object) -> bool:
    return isinstance(value, int) and -(10**20) < value < 10**20
