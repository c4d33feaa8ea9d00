"""What the HTTP requests of real clients say about their conversation. Pure.

Read from captured requests of Codex 0.169 and Claude Code 2.1.330, and from the definitions of the
OpenAI and Anthropic APIs. A field that is missing, of another type or nonsense is as if it were
not there: a client that says nothing has no session, and nothing that it sends is an error.
(design: session-hints)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from kvpool_agents.pauses import Answer
from kvpool_engines.session_names import child_name, session_name

#: vLLM's own header for a session; a client that sends it means it.
SESSION_HEADER: Final = b"x-session-id"
#: Paths of prompts. `/v1/messages` alone has no field for a session in its body.
MESSAGES_PATH: Final = "/v1/messages"
PATHS: Final = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", MESSAGES_PATH}
)
#: Seconds that a retention stands for, as clients write it. The pool takes an hour at most.
_RETENTION_S: Final[Mapping[object, float]] = {
    "5m": 300.0,
    "30m": 1800.0,
    "1h": 3600.0,
    "12h": 3600.0,
    "24h": 3600.0,
}
_BREAKPOINT: Final = b'"cache_control"'
_BREAKPOINT_MAX: Final = 120
_TTL: Final = re.compile(rb'^"cache_control"\s*:\s*\{[^{}]*"ttl"\s*:\s*"([0-9a-z]{2,3})"')
#: The older form of Claude Code's `metadata.user_id`; the newer one is JSON.
_USER_SESSION: Final = re.compile(r"_session_([0-9a-fA-F-]{36})$")
_USER_MAX: Final = 4096
#: Bytes of a field that is decoded, in less than a millisecond.
_FIELD_MAX: Final = 65_536


class Spoken(NamedTuple):
    """Who speaks: the session of a request, its parent's, and whether the client says it is over.

    `parent` is "" for a conversation that no other one has started.
    """

    session: str = ""
    parent: str = ""
    ends: bool = False


class FromBody(NamedTuple):
    """What a body says. `session` is "" where it names none; `own` where that is vLLM's field.

    `splice` is what the body has to begin with, so that vLLM knows the session, too; b"" if it
    knows already. A session of which it cannot be told is none.
    """

    session: str = ""
    own: bool = False
    retention_s: float | None = None
    splice: bytes = b""


def from_headers(headers: Sequence[tuple[bytes, bytes]]) -> Spoken:
    """The session that the headers name; names of headers are lower-case, as in ASGI.

    | client      | conversation                               | its parent                       |
    |-------------|--------------------------------------------|----------------------------------|
    | any         | `X-Session-ID`                             | `x-dynamo-parent-session-id`     |
    | Codex       | `thread-id`, not `session-id`: a sub-agent | `x-codex-parent-thread-id`       |
    |             | has its root's `session-id`                |                                  |
    | Claude Code | `X-Claude-Code-Session-Id`, and with it    | the session, or                  |
    |             | `x-claude-code-agent-id` of a sub-agent    | `x-claude-code-parent-agent-id`  |
    | Dynamo      | `x-dynamo-session-id`                      | `x-dynamo-parent-session-id`     |
    """
    found = {name: value for name, value in headers if name in _HEADERS}
    if not found:
        return Spoken()

    def named(header: bytes) -> str:
        return session_name(found.get(header, b"").decode("latin-1"))

    ends = found.get(b"x-dynamo-session-final", b"").lower() in (b"1", b"true")
    if session := named(SESSION_HEADER) or named(b"x-dynamo-session-id"):
        return Spoken(session, named(b"x-dynamo-parent-session-id"), ends)
    if thread := named(b"thread-id") or named(b"session-id") or named(b"session_id"):
        return Spoken(thread, named(b"x-codex-parent-thread-id"), ends)
    if root := named(b"x-claude-code-session-id"):
        if agent := named(b"x-claude-code-agent-id"):
            above = named(b"x-claude-code-parent-agent-id")
            parent = child_name(root, above) if above else root
            return Spoken(child_name(root, agent), parent, ends)
        return Spoken(root, "", ends)
    return Spoken()


_HEADERS: Final = frozenset(
    {
        SESSION_HEADER,
        b"session-id",
        b"session_id",
        b"thread-id",
        b"x-codex-parent-thread-id",
        b"x-claude-code-session-id",
        b"x-claude-code-agent-id",
        b"x-claude-code-parent-agent-id",
        b"x-dynamo-session-id",
        b"x-dynamo-parent-session-id",
        b"x-dynamo-session-final",
    }
)


class _Body(msgspec.Struct):
    """The fields that are read, undecoded: a body is mostly messages, which are skipped."""

    session_id: msgspec.Raw = msgspec.Raw()
    prompt_cache_key: msgspec.Raw = msgspec.Raw()
    prompt_cache_retention: msgspec.Raw = msgspec.Raw()
    prompt_cache_options: msgspec.Raw = msgspec.Raw()
    metadata: msgspec.Raw = msgspec.Raw()
    vllm_xargs: msgspec.Raw = msgspec.Raw()
    kv_transfer_params: msgspec.Raw = msgspec.Raw()


_DECODER: Final = msgspec.json.Decoder(_Body)


def from_body(path: str, body: bytes, *, has_session: bool) -> FromBody:
    """What the body of a request to `path` says. `has_session`: its headers name one already.

    The body's own `session_id` counts before the headers, as in vLLM; `prompt_cache_key` and the
    user of an Anthropic request count after them.
    """
    try:
        fields = _DECODER.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return FromBody()  # the server answers what is wrong with it
    transfer = _mapping(fields.kv_transfer_params)
    nested = transfer.get("kvpool")
    nested = nested if isinstance(nested, Mapping) else {}
    arguments = _mapping(fields.vllm_xargs)
    retention_s = _retention(fields, body)
    for given in (nested.get("session_id"), transfer.get("session_id"), _value(fields.session_id)):
        if session := session_name(given):
            return FromBody(session, True, retention_s)
    if has_session:
        return FromBody(retention_s=retention_s)
    if session := session_name(arguments.get("session_id")):
        return FromBody(session, True, retention_s)
    session = session_name(_value(fields.prompt_cache_key)) or _user_session(fields.metadata)
    splice = _splice(path, fields, session)
    return FromBody(session if splice else "", False, retention_s, splice)


def spliced(body: bytes, splice: bytes) -> bytes:
    """The body with `splice` as its first members; every other byte as it was."""
    start = body.index(b"{") + 1
    return b"".join((body[:start], splice, body[start:]))


def _splice(path: str, fields: _Body, session: str) -> bytes:
    """Members with the session, in the field from which vLLM takes it.

    Never a second field of a name that the body has already, even if that is null.
    """
    if not session:
        return b""
    member = b'"session_id":%s' % json.dumps(session).encode()
    if path != MESSAGES_PATH:
        return b"" if bytes(fields.session_id) else member + b","
    return b"" if bytes(fields.vllm_xargs) else b'"vllm_xargs":{%s},' % member


def _retention(fields: _Body, body: bytes) -> float | None:
    """How long the client asks to keep the conversation; None where it does not say.

    Of Anthropic's breakpoints the last one counts: it moves along with the conversation, and those
    before it are of what others share.
    """
    options = _mapping(fields.prompt_cache_options)
    for given in (options.get("ttl"), _value(fields.prompt_cache_retention)):
        if isinstance(given, str) and given in _RETENTION_S:
            return _RETENTION_S[given]
    last = body.rfind(_BREAKPOINT)
    if last >= 0 and (found := _TTL.match(body[last : last + _BREAKPOINT_MAX])):
        return _RETENTION_S.get(found[1].decode())
    return None


def _user_session(metadata: msgspec.Raw) -> str:
    """The session in Claude Code's `metadata.user_id`."""
    user = _mapping(metadata).get("user_id")
    if not isinstance(user, str) or len(user) > _USER_MAX:
        return ""
    if found := _USER_SESSION.search(user):
        return session_name(found[1])
    try:
        parsed = json.loads(user)
    except (ValueError, RecursionError):
        return ""
    return session_name(parsed.get("session_id")) if isinstance(parsed, Mapping) else ""


