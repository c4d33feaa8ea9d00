"""A server does without each of its extensions, and says so to whoever asks for one."""

from __future__ import annotations

import pytest

from kvpool import admin, dev
from kvpool.errors import Forbidden
from kvpool.server import extension
from tests.conftest import NAMESPACE, buffers, keys, values

CHAIN = keys("chain", 10)


@pytest.mark.parametrize("listen", [("inproc://",), ("tcp://127.0.0.1:0",), ("shm://",)])
async def test_a_server_without_extensions_serves_blocks_and_refuses_the_rest(
    listen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension, "EXTENSIONS", ())
    async with dev.serve("8MiB", servers=2, listen=listen) as running, running.pool() as pool:
        written = await pool.write(NAMESPACE, CHAIN, values(CHAIN))
        assert all(status.present for status in written)
        with pytest.raises(Forbidden, match="Drain: this server runs without the extension"):
            await admin(pool).drain("dev-0", within_s=1)
        (report,) = (await admin(pool).spread(NAMESPACE, CHAIN, to=2)).servers
        assert (report.fetched, report.problem) == (0, "it cannot fetch")
        into = buffers(len(CHAIN))
        assert all(result.status.hit for result in await pool.read(NAMESPACE, CHAIN, into))
        assert into == values(CHAIN)
        assert all(await pool.remove(NAMESPACE, CHAIN))
        assert not any(server.stack.stored for server in running.servers)
