"""`kvpool events --engine`: a process that publishes an engine's events with the pool's part."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import urllib.request

import pytest
import zmq
import zmq.asyncio
from typer.testing import CliRunner

from kvpool import dev
from kvpool.cli.app import app
from kvpool.kv_events import StoredEvent, decode_batch, short_hash
from kvpool.net.event_publisher import EventPublisher
from tests.conftest import NAMESPACE, keys, patient, values

ENGINE = "tcp://127.0.0.1:1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", ENGINE, "--form", "other"], "--form is 'other', expected shared or plain"),
        (["--engine-replay", ENGINE], "--engine-replay needs --engine"),
        (["--topic", "a\nb"], "--topic: expected at most 256 characters that can be printed"),
        (["--topic", "a" * 257], "--topic: expected at most 256 characters"),
        (["--http", "0.0.0.0:7453"], "0.0.0.0:7453"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: list[str], message: str) -> None:
    command = ["events", "--namespace", "n", "--publish", "tcp://127.0.0.1:0", *arguments]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


async def test_it_reads_an_engine_and_publishes_where_the_pool_has_its_blocks() -> None:
    digests = keys("engine events", 3)
    engine = EventPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
    engine.start()
    stored = StoredEvent(
        block_hashes=[short_hash(one) for one in digests],
        parent_block_hash=None,
        token_ids=[1, 2, 3],
        block_size=1,
        lora_id=None,
        lora_name=None,
        medium="GPU",
    )
    engine.publish([stored], time.time())
    context = zmq.asyncio.Context()
    async with dev.serve("64MiB") as serving, serving.pool() as pool:
        await pool.write(NAMESPACE, digests, values(digests))
        command = ["events", "--namespace", NAMESPACE.name, "--masters", serving.address]
        command += ["--engine", engine.endpoint, "--engine-replay", engine.replay_endpoint]
        command += ["--publish", "tcp://127.0.0.1:0", "--form", "plain", "--die-with-parent"]
        command += ["--topic", "kv@pod@model", "--http", "127.0.0.1:0"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvpool", *command, stdout=asyncio.subprocess.PIPE
        )
        sub = context.socket(zmq.SUB)
        try:
            assert process.stdout is not None
            line = (await asyncio.wait_for(process.stdout.readline(), 20)).decode()
            assert line.startswith("publishing at tcp://127.0.0.1:")
            sub.setsockopt(zmq.SUBSCRIBE, b"kv@")  # as llm-d does
            sub.connect(line.split()[-1])
            await asyncio.sleep(0.5)
            engine.publish([stored], time.time())
            await pool.remove(NAMESPACE, digests[:1])
            media: list[tuple[str, str | None, int]] = []
            until = time.monotonic() + 10
            while ("RemovedEvent", "CPU", 1) not in media:
                assert time.monotonic() < until, media
                topic, _, payload = await asyncio.wait_for(sub.recv_multipart(), 10)
                assert topic == b"kv@pod@model"
                for event in decode_batch(payload).events:
                    hashes = getattr(event, "block_hashes", [])
                    medium = getattr(event, "medium", None)
                    media.append((type(event).__name__, medium, len(hashes)))
            assert ("StoredEvent", "GPU", 3) in media
            url = (await asyncio.wait_for(process.stdout.readline(), 10)).decode().split()[-1]
            page = await asyncio.to_thread(lambda: urllib.request.urlopen(f"{url}/metrics").read())
            figures = dict(one.split() for one in page.decode().splitlines() if one[0] != "#")
            assert float(figures["kvpool_events_engine_batches_total"]) == 2
            assert float(figures["kvpool_events_batches_total"]) >= 4
            assert float(figures["kvpool_events_blocks"]) == 3
            assert 0 <= float(figures["kvpool_events_engine_lag_seconds"]) < patient(5)
            assert 0 <= float(figures["kvpool_events_behind_seconds"]) < patient(5)
            ready = await asyncio.to_thread(lambda: urllib.request.urlopen(f"{url}/ready").status)
            assert ready == 200
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 10) == 0
        finally:
            if process.returncode is None:
                os.kill(process.pid, signal.SIGKILL)
                await process.wait()
            context.destroy(linger=0)
            engine.close()