def _value(raw: msgspec.Raw) -> Any:
    """None for a field that is not there, or so large that decoding it would hold the server up."""
    text = bytes(raw)
    if not 0 < len(text) <= _FIELD_MAX:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _mapping(raw: msgspec.Raw) -> Mapping[str, Any]:
    value = _value(raw)
    return value if isinstance(value, Mapping) else {}


#: As vLLM, and other servers, write the end of an answer. Quotes within a text are escaped, so what
#: a model writes cannot look like this.
_ENDED: Final = re.compile(
    rb'"(?:finish_reason|stop_reason)": ?"([a-z_]{1,32})"'
    rb'|"(?:type|object)": ?"(function_call|custom_tool_call|response(?:\.completed)?)"'
)
#: Nearly no piece of a stream has one of these, and `in` costs a twentieth of the expression.
_SIGNS: Final = (b'_reason":"', b'_reason": "', b'_call"', b'"response"', b'"response.completed"')
_TOOL_CALLS: Final = frozenset({b"tool_calls", b"tool_use", b"function_call", b"custom_tool_call"})
_LAST: Final = frozenset(
    {b"stop", b"end_turn", b"stop_sequence", b"response.completed", b"response"}
)
#: More than the longest match: it may begin in one piece and end in the next one.
_TAIL: Final = 96


class AnswerReader:
    """Finds out how an answer ends, while its pieces pass by. It keeps 96 bytes of it."""

    def __init__(self) -> None:
        self._tail = b""
        self._found: set[bytes] = set()

    def feed(self, piece: bytes) -> None:
        """The next bytes of the answer."""
        text = self._tail + piece
        if any(sign in text for sign in _SIGNS):
            for match in _ENDED.finditer(text):
                word = match[1] or match[2]
                if word in _TOOL_CALLS or word in _LAST:
                    self._found.add(word)
        self._tail = text[-_TAIL:]

    @property
    def answer(self) -> Answer:
        """A tool call in any of several answers is one: the client runs it, and comes back."""
        if self._found & _TOOL_CALLS:
            return Answer.TOOL_CALL
        return Answer.FINAL if self._found & _LAST else Answer.UNKNOWN
