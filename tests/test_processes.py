"""Real processes on loopback: started, stopped, killed and frozen as an operator would."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from kvpool import ClientConfig, Pool, ReadStatus, WriteStatus, connect
from tests.conftest import NAMESPACE, buffers, key, keys, value, values


class Command:
    """A `kvpool` command in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvpool", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def line(self, starting: str) -> str:
        """Its first line of output that starts like this."""
        assert self.process.stdout is not None
        seen = []
        for line in self.process.stdout:
            if line.startswith(starting):
                return line.strip()
            seen.append(line)
        raise AssertionError("".join(seen))

    def stop(self, number: int = signal.SIGTERM) -> float:
        """Signal it; returns the seconds until it was gone."""
        started = time.monotonic()
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.send_signal(signal.SIGCONT)
        self.process.wait(10)
        return time.monotonic() - started


def open_sockets() -> list[str]:
    """The abstract Unix sockets of the servers of these tests."""
    with open("/proc/net/unix") as sockets:
        return [line for line in sockets if "@kvpool-s" in line]


class Cluster:
    """A master and servers, by name."""

    def __init__(self, servers: int, *options: str) -> None:
        self.master = Command("master", "--bind", "127.0.0.1:0")
        self.address = self.master.line("master at ").removeprefix("master at ")
        self.servers: dict[str, Command] = {}
        for number in range(servers):
            self.start_server(f"s{number}", *options)

    def start_server(self, name: str, *options: str) -> None:
        server = Command(
            "server", "--id", name, "--masters", self.address, "--capacity", "64MiB", *options
        )
        server.line(f"server {name}, 64 MiB: ")
        self.servers[name] = server

    def close(self) -> None:
        for command in (*self.servers.values(), self.master):
            if command.process.poll() is None:
                command.stop(signal.SIGKILL)
            assert command.process.stdout is not None
            command.process.stdout.close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    running = Cluster(2)
    yield running
    running.close()


async def opened(running: Cluster, *transports: str, servers: int = 2) -> Pool:
    """A client that sees all servers."""
    config = ClientConfig(
        masters=[running.address], transports=list(transports) or ["shm", "tcp"], attempt_s=0.5
    )
    pool = await connect(config=config)
    for _ in range(200):
        if sum(member.alive for member in await pool.members()) == servers:
            return pool
        await asyncio.sleep(0.02)
    raise AssertionError("the servers did not register")


@pytest.fixture(params=["shm", "tcp"])
async def pool(request: pytest.FixtureRequest, cluster: Cluster) -> AsyncIterator[Pool]:
    async with await opened(cluster, request.param) as client:
        yield client


async def fill(pool: Pool, server: str, count: int, size: int = 1 << 20) -> list[bytes]:
    """Blocks on one server, each the child of the one before."""
    chain = keys(f"on {server}", count)
    for digest in chain:
        status = await pool.write_to(server, NAMESPACE, digest, value(digest, size))
        assert status is WriteStatus.STORED
    return chain


async def test_another_process_reads_what_this_one_wrote(cluster: Cluster, pool: Pool) -> None:
    chain = keys("shared", 16)
    assert set(await pool.write(NAMESPACE, chain, values(chain))) == {WriteStatus.STORED}
    script = f"""
        import asyncio, kvpool
        from tests.conftest import NAMESPACE, buffers, keys, values
        async def main():
            chain = keys("shared", 16)
            async with await kvpool.connect("{cluster.address}") as pool:
                match = await pool.match(NAMESPACE, chain)
                got = buffers(16)
                await pool.read(NAMESPACE, chain, got, match=match)
                assert got == values(chain)
                print(match.length)
        asyncio.run(main())
    """
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout.strip() == "16", done.stderr


