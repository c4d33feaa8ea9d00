"""Sessions of real clients: captured requests, the middleware around an API server, and pauses.

`captured/*.json` are requests of Codex 0.169 and Claude Code 2.1.330 against a stand-in server,
with a tool call and a sub-agent each; long texts are cut, and the tools are left out.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from kvpool_agents import sessions
from kvpool_agents.client_requests import AnswerReader, Spoken, from_body, from_headers, spliced
from kvpool_agents.pauses import PAUSE_S_MAX, Answer, Expectation, Pauses
from kvpool_agents.sessions import BODY_MAX, Message, Middleware, Scope
from kvpool_connector import settings as settings_module
from kvpool_connector.hints.request_params import Asked, parse_request
from kvpool_engines.session_names import session_name

CAPTURED = Path(__file__).parent / "captured"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
CODEX = "01a2046f-3b03-7a12-ade9-49c99a685182"
CODEX_2 = "01a20473-afbf-7a00-972b-2321326547a9"
CODEX_AGENT = "01a20473-b1f5-76a3-a104-f403790f93c5"
CLAUDE = "b0604a3a-b50f-4cbb-b81b-8a15f194536b"
CLAUDE_AGENT = f"{CLAUDE}/a5c2850952ea00b5c"


OF_CODEX, AGAIN, OF_CLAUDE = Spoken(CODEX), Spoken(CODEX_2), Spoken(CLAUDE)


def captured(client: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((CAPTURED / f"{client}.json").read_text())
    return found


def raw_headers(pairs: Iterable[Iterable[str]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in pairs]


# --- what clients send ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("client", "spoken"),
    [
        ("codex", [*[OF_CODEX] * 3, *[AGAIN] * 2, Spoken(CODEX_AGENT, CODEX_2), AGAIN]),
        ("claude_code", [*[OF_CLAUDE] * 3, Spoken(CLAUDE_AGENT, CLAUDE), *[OF_CLAUDE] * 2]),
    ],
)
def test_captured_requests_name_their_conversation(client: str, spoken: list[Spoken]) -> None:
    requests = captured(client)
    assert [from_headers(raw_headers(one["headers"])) for one in requests] == spoken
    for one in requests:
        found = from_body(one["path"].partition("?")[0], dump(one["body"]), has_session=True)
        assert (found.session, found.splice, found.retention_s) == ("", b"", None)


@pytest.mark.parametrize("client", ["codex", "claude_code"])
def test_a_captured_body_alone_names_the_session(client: str) -> None:
    """Behind a proxy that drops headers which it does not know."""
    root = {"codex": {CODEX, CODEX_2}, "claude_code": {CLAUDE}}[client]
    for one in captured(client):
        path, body = one["path"].partition("?")[0], dump(one["body"])
        found = from_body(path, body, has_session=False)
        assert found.session in root
        told = json.loads(spliced(body, found.splice))
        arguments = told.pop("vllm_xargs", None) if path == MESSAGES else None
        assert (arguments or told)["session_id"] == found.session
        told.pop("session_id", None)
        assert told == one["body"]


@pytest.mark.parametrize(
    ("headers", "spoken"),
    [
        ([], Spoken()),
        ([("x-session-id", "own"), ("thread-id", "t")], Spoken("own")),
        ([("x-session-id", ""), ("thread-id", "t")], Spoken("t")),
        ([("session-id", "s"), ("thread-id", "s")], Spoken("s")),
        ([("session-id", "s"), ("thread-id", "t")], Spoken("t")),
        ([("thread-id", "t"), ("x-codex-parent-thread-id", "p")], Spoken("t", "p")),
        ([("session_id", "s")], Spoken("s")),
        ([("x-codex-parent-thread-id", "p")], Spoken()),
        (
            [
                ("x-claude-code-session-id", "s"),
                ("x-claude-code-agent-id", "b"),
                ("x-claude-code-parent-agent-id", "a"),
            ],
            Spoken("s/b", "s/a"),
        ),
        ([("x-claude-code-agent-id", "b")], Spoken()),
        (
            [
                ("x-dynamo-session-id", "s"),
                ("x-dynamo-parent-session-id", "p"),
                ("x-dynamo-session-final", "True"),
            ],
            Spoken("s", "p", True),
        ),
        ([("x-session-id", "a" * 500)], Spoken(session_name("a" * 500))),
        ([("x-session-id", "a" * 20_000)], Spoken()),
    ],
)
def test_headers_of_clients(headers: list[tuple[str, str]], spoken: Spoken) -> None:
    assert from_headers(raw_headers(headers)) == spoken


def dump(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("body", "session", "own"),
    [
        ({"prompt_cache_key": "key"}, "key", False),
        ({"session_id": "own", "prompt_cache_key": "key"}, "own", True),
        ({"session_id": None, "prompt_cache_key": "key"}, "", False),  # nothing may be there twice
        ({"session_id": 7, "prompt_cache_key": "key"}, "", False),
        ({"vllm_xargs": {"session_id": "x"}, "prompt_cache_key": "key"}, "x", True),
        ({"kv_transfer_params": {"session_id": "flat"}, "session_id": "own"}, "flat", True),
        ({"kv_transfer_params": {"kvpool": {"session_id": "k"}, "session_id": "f"}}, "k", True),
        ({"kv_transfer_params": {"kvpool": 7}, "prompt_cache_key": "key"}, "key", False),
        ({"metadata": {"user_id": json.dumps({"session_id": "user"})}}, "user", False),
        ({"metadata": {"user_id": f"user_1_account__session_{CLAUDE}"}}, CLAUDE, False),
        ({"metadata": {"user_id": "somebody"}}, "", False),
        ({"metadata": {"user_id": "[" * 4096}}, "", False),
        ({"metadata": {"user_id": "x" * 10_000 + f"_session_{CLAUDE}"}}, "", False),
        ({"metadata": "nonsense", "prompt_cache_key": 7}, "", False),
        ({"prompt_cache_key": "k" * 500}, session_name("k" * 500), False),
        ({"prompt_cache_key": "k" * 3_000_000}, "", False),
        ({"kv_transfer_params": {"session_id": "s", "more": [0] * 9}}, "s", True),
        ({"kv_transfer_params": {"session_id": "s", "more": [0] * 99_999}}, "", False),
        ([1], "", False),
        ("nonsense", "", False),
    ],
)
def test_bodies_of_clients(body: Any, session: str, own: bool) -> None:
    found = from_body(CHAT, dump(body), has_session=False)
    assert (found.session, found.own) == (session, own)
    if found.splice:
        assert json.loads(spliced(dump(body), found.splice)) == {"session_id": session, **body}
    asked = body if isinstance(body, dict) else {}
    if own:  # the connector comes to the same name
        given = Asked(
            asked.get("kv_transfer_params"), asked.get("session_id"), asked.get("vllm_xargs")
        )
        assert parse_request(given).hints.session == session


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff{}", b"[" * 100_000, b'{"session_id":"a"', b"7", b"\xef\xbb\xbf{}"]
)
def test_a_body_that_is_no_object_says_nothing(body: bytes) -> None:
    found = from_body(CHAT, body, has_session=False)
    assert (found.session, found.splice) == ("", b"")


def breakpoint_of(ttl: str | None) -> dict[str, Any]:
    return {"cache_control": {"type": "ephemeral"} | ({"ttl": ttl} if ttl else {})}


@pytest.mark.parametrize(
    ("body", "retention_s"),
    [
        ({"messages": [breakpoint_of("1h")]}, 3600),
        ({"messages": [breakpoint_of("5m")]}, 300),
        ({"messages": [breakpoint_of(None)]}, None),
        ({"system": [breakpoint_of("1h")], "messages": [breakpoint_of(None)]}, None),
        ({"messages": [breakpoint_of("9y")]}, None),
        ({"messages": ['"cache_control": {"ttl": "1h"}']}, None),  # a text that looks like one
        ({"prompt_cache_retention": "24h"}, 3600),
        ({"prompt_cache_retention": "in_memory"}, None),
        ({"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_retention": "24h"}, 1800),
        ({"prompt_cache_options": {"ttl": 7}}, None),
        ({"prompt_cache_options": 7}, None),
    ],
)
def test_how_long_a_client_pays_for(body: Any, retention_s: float | None) -> None:
    assert from_body(MESSAGES, dump(body), has_session=True).retention_s == retention_s
    compact = json.dumps(body, separators=(",", ":")).encode()
    assert from_body(MESSAGES, compact, has_session=True).retention_s == retention_s


# --- answers --------------------------------------------------------------------------------------

ANSWERS = {
    "chat": (Answer.FINAL, b'{"choices":[{"message":{"content":"a"},"finish_reason":"stop"}]}'),
    "chat tool": (Answer.TOOL_CALL, b'{"choices":[{"finish_reason":"tool_calls"}]}'),
    "chat stream": (
        Answer.TOOL_CALL,
        b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n'
        b'data: {"choices":[{"delta":{},"finish_reason":"tool_calls"}]}\n\ndata: [DONE]\n\n',
    ),
    "two choices": (
        Answer.TOOL_CALL,
        b'{"choices":[{"finish_reason":"tool_calls"},{"finish_reason":"stop"}]}',
    ),
    "too long": (Answer.UNKNOWN, b'{"choices":[{"finish_reason":"length"}]}'),
    "responses": (
        Answer.FINAL,
        b'event: response.completed\ndata: {"response":{"object":"response"},'
        b'"type":"response.completed"}\n\n',
    ),
    "responses tool": (
        Answer.TOOL_CALL,
        b'{"object":"response","output":[{"arguments":"{}","type":"function_call"}]}',
    ),
    "messages": (Answer.FINAL, b'{"type":"message","stop_reason":"end_turn"}'),
    "messages tool": (
        Answer.TOOL_CALL,
        b'data: {"delta":{"stop_reason":"tool_use"},"type":"message_delta"}\n\n',
    ),
    "spaces": (Answer.TOOL_CALL, b'{"stop_reason": "tool_use"}'),
    "a text": (
        Answer.UNKNOWN,
        json.dumps({"text": '"finish_reason":"tool_calls" "type":"function_call"'}).encode(),
    ),
    "an error": (Answer.UNKNOWN, b'{"error":{"type":"invalid_request_error"}}'),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_how_an_answer_ends_wherever_it_is_cut(name: str) -> None:
    expected, text = ANSWERS[name]
    for cut in range(len(text) + 1):
        reader = AnswerReader()
        for piece in (text[:cut], b"", text[cut:]):
            reader.feed(piece)
        assert reader.answer is expected
    reader = AnswerReader()
    for byte in text:
        reader.feed(bytes([byte]))
    assert reader.answer is expected


# --- pauses ---------------------------------------------------------------------------------------


def test_a_session_resumes_after_its_own_median_pause() -> None:
    pauses = Pauses()
    now, expected = 0.0, []
    for pause_s in (2.0, 4.0, 60.0, 3.0):
        pauses.on_prompt("s", now)
        now += 1.0
        expected.append(pauses.on_answer("s", Answer.TOOL_CALL, now).resume_in_s)
        now += pause_s
    pauses.on_prompt("s", now)
    expected.append(pauses.on_answer("s", Answer.TOOL_CALL, now).resume_in_s)
    assert expected == [None, 2.0, 3.0, 4.0, 3.5]
    # A person's pauses are others than a tool's.
    pauses.on_prompt("s", now + 1)
    assert pauses.on_answer("s", Answer.FINAL, now + 2) == Expectation()
    pauses.on_prompt("s", now + 502)
    pauses.on_answer("s", Answer.TOOL_CALL, now + 503)
    pauses.on_prompt("s", now + 504)
    assert pauses.on_answer("s", Answer.FINAL, now + 505) == Expectation(500.0)


def test_before_a_session_has_a_pause_others_count_or_what_is_paid_for() -> None:
    pauses = Pauses()
    for number in range(20):
        pauses.on_prompt(f"{number}", 0.0)
        pauses.on_answer(f"{number}", Answer.TOOL_CALL, 0.0)
    pauses.on_prompt("new", 0.0)
    assert pauses.on_answer("new", Answer.TOOL_CALL, 0.0) == Expectation()
    for number in range(20):
        pauses.on_prompt(f"{number}", 7.0)
    pauses.on_prompt("newer", 0.0)
    assert pauses.on_answer("newer", Answer.TOOL_CALL, 8.0) == Expectation(7.0)
    pauses.on_prompt("newer", 9.0)
    assert pauses.on_answer("newer", Answer.FINAL, 9.0, retention_s=300.0) == Expectation(300.0)
    pauses.on_prompt("paid", 9.0)
    longest = pauses.on_answer("paid", Answer.FINAL, 9.0, retention_s=86_400.0)
    assert longest == Expectation(PAUSE_S_MAX)
    pauses.on_prompt("tool", 9.0)
    assert pauses.on_answer("tool", Answer.TOOL_CALL, 9.0, retention_s=300.0) == Expectation(7.0)


def test_a_sub_agents_last_answer_is_its_end() -> None:
    pauses = Pauses()
    pauses.on_prompt("child", 0.0)
    assert not pauses.on_answer("child", Answer.TOOL_CALL, 1.0, has_parent=True).ends
    pauses.on_prompt("child", 2.0)
    assert pauses.on_answer("child", Answer.UNKNOWN, 3.0, has_parent=True) == Expectation()
    pauses.on_prompt("child", 4.0)
    assert pauses.on_answer("child", Answer.FINAL, 5.0, has_parent=True) == Expectation(ends=True)
    assert len(pauses) == 0
    pauses.on_prompt("root", 4.0)
    assert not pauses.on_answer("root", Answer.FINAL, 5.0).ends


def test_prompts_of_one_session_at_a_time_are_no_pauses() -> None:
    pauses = Pauses()
    for number in range(3):
        pauses.on_prompt("s", float(number))
    assert pauses.on_answer("s", Answer.FINAL, 5.0, has_parent=True) == Expectation()
    assert pauses.on_answer("s", Answer.TOOL_CALL, 6.0) == Expectation()
    pauses.on_answer("s", Answer.TOOL_CALL, 7.0)
    pauses.on_prompt("s", 9.0)
    assert pauses.on_answer("s", Answer.TOOL_CALL, 9.0) == Expectation(2.0)


def test_a_session_that_came_back_after_hours_has_no_habit() -> None:
    pauses = Pauses()
    for now in (0.0, PAUSE_S_MAX + 1.0):
        pauses.on_prompt("s", now)
        assert pauses.on_answer("s", Answer.TOOL_CALL, now) == Expectation()


def test_sessions_of_strangers_are_bounded() -> None:
    pauses, chance = Pauses(limit=100), random.Random(1)
    for number in range(10_000):
        name = f"{chance.randrange(5000)}"
        pauses.on_prompt(name, float(number))
        pauses.on_answer(name, chance.choice(list(Answer)), number + 0.5)
        pauses.on_answer("nobody", Answer.FINAL, number + 0.5)
    assert len(pauses) == 100


# --- the middleware -------------------------------------------------------------------------------


class Server:
    """An ASGI application that records what reaches it, and answers in pieces."""

    def __init__(self, *pieces: bytes, status: int = 200, reads: bool = True) -> None:
        self.pieces = pieces or (b'{"choices":[{"finish_reason":"stop"}]}',)
        self.status, self.reads = status, reads
        self.headers: list[tuple[bytes, bytes]] = []
        self.received: list[Message] = []
        self.answer_headers: list[tuple[bytes, bytes]] = [(b"content-type", b"application/json")]

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.received)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        self.headers = list(scope["headers"])
        while self.reads:
            message = await receive()
            self.received.append(message)
            if message["type"] != "http.request" or not message.get("more_body"):
                break
        start = {"type": "http.response.start", "status": self.status}
        await send({**start, "headers": self.answer_headers})
        for number, piece in enumerate(self.pieces, 1):
            more = number < len(self.pieces)
            await send({"type": "http.response.body", "body": piece, "more_body": more})


class Client:
    """One caller of the middleware; `told` is what the pool would be told."""

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = server
        self.middleware = Middleware(server)
        self.told: list[tuple[str, Expectation]] = []
        self.events: list[str] = []
        self.sent: list[Message] = []
        self.pieces = 1
        client = self

        class Told:
            def __init__(self, *arguments: Any) -> None: ...
            def send(self, session: str, expected: Expectation) -> None:
                client.told.append((session, expected))

            def close(self) -> None: ...

        monkeypatch.setattr(sessions, "HintSender", Told)
        self.middleware._counters = self.events.append
        self.now = 0.0
        monkeypatch.setattr(sessions.time, "monotonic", lambda: self.now)

    async def ask(
        self,
        path: str,
        body: bytes,
        headers: Iterable[tuple[str, str]] = (),
        method: str = "POST",
        **scope: Any,
    ) -> bytes:
        size = -(-len(body) // self.pieces) or 1
        cut = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
        messages = [
            {"type": "http.request", "body": piece, "more_body": n < len(cut)}
            for n, piece in enumerate(cut, 1)
        ]
        waiting = iter(messages)

        async def receive() -> Message:
            await asyncio.sleep(0)
            return next(waiting, {"type": "http.disconnect"})

        async def send(message: Message) -> None:
            self.sent.append(message)

        self.server.received.clear()
        self.sent.clear()
        whole: Scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [*raw_headers(headers), (b"content-length", str(len(body)).encode())],
            **scope,
        }
        before = (dict(whole), list(whole["headers"]))
        await self.middleware(whole, receive, send)
        assert (dict(whole), list(whole["headers"])) == before
        return b"".join(m["body"] for m in self.sent if m["type"] == "http.response.body")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Callable[[Server], Client]:
    return lambda server: Client(server, monkeypatch)


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/embeddings", b'{"prompt_cache_key":"k"}'),
        ("POST", "/v1/messages/count_tokens", b'{"prompt_cache_key":"k"}'),
        ("PUT", CHAT, b'{"prompt_cache_key":"k"}'),
        ("POST", CHAT, b'{"messages": [ ] ,"n":1.0, "n":2}'),
        ("POST", CHAT, b"\x00\xff not JSON"),
        ("POST", CHAT, b""),
        ("POST", CHAT, b'{"prompt_cache_key":"k", "text":"' + b"x" * BODY_MAX + b'"}'),
        (
            "POST",
            MESSAGES,
            b'{"vllm_xargs":{},"metadata":{"user_id":"{\\"session_id\\":\\"s\\"}"}}',
        ),
    ],
)
async def test_what_it_does_not_know_passes_byte_for_byte(
    method: str, path: str, body: bytes, pieces: int, client: Callable[[Server], Client]
) -> None:
    one = client(Server(b"an", b"", b"swer \xff"))
    one.pieces = pieces
    assert await one.ask(path, body, [("Accept", "*/*")], method) == b"answer \xff"
    assert one.server.body == body
    assert [name for name, _ in one.server.headers] == [b"accept", b"content-length"]
    assert [m.get("body") for m in one.sent[1:]] == [b"an", b"", b"swer \xff"]
    assert one.told == []


@pytest.mark.parametrize("pieces", [1, 5])
async def test_a_session_of_the_body_is_put_before_the_rest(
    pieces: int, client: Callable[[Server], Client]
) -> None:
    one = client(Server())
    one.pieces = pieces
    body = b' \n{ "n":1.0, "text":"\xc3\xa9" ,"prompt_cache_key":"k\xc3\xa9y", "n":2}  '
    await one.ask(RESPONSES, body)
    assert one.server.body == b' \n{"session_id":"k\\u00e9y",' + body[3:]
    assert one.events == ["named"]


async def test_a_session_of_the_headers_leaves_the_body_alone(
    client: Callable[[Server], Client],
) -> None:
    one = client(Server())
    for request in captured("codex") + captured("claude_code"):
        path, body = request["path"].partition("?")[0], dump(request["body"])
        await one.ask(path, body, [tuple(pair) for pair in request["headers"]])
        assert one.server.body == body
        session = from_headers(raw_headers(request["headers"])).session
        assert one.server.headers[-1] == (b"x-session-id", session.encode())
    own = [("x-session-id", "own"), ("thread-id", "t")]
    await one.ask(CHAT, b"{}", own)
    assert one.server.headers == [*raw_headers(own), (b"content-length", b"2")]
    await one.ask(CHAT, b"{}", [("x-session-id", "a" * 500)])
    assert one.server.headers[-1] == (b"x-session-id", session_name("a" * 500).encode())


async def test_a_server_behind_a_prefix(client: Callable[[Server], Client]) -> None:
    one = client(Server())
    await one.ask(f"/pool{CHAT}", b'{"prompt_cache_key":"k"}', root_path="/pool")
    assert json.loads(one.server.body)["session_id"] == "k"


async def test_a_request_that_the_server_refuses_unread_is_not_read(
    client: Callable[[Server], Client],
) -> None:
    """Such as one without the key of the API: strangers fill no table and no memory."""
    one = client(Server(status=401, reads=False))
    await one.ask(CHAT, b'{"prompt_cache_key":"k"}', [("thread-id", "t")])
    assert (one.events, one.told, len(one.middleware._pauses)) == ([], [], 0)


@pytest.mark.parametrize("where", ["from_headers", "from_body", "AnswerReader", "_with_session"])
async def test_a_fault_of_its_own_costs_a_request_nothing(
    where: str, client: Callable[[Server], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError("a mistake")

    one = client(Server())
    monkeypatch.setattr(sessions, where, broken)
    body = b'{"prompt":"a"}'
    answer = await one.ask(CHAT, body, [("thread-id", "t")])
    assert answer == one.server.pieces[0]
    assert one.server.body == body
    assert "fault" in one.events


async def test_a_pool_whose_settings_are_wrong_costs_a_request_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Wrong:
        def __init__(self, *arguments: Any) -> None:
            raise RuntimeError("a mistake")

    server = Server(b'{"stop_reason":"end_turn"}')
    one = Client(server, monkeypatch)
    monkeypatch.setattr(sessions, "HintSender", Wrong)
    headers = [("thread-id", "t"), ("x-codex-parent-thread-id", "p")]
    assert await one.ask(RESPONSES, b"{}", headers) == server.pieces[0]
    assert one.events == ["named", "fault"]


async def test_hints_are_about_the_session_of_the_engines_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Thread:
        def __init__(self, *arguments: Any) -> None: ...
        def start(self, tell: Any) -> bool:
            told.append(tell.args[1])
            return True

    told: list[str] = []
    monkeypatch.setattr(sessions, "PoolThread", Thread)
    for tenant in ("default", "blue"):
        chosen = settings_module.parse({"tenant": tenant})
        monkeypatch.setattr(sessions, "_settings", lambda scope, chosen=chosen: chosen)
        sender = sessions.HintSender({}, lambda event: None)
        sender.send("s", Expectation(ends=True))
    assert told == ["s", "tenant=blue/s"]


async def test_a_client_that_goes_away_while_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    middleware = Middleware(server)
    messages: list[Message] = [
        {"type": "http.request", "body": b'{"prompt_cache_key"', "more_body": True},
        {"type": "http.disconnect"},
    ]
    waiting = iter(messages)

    async def receive() -> Message:
        return next(waiting)

    async def send(message: Message) -> None: ...

    scope: Scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
    await middleware(scope, receive, send)
    assert server.received == messages[:1] + messages[1:]
    assert len(middleware._pauses) == 0


async def test_a_cancelled_receive_loses_nothing() -> None:
    """Servers wait for a body and for something else at once, and cancel the one that is later."""
    queue: asyncio.Queue[Message] = asyncio.Queue()
    got: list[Message] = []

    async def server(scope: Scope, receive: Any, send: Any) -> None:
        queue.put_nowait({"type": "http.request", "body": b'{"n"', "more_body": True})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receive(), 0.01)
        queue.put_nowait({"type": "http.request", "body": b":1}", "more_body": False})
        got.extend([await receive(), await receive()])

    async def send(message: Message) -> None: ...

    scope: Scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
    await Middleware(server)(scope, queue.get, send)
    assert b"".join(message["body"] for message in got) == b'{"n":1}'


TOOL, FINAL = b'{"stop_reason":"tool_use"}', b'{"stop_reason":"end_turn"}'


async def test_the_pool_is_told_when_a_session_resumes_and_when_a_sub_agent_has_ended(
    client: Callable[[Server], Client],
) -> None:
    """The captured turns of Claude Code, with the pauses of a tool."""
    one = client(Server())
    for request, answer in zip(
        captured("claude_code"), (TOOL, TOOL, TOOL, FINAL, FINAL, FINAL), strict=True
    ):
        one.server.pieces = (answer[:9], answer[9:])
        one.now += 3.0
        headers = [tuple(pair) for pair in request["headers"]]
        await one.ask(MESSAGES, dump(request["body"]), headers)
    assert one.told == [
        (CLAUDE, Expectation(3.0)),
        (CLAUDE, Expectation(3.0)),
        (CLAUDE_AGENT, Expectation(ends=True)),
        (CLAUDE, Expectation(3.0)),
    ]


@pytest.mark.parametrize("what", ["refused", "compressed", "cut off", "no sign of its end"])
async def test_nothing_is_concluded_from_an_answer_that_is_none(
    what: str, client: Callable[[Server], Client]
) -> None:
    one = client(Server(FINAL))
    if what == "refused":
        one.server.status = 400
    elif what == "compressed":
        one.server.answer_headers.append((b"Content-Encoding", b"gzip"))
    elif what == "no sign of its end":
        one.server.pieces = (b"{}",)
    else:
        inner = one.server

        async def dies(scope: Scope, receive: Any, send: Any) -> None:
            async def cut(message: Message) -> None:
                if message.get("body"):
                    raise ConnectionResetError
                await send(message)

            await inner(scope, receive, cut)

        one.middleware._app = dies
    headers = [("thread-id", "t"), ("x-codex-parent-thread-id", "p")]
    if what == "cut off":
        with pytest.raises(ConnectionResetError):
            await one.ask(RESPONSES, b"{}", headers)
    else:
        await one.ask(RESPONSES, b"{}", headers)
    assert one.told == []
    assert one.middleware._pauses._sessions["t"].waiting == 0


async def test_a_client_may_say_that_a_session_is_over(client: Callable[[Server], Client]) -> None:
    one = client(Server(FINAL))
    await one.ask(CHAT, b"{}", [("x-dynamo-session-id", "s"), ("x-dynamo-session-final", "true")])
    assert one.told == [("s", Expectation(ends=True))]


async def test_other_kinds_of_connections_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    async def server(scope: Scope, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    for kind in ("websocket", "lifespan"):
        scope: Scope = {"type": kind, "path": CHAT, "headers": []}
        receive: Any = object()
        await Middleware(server)(scope, receive, receive)
        assert seen.pop() == (scope, receive, receive)
