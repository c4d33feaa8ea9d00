"""What a request asks of the connector: its parameters and hints, which clients write. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvpool_connector.hints.kv_hints import read_envelope
from kvpool_connector.records.promises import PROMISE, PromisedBlocks, parse_promise
from kvpool_connector.records.values import RequestHints
from kvpool_engines.session_names import GIVEN_MAX, session_name
from kvpool_engines.settings import nearest

#: Keys of vLLM's own connectors, for which a request with a MultiConnector may be meant, too.
_OTHERS: Final = (
    "dcp_size disagg_spec do_remote_decode do_remote_prefill hidden_states_path "
    "include_output_tokens is_request_leader max_offload_tokens num_lmcache_extra_cached_tokens "
    "pp_size prompt_token_ids remote_block_ids remote_block_size remote_blocks_expiry_time "
    "remote_bootstrap_addr remote_dp_rank remote_dp_rank_override remote_dp_size "
    "remote_dp_size_local remote_engine_id remote_handshake_port remote_host remote_hosts "
    "remote_notify_port remote_num_tokens remote_port remote_prefill_cached_tokens "
    "remote_request_id remote_tp_size tp_size transfer_id transfer_mode"
)
OTHERS: Final = frozenset(_OTHERS.split())
#: An engine logs so many different mistakes: clients choose the keys.
_MISTAKES_MAX: Final = 32
_SHOWN_MAX: Final = 64
#: Where `kv_transfer_params` has the keys of this connector, apart from those of others.
OWN: Final = "kvpool"
#: Characters of `agentic_context` where it is JSON text: routers refuse longer ones.
_CONTEXT_MAX: Final = 16_384


class _Param(NamedTuple):
    expected: str
    valid: Callable[[Any], bool]


def _is_number(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_name(value: object) -> bool:
    return value == "" or bool(session_name(value))


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


_PARAMS: Final[Mapping[str, _Param]] = {
    "session_id": _Param(f"text of at most {GIVEN_MAX} characters", _is_name),
    "resume_in_s": _Param(
        "seconds, from 0 to 1e9",
        lambda value: _is_number(value, (int, float)) and 0 <= value <= 1e9,
    ),
    "end_session": _Param("true or false", _is_bool),
    "skip_save": _Param("true or false", _is_bool),
    "skip_load": _Param("true or false", _is_bool),
    "skip_prefetch": _Param("true or false", _is_bool),
    "max_load_tokens": _Param(
        "a whole number from 0", lambda value: _is_number(value, int) and value >= 0
    ),
}


class Asked(NamedTuple):
    """What an engine's request has that may say something to the connector, as clients wrote it.

    `session_id` is the engine's own session, `extra_args` are vLLM's (`vllm_xargs` in a body),
    `kv_hints` an orchestrator's envelope, and a `priority` above 0 is below the usual one.
    """

    params: Any = None
    session_id: str | None = None
    extra_args: Any = None
    kv_hints: Any = None
    priority: int = 0


class Parsed(NamedTuple):
    """`mistakes` has a sentence for each key that is ignored, `outcomes` a text for each action of
    the envelope."""

    hints: RequestHints
    mistakes: list[str]
    outcomes: Sequence[str] = ()


def parse_request(asked: Asked) -> Parsed:
    """The hints of a request. What counts for the session is the first that is there of:

    `kv_transfer_params.kvpool` and `kv_transfer_params` themselves; the engine's own session;
    `prompt_cache_key` and an agentic context among the extra arguments.

    Keys of vLLM's own connectors (`OTHERS`), and keys that begin with `_`, are ignored without a
    sentence. A null is as if the key were not there. Nothing that a client writes is an error.
    """
    mistakes: list[str] = []
    found: dict[str, Any] = {}
    params = asked.params if isinstance(asked.params, Mapping) else {}
    own = params.get(OWN)
    for key, value in params.items():
        if key != OWN:
            _take(str(key), value, found, mistakes)
    if isinstance(own, Mapping):
        for key, value in own.items():
            if key not in ("kv_hints", PROMISE):
                _take(str(key), value, found, mistakes)
    elif own is not None:
        mistakes.append(f"{OWN} is {_shown(own)}, expected an object")
    arguments = asked.extra_args if isinstance(asked.extra_args, Mapping) else {}
    context = _agentic_context(arguments.get("agentic_context"))
    session = next(
        filter(
            None,
            map(
                session_name,
                (
                    found.get("session_id"),
                    asked.session_id,
                    arguments.get("session_id"),
                    arguments.get("prompt_cache_key"),
                    context.get("session_id"),
                ),
            ),
        ),
        "",
    )
    promise = _promise(own.get(PROMISE), mistakes) if isinstance(own, Mapping) else None
    nested = own.get("kv_hints") if isinstance(own, Mapping) else None
    envelope = read_envelope(
        nested if asked.kv_hints is None else asked.kv_hints,
        has_session=bool(session),
        background=asked.priority > 0,
    )
    resume_in_s = found.get("resume_in_s")
    if resume_in_s is None:
        resume_in_s = envelope.resume_in_s
    if resume_in_s is None and asked.priority <= 0:
        retention_s = context.get("kv_retention_ttl_seconds")
        resume_in_s = retention_s if _PARAMS["resume_in_s"].valid(retention_s) else None
    hints = RequestHints(
        session,
        resume_in_s if session else None,
        found.get("end_session", envelope.ends),
        skip_save=found.get("skip_save", False),
        skip_load=found.get("skip_load", False),
        skip_prefetch=found.get("skip_prefetch", False),
        max_load_tokens=found.get("max_load_tokens"),
        promise=promise,
    )
    return Parsed(hints, mistakes, envelope.outcomes)


def _take(name: str, value: Any, found: dict[str, Any], mistakes: list[str]) -> None:
    """One key of the parameters."""
    param = _PARAMS.get(name)
    if param is None:
        if name not in OTHERS and not name.startswith("_"):
            mistakes.append(_unknown(name))
    elif value is not None:
        if param.valid(value):
            found[name] = value
        else:
            mistakes.append(f"{name} is {_shown(value)}, expected {param.expected}")


def _promise(given: object, mistakes: list[str]) -> PromisedBlocks | None:
    """What another engine has promised for this prompt; a proxy hands it on, or a client does."""
    parsed = None if given is None else parse_promise(given)
    if isinstance(parsed, str):
        mistakes.append(f"{PROMISE} is ignored: {parsed}")
        return None
    return parsed


def _agentic_context(given: object) -> Mapping[str, Any]:
    """vllm-router's context of an agent: an object, or one as JSON text; empty if it is neither."""
    if isinstance(given, str) and len(given) <= _CONTEXT_MAX:
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return {}
    return given if isinstance(given, Mapping) else {}


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
