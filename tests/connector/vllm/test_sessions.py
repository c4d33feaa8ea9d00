"""Sessions of real clients through `vllm serve` and the middleware to the pool."""

from __future__ import annotations

import inspect
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.generate.base import serving
from vllm.entrypoints.launchers.api_server import app_state
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from examples.vllm_two_instances import Instance, transfer
from kvpool_agents import client_requests
from tests.conftest import soon
from tests.connector.vllm.helpers import Models
from tests.support.local_pool import LocalPool

KEY = "a key of the API"
WORDS = " ".join(["ab", "cd", "ef", "gh"] * 40)
#: The model is random and would write on: one of these, which many of its tokens have, ends it.
LETTERS = ["e", "a", "t", " "]


def test_vllm_takes_sessions_from_the_fields_that_the_middleware_fills() -> None:
    """Those that each endpoint accepts, and where the API server keeps its configuration."""
    models: dict[str, Any] = {
        "/v1/chat/completions": ChatCompletionRequest,
        "/v1/completions": CompletionRequest,
        "/v1/responses": ResponsesRequest,
        "/v1/messages": AnthropicMessagesRequest,
    }
    assert models.keys() == client_requests.PATHS
    for path, model in models.items():
        wanted = "vllm_xargs" if path == client_requests.MESSAGES_PATH else "session_id"
        assert {wanted, "kv_transfer_params"} <= set(model.model_fields), path
    assert serving.SESSION_ID_HEADER.lower().encode() == client_requests.SESSION_HEADER
    assert "state.vllm_config = vllm_config" in inspect.getsource(app_state)


@pytest.mark.timeout(300)
def test_sessions_of_real_clients_arrive_in_the_pool(
    pool: LocalPool, model: Models, tmp_path: Path
) -> None:
    """Each endpoint with the client that people use, streamed and whole, by header and by body."""
    arguments = ("--middleware", "kvpool_agents.sessions.Middleware", "--api-key", KEY)
    config = transfer(pool.master, load="always")
    instance = Instance("S", model(), tmp_path / "sessions.log", config, arguments=arguments)
    try:
        instance.ready()
        url = f"http://127.0.0.1:{instance.port}"
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=60) as codex,
            anthropic.Anthropic(base_url=url, auth_token=KEY, api_key=None, timeout=60) as claude,
        ):
            _ask_all(codex, claude)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            _ask_without_key(url)
        expected = {"key", "thread", "child", "body", "claude", "claude/agent", "user"}
        pool.settled(60)
        assert sorted(_sessions(pool)) == sorted(expected)
        # The child has ended, and so has the agent; of the others nobody knows a pause yet.
        soon(lambda: _ended(pool) == {"child", "claude/agent"}, 60)
        soon(lambda: _explained(pool) == [True], 60)
        assert pool.ask(lambda client: client.session("thread").end()) is True
        (member,) = pool.ask(lambda client: client.members())
        assert member.stats.counters["sessions"] == len(expected)
        metrics = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
        assert 'vllm:kvpool_client_events_total{event="ends_accepted"} 2.0' in metrics
        assert 'event="fault"' not in metrics
    finally:
        instance.close()


def _ask_all(codex: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    """One prompt of more than a block for each session."""
    few: dict[str, Any] = {"model": "tiny", "temperature": 1}
    codex.responses.create(input=f"1 {WORDS}", max_output_tokens=4, prompt_cache_key="key", **few)
    streamed = codex.responses.create(
        input=f"2 {WORDS}",
        max_output_tokens=4,
        stream=True,
        extra_headers={"session-id": "root", "thread-id": "thread"},
        **few,
    )
    assert [event.type for event in streamed][-1] in ("response.completed", "response.incomplete")
    headers = {"session-id": "root", "thread-id": "child", "x-codex-parent-thread-id": "root"}
    message: Any = {"role": "user", "content": f"3 {WORDS}"}
    chat = codex.chat.completions.create(
        messages=[message], max_tokens=500, stop=LETTERS, extra_headers=headers, **few
    )
    assert chat.choices[0].finish_reason == "stop"
    codex.completions.create(
        prompt=f"4 {WORDS}", max_tokens=4, extra_body={"session_id": "body"}, **few
    )
    for number, headers in enumerate(
        (
            {"X-Claude-Code-Session-Id": "claude"},
            {"X-Claude-Code-Session-Id": "claude", "x-claude-code-agent-id": "agent"},
            {},
        )
    ):
        with claude.messages.stream(
            messages=[{"role": "user", "content": f"{number + 5} {WORDS}"}],
            max_tokens=500,
            extra_headers=headers,
            extra_body={"metadata": {"user_id": '{"session_id": "user"}'}, "temperature": 1},
            model="tiny",
            stop_sequences=LETTERS,
        ) as stream:
            assert stream.get_final_message().stop_reason in ("stop_sequence", "end_turn")


def _ask_without_key(url: str) -> None:
    body = b'{"model":"tiny","prompt":"%s","prompt_cache_key":"stranger"}' % WORDS.encode()
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers))


def _sessions(pool: LocalPool) -> dict[str, int]:
    """The sessions of the pool, and when each has ended."""
    (server,) = pool.dev.servers
    return {name: one.ended for name, one in server.store.extents.policy.sessions.items()}


def _ended(pool: LocalPool) -> set[str]:
    return {name for name, ended in _sessions(pool).items() if ended}


def _explained(pool: LocalPool) -> list[bool]:
    """What the servers made of the child's end, which the pool was told last."""
    report = pool.ask(lambda client: client.session("child").explain())
    assert None in [resume_in for _, resume_in in report.hints]
    return [followed for _, followed, _ in report.servers]
