"""Whether the master or server in this container is ready: exit code 0 or 1, and why.

It asks the page that the first process serves (`--http`, or its setting); without one there is
nobody to ask, and the answer is yes. `http.client` knows no proxies, whatever the environment says.
"""

import http.client
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from kvpool.addresses import is_everywhere, split
from kvpool.cli.settings import load

TIMEOUT_S = 3.0


def flag(words: list[str], name: str) -> str | None:
    """What follows `--name` or `--name=`; the last counts."""
    found = None
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == f"--{name}":
            found = after
        elif word.startswith(f"--{name}="):
            found = word.partition("=")[2]
    return found


def page_of(words: list[str], environment: Mapping[str, str]) -> str:
    """`host:port` of the page of the process with this command line; empty if it has none."""
    part = next((word for word in words if word in ("master", "server")), "")
    if not part:
        return ""
    file = flag(words, "config") or environment.get("KVPOOL_CONFIG")
    settings = load(file, environment, {f"{part}.http": flag(words, "http")})
    return str(getattr(settings, part).http)


def problem_of(page: str) -> str:
    """Empty if it is ready."""
    where = split(page)
    if where is None:
        return f"no address: {page}"
    _, host, port = where
    if is_everywhere(host):
        host = "::1" if ":" in host else "127.0.0.1"
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/ready")
        answer = connection.getresponse()
        text = answer.read(1000).decode(errors="replace").strip()
        return "" if answer.status == http.HTTPStatus.OK else text or str(answer.status)
    except (OSError, http.client.HTTPException) as error:
        return f"{page} does not answer: {error or type(error).__name__}"
    finally:
        connection.close()


if __name__ == "__main__":
    command = Path(sys.argv[1] if len(sys.argv) > 1 else "/proc/1/cmdline").read_bytes()
    asked = page_of(command.decode(errors="replace").split("\0"), os.environ)
    sys.exit((asked and problem_of(asked)) or 0)