async def test_kill_9_of_a_server_under_reads(cluster: Cluster, pool: Pool) -> None:
    """G6: reads end by their deadline, with right bytes or a miss; the other server's go on."""
    lost, kept = await fill(pool, "s0", 24), await fill(pool, "s1", 8)
    loop = asyncio.get_running_loop()
    seen: set[ReadStatus] = set()

    async def reader(chain: list[bytes], timeout: float) -> None:
        match = await pool.match(NAMESPACE, chain)
        for _ in range(30):
            got = buffers(len(chain), 1 << 20)
            started = loop.time()
            results = await pool.read(NAMESPACE, chain, got, match=match, timeout=timeout)
            assert loop.time() - started < timeout + 0.2
            for digest, result, buffer in zip(chain, results, got, strict=True):
                assert not result.status.hit or buffer == value(digest, 1 << 20)
                if chain is lost:
                    seen.add(result.status)
                else:
                    assert result.status.hit

    # Both start before the kill and are in the middle of it when it comes.
    reading = asyncio.gather(reader(lost, 2.0), reader(kept, 5.0))
    await asyncio.sleep(0.1)
    cluster.servers["s0"].stop(signal.SIGKILL)
    await reading
    assert ReadStatus.SERVER_LOST in seen
    assert seen <= {ReadStatus.HIT, ReadStatus.SERVER_LOST, ReadStatus.DEADLINE}


async def test_kill_9_of_a_server_under_writes(cluster: Cluster, pool: Pool) -> None:
    """A write whose server dies goes to the other one, or says so; what is stored is right."""
    chain = keys("under fire", 40)

    async def writer() -> list[WriteStatus]:
        statuses = []
        for digest in chain:
            statuses += await pool.write(NAMESPACE, [digest], [value(digest, 1 << 20)], timeout=3)
        return statuses

    writing = asyncio.create_task(writer())
    await asyncio.sleep(0.05)
    cluster.servers["s0"].stop(signal.SIGKILL)
    statuses = await writing
    allowed = {WriteStatus.STORED, WriteStatus.SERVER_LOST, WriteStatus.DEADLINE}
    assert set(statuses) <= allowed
    assert statuses[-1] is WriteStatus.STORED
    got = buffers(40, 1 << 20)
    results = await pool.read(NAMESPACE, chain, got)
    for digest, result, buffer in zip(chain, results, got, strict=True):
        assert not result.status.hit or buffer == value(digest, 1 << 20)


async def test_a_frozen_server_costs_a_deadline_and_not_more(cluster: Cluster, pool: Pool) -> None:
    """G6: SIGSTOP is harder than a kill: the sockets live. When it wakes, all is served again."""
    chain = await fill(pool, "s0", 4)
    cluster.servers["s0"].process.send_signal(signal.SIGSTOP)
    loop = asyncio.get_running_loop()
    started = loop.time()
    results = await pool.read(NAMESPACE, chain, buffers(4, 1 << 20), timeout=1.0)
    assert loop.time() - started < 1.2
    assert {result.status for result in results} <= {ReadStatus.DEADLINE, ReadStatus.SERVER_LOST}
    cluster.servers["s0"].process.send_signal(signal.SIGCONT)
    for _ in range(100):
        got = buffers(4, 1 << 20)
        results = await pool.read(NAMESPACE, chain, got)
        if all(result.status.hit for result in results):
            break
        await asyncio.sleep(0.1)
    assert got == values(chain, 1 << 20)


