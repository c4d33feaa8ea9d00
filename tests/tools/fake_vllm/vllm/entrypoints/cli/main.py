"""What `make demo-vllm` needs of `vllm serve`, without a model: an answer comes at once."""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: A file that gets the id of each process, and the number of answers after which one exits.
PIDS, DIES_AFTER = os.environ["FAKE_VLLM_PIDS"], int(os.environ.get("FAKE_VLLM_DIES_AFTER", "0"))


class Handler(BaseHTTPRequestHandler):
    answered = 0

    def do_GET(self) -> None:
        self._send(b'vllm:external_prefix_cache_hits_total{engine="0"} 0\n')

    def do_POST(self) -> None:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Handler.answered += 1
        if DIES_AFTER and Handler.answered > DIES_AFTER:
            print("the engine core has died", flush=True)
            os._exit(1)
        token = sum(body["prompt"]) % 1000
        events = [
            {"choices": [{"token_ids": [token] * body["max_tokens"]}]},
            {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 32}}},
        ]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._send("".join([*lines, "data: [DONE]\n\n"]).encode())

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


if __name__ == "__main__":
    with open(PIDS, "a") as file:
        print(os.getpid(), file=file)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