WRITER = """
    import asyncio, os, signal, socket, struct, sys
    from kvpool.wire.frames import encode_frame
    from kvpool.wire.messages import Hello, Reserve, encode
    address = sys.argv[1].removeprefix("shm://")
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("\\0" + address[1:])
    socket.recv_fds(sock, 1, 2)
    sock.sendall(encode_frame(*encode(Hello("default", "frozen"))))
    sock.recv(4096)
    keys = bytes(range(32))
    request = Reserve("test/model", 1, 32, keys, 0, bytes(32), [1 << 20], 0.2)
    sock.sendall(encode_frame(*encode(request)))
    sock.recv(4096)
    print("reserved", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


async def member(pool: Pool, name: str) -> dict[str, int]:
    """What a server reports of itself."""
    (found,) = [m for m in await pool.members() if m.server == name]
    return {**found.counters, "reservations": found.reservations, "used": found.used}


async def until(pool: Pool, name: str, field: str, expected: int, within_s: float) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + within_s
    while (await member(pool, name))[field] != expected:
        assert loop.time() < end, await member(pool, name)
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("frozen_first", [False, True])
async def test_a_killed_writers_space_comes_back(cluster: Cluster, frozen_first: bool) -> None:
    """G3, G4: at once when it dies; and when we closed a frozen writer's link, not before it dies,

    because it still has the segment mapped.
    """
    async with await opened(cluster, "shm") as pool:
        (found,) = [m for m in await pool.members() if m.server == "s0"]
        address = next(a for a in found.addresses if a.startswith("shm"))
        writer = subprocess.Popen(  # noqa: ASYNC220 (its output is awaited)
            [sys.executable, "-c", textwrap.dedent(WRITER), address],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        assert await asyncio.to_thread(writer.stdout.readline) == "reserved\n"
        await until(pool, "s0", "reservations", 1, 3)
        if frozen_first:
            await until(pool, "s0", "quarantined", 1, 9)
            assert (await member(pool, "s0"))["used"] == 1 << 20
        writer.kill()
        writer.wait()
        writer.stdout.close()
        await until(pool, "s0", "used", 0, 3)
        assert (await member(pool, "s0"))["quarantined"] == 0


async def test_a_restarted_server_starts_empty_and_says_so(cluster: Cluster) -> None:
    async with await opened(cluster) as pool:
        chain = await fill(pool, "s0", 4)
        cluster.servers["s0"].stop(signal.SIGKILL)
        await asyncio.to_thread(cluster.start_server, "s0")
        for _ in range(300):
            match = await pool.match(NAMESPACE, chain)
            if match.stopped is ReadStatus.SERVER_LOST and not match.length:
                break
            await asyncio.sleep(0.02)
        assert (match.length, match.stopped) == (0, ReadStatus.SERVER_LOST)
        for _ in range(300):
            if sum(m.alive for m in await pool.members()) == 2:
                break
            await asyncio.sleep(0.02)
        assert await pool.write_to("s0", NAMESPACE, key("new"), b"x") is WriteStatus.STORED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_everything_ends_within_a_second(number: int) -> None:
    running = Cluster(2)
    assert len(open_sockets()) == 2
    try:
        for command in (*running.servers.values(), running.master):
            assert command.stop(number) < 1.0
            assert command.process.returncode == 0
    finally:
        running.close()
    assert not open_sockets()


def test_kill_9_leaves_nothing_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    running = Cluster(2)
    running.close()
    assert set(os.listdir("/dev/shm")) == before
    assert not open_sockets()


# --- the command line -------------------------------------------------------------------


def kvpool(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvpool", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, **environment},
    )


def test_status_explain_and_doctor(cluster: Cluster) -> None:
    where = ("--masters", cluster.address)
    for _ in range(100):
        done = kvpool("status", *where, "--json")
        if done.returncode == 0 and len(json.loads(done.stdout)) == 2:
            break
    assert {m["server"] for m in json.loads(done.stdout)} == {"s0", "s1"}
    assert "s0" in kvpool("status", *where).stdout
    answer = kvpool("explain", "ab" * 32, "--namespace", "m", *where)
    assert "never written" in answer.stdout
    findings = json.loads(kvpool("doctor", *where, "--json").stdout)
    assert not [f for f in findings if f["verdict"] == "fail"]
    assert len([f for f in findings if f["check"].startswith("server s")]) == 4


def test_no_master_is_said_within_two_seconds() -> None:
    started = time.monotonic()
    done = kvpool("status", "--masters", "127.0.0.1:9")
    assert done.returncode == 1
    assert "127.0.0.1:9" in done.stderr
    assert time.monotonic() - started < 2.0 + 1.0  # and the start of Python


def test_a_port_in_use_is_named(cluster: Cluster) -> None:
    done = kvpool("master", "--bind", cluster.address)
    assert done.returncode == 2
    assert cluster.address in done.stderr
    assert "in use" in done.stderr


def test_an_id_in_use_is_named(cluster: Cluster) -> None:
    done = kvpool("server", "--id", "s0", "--masters", cluster.address, "--capacity", "1MiB")
    assert done.returncode == 2
    assert "'s0' belongs to another living server" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("server", "--capacity", "64GB"), "did you mean 64GiB?"),
        (("server", "--capacity", "-5MiB"), "negative"),
        (("server", "--capacity", "900TiB"), "available"),
        (("server", "--capacity", "0"), "at least 4096"),
        (("server", "--listen", "carrier-pigeon://x"), "carrier-pigeon"),
        (("server", "--listen", "tcp://0.0.0.0:0"), "--insecure"),
        (("master", "--bind", "0.0.0.0:7450"), "--insecure"),
        (("master", "--bind", "nonsense"), "expected host:port"),
        (("explain", "xyz", "--namespace", "n"), "expected hex"),
        (("master", "--log-level", "loud"), "loud"),
    ],
)
def test_a_wrong_flag_is_a_sentence_and_exit_2(arguments: tuple[str, ...], says: str) -> None:
    done = kvpool(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
