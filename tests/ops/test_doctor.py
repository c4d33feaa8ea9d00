"""`kvpool doctor` explains why engines of one model find nothing of each other's."""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvpool import ClientConfig, Namespace, Pool, ReadStatus, dev
from kvpool.client.admin import Admin
from kvpool.config import Config
from kvpool.errors import ConfigError, MasterLost
from kvpool.ops import doctor
from kvpool.ops.doctor import compared, device_memory, differing
from kvpool.types import ReadResult, ServerStats
from tests.support.commands import kvpool
from tests.support.members import member as usual_member


def named(**fields: str) -> Namespace:
    return Namespace(" ".join(["vllm/2", *(f"{field}={value}" for field, value in fields.items())]))


def test_engines_of_one_model_that_differ_are_told_apart() -> None:
    one = named(model="qwen", block="32", seed="aa")
    other = named(model="qwen", block="16", seed="bb")
    stranger = named(model="llama", block="16", seed="aa")
    (finding,) = compared([(one, 100), (other, 7), (stranger, 3)])
    assert finding.check == "model qwen"
    assert finding.text.startswith("7 blocks are apart from the others: block 32 and 16")
    assert "PYTHONHASHSEED" in finding.advice
    assert "--block-size" in finding.advice


def test_groups_of_one_engine_are_not_taken_for_two() -> None:
    groups = [(named(model="gemma", group=group), 5) for group in ("0:Full", "1:SlidingWindow")]
    assert not compared(groups)
    assert not compared([(Namespace("anything = else"), 1), (Namespace("x"), 1)])


member = partial(usual_member, counters={"fetched_bytes": 0})


def test_servers_that_are_alike_are_not_mentioned() -> None:
    assert differing([]) == []
    assert differing([member("a", capacity=1 << 40)]) == []
    assert differing([member("a"), member("b", capacity=4 << 30), member("c")]) == []
    assert differing([member("a"), member("b", stats=ServerStats())]) == []  # no heartbeat yet


def test_servers_of_a_mixed_pool_are_named() -> None:
    usual = [member(f"s{n}") for n in range(5)]
    (finding,) = differing([*usual, member("large", capacity=5 << 30)])
    assert (finding.check, finding.verdict) == ("memory of servers", "warn")
    assert finding.text.startswith("large: more than 4 times")
    with_disk = [member(f"d{n:02}", tiers=("dram", "nvme")) for n in range(20)]
    (finding,) = differing([*usual, *with_disk])
    assert finding.text.startswith("s0, s1, s2, s3, s4: dram, the others dram+nvme")
    (finding,) = differing([*with_disk, *(member(f"s{n:02}") for n in range(19))])
    assert "s07 and 11 more: dram, the others" in finding.text


@pytest.mark.parametrize(
    ("sizes", "large"),
    [
        ([1, 5], ["1"]),  # of two, the smaller one is the usual one
        ([5, 1, 5], []),
        ([1, 1, 5, 5], ["2", "3"]),
        ([1, 5, 5, 5], []),
        ([5, 1, 1, 1, 4], ["0"]),
        ([1, 1, 5, 5, 5, 5, 5], []),
    ],
)
def test_a_server_is_large_beside_the_one_in_the_middle(sizes: list[int], large: list[str]) -> None:
    members = [member(str(n), capacity=size << 30) for n, size in enumerate(sizes)]
    named = [one.text.partition(":")[0].split(", ") for one in differing(members)]
    assert named == ([large] if large else [])


def test_it_says_how_blocks_reach_a_gpu_and_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(Path, "glob", lambda *_: iter([Path("0000:01:00.0")]))
        patch.setattr(torch.version, "cuda", None)
        without = device_memory(ClientConfig())
        assert without.verdict == "warn"
        assert "without CUDA; the driver knows 1 GPUs" in without.text
        assert "built for CUDA" in without.advice
        patch.setattr(torch.version, "cuda", "13.0")
        assert "nvidia-smi" in device_memory(ClientConfig()).advice
        patch.setattr(Path, "glob", lambda *_: iter(()))
        assert device_memory(ClientConfig()).verdict == "ok"  # nobody expects one
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
        there = device_memory(ClientConfig())
        assert there.verdict == "ok"
        assert "cuda:0 Some GPU: staged through 128 MiB of pinned memory" in there.text
        assert device_memory(ClientConfig(device_staging=1 << 20)).verdict == "warn"
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "not used" in device_memory(ClientConfig()).text


@pytest.mark.parametrize(
    ("release", "verdict"),
    [("5.13.9", "warn"), ("5.14.0", "ok"), ("6.1.0-generic", "ok"), ("4.20.1", "warn")],
)
def test_it_looks_at_the_kernel(
    monkeypatch: pytest.MonkeyPatch, release: str, verdict: str
) -> None:
    monkeypatch.setattr("platform.release", lambda: release)
    assert doctor._kernel().verdict == verdict
    monkeypatch.delattr("os.memfd_create")
    assert doctor._kernel().verdict == "fail"


@pytest.mark.parametrize(
    ("mode", "release", "verdict"),
    [
        ("always [advise] never", "5.15.0", "ok"),
        ("always advise [never]", "6.0.9", "warn"),
        ("always advise [never]", "6.1.0", "ok"),
        (None, "6.1.0", "warn"),
    ],
)
async def test_it_looks_at_huge_pages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str | None, release: str, verdict: str
) -> None:
    file = tmp_path / "shmem_enabled"
    if mode is not None:
        file.write_text(mode)
    opened = doctor.aiofiles.open
    monkeypatch.setattr(doctor.aiofiles, "open", lambda path: opened(file))
    monkeypatch.setattr("platform.release", lambda: release)
    found = await doctor._huge_pages()
    assert (found.verdict, "echo advise" in found.advice) == (verdict, verdict == "warn")


def test_it_says_which_transports_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(spec: str) -> object:
        raise ConfigError("no such device")

    missing, there = doctor._transports(ClientConfig(transports=["pigeon", "tcp"]))
    assert (missing.check, missing.verdict) == ("transport pigeon", "warn")
    assert (there.check, there.verdict) == ("transport tcp", "ok")
    monkeypatch.setattr(doctor.registry, "transport", refused)
    for transports, verdict in ((["tcp", "shm"], "ok"), (["tcp"], "fail")):
        first = doctor._transports(ClientConfig(transports=transports))[0]
        assert (first.verdict, first.text) == (verdict, "left out: no such device")


def settings(address: str, *transports: str) -> Config:
    return Config(client=ClientConfig(masters=[address], transports=list(transports) or ["tcp"]))


async def test_it_tries_one_block_on_every_transport_to_every_server(two_servers: dev.Dev) -> None:
    found = await doctor._pool(settings(two_servers.address, "tcp", "shm", "inproc"))
    assert {finding.check: finding.verdict for finding in found} == {
        f"server dev-{number} over {scheme}": "ok" for number in (0, 1) for scheme in ("tcp", "shm")
    }
    assert sum(server.store.index.stored for server in two_servers.servers) == 0  # nothing is left
    assert (await doctor._master(settings(two_servers.address), two_servers.address)).text.endswith(
        "2 of 2 servers up"
    )
    assert await doctor._pool(settings("127.0.0.1:9")) == []


async def test_it_says_what_is_wrong_with_a_server(
    pool_dev: dev.Dev, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = Pool.members

    async def silent(self: Pool, **options: Any) -> Any:
        return [replace(one, alive=False, heard_s=7.4) for one in await members(self, **options)]

    async def leaving(self: Pool, **options: Any) -> Any:
        return [replace(one, stats=ServerStats(draining=True)) for one in await members(self)]

    async def empty(self: Pool, *arguments: Any, **options: Any) -> Any:
        return [ReadResult(ReadStatus.HIT, 1 << 20)]

    async def missed(self: Pool, *arguments: Any, **options: Any) -> Any:
        return [ReadResult(ReadStatus.EVICTED)]

    config = settings(pool_dev.address)
    with monkeypatch.context() as patch:
        patch.setattr(Pool, "members", silent)
        (finding,) = await doctor._pool(config)
        assert finding[:3] == ("server dev-0", "warn", "silent for 7 s")
        assert (await doctor._master(config, pool_dev.address)).verdict == "fail"
        patch.setattr(Pool, "members", leaving)
        checks = {one.check: one.verdict for one in await doctor._pool(config)}
        assert checks == {"room": "fail", "server dev-0": "ok"}, "no block is tried"
    for wrong, text in ((empty, "wrong bytes came back"), (missed, "stored, read: evicted")):
        monkeypatch.setattr(Pool, "read", wrong)
        (finding,) = await doctor._pool(config)
        assert finding.verdict == "fail"
        assert text in finding.text


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        ("MemoryLimits", "memory limits"),
        ("examine_settings", "settings"),
        ("device_memory", "device memory"),
        ("differing", "servers, compared"),
        ("_trial", "server dev-0 over tcp"),
        ("registry.transport", "transport tcp"),
        ("_client", "master {}"),
    ],
)
async def test_a_check_that_fails_itself_is_a_finding_and_the_others_go_on(
    pool_dev: dev.Dev, monkeypatch: pytest.MonkeyPatch, broken: str, check: str
) -> None:
    def raises(*_: Any, **__: Any) -> Any:
        raise OSError("no place for temporary files\nand more")

    usual = {one.check for one in await doctor.examine(settings(pool_dev.address))}
    if broken == "examine_settings":  # what it found before counts

        def finds_one(_: Config) -> Any:
            yield doctor.Finding("one", "warn", "x")
            raises()

        monkeypatch.setattr(doctor, broken, finds_one)
        usual |= {"one", "settings"}
    else:
        monkeypatch.setattr(f"kvpool.ops.doctor.{broken}", raises)
    found = await doctor.examine(settings(pool_dev.address))
    wrong = {one.check: one for one in found if one.verdict == "fail"}
    mine = wrong[check.format(pool_dev.address)]
    assert mine.text == "could not be checked: OSError: no place for temporary files"
    assert mine.advice
    if broken != "_client":  # nothing of a master that is not asked
        assert {one.check for one in found} >= usual - {mine.check}
        assert wrong.keys() == {mine.check}


async def test_a_check_that_finds_nothing_to_check_says_so(pool_dev: dev.Dev) -> None:
    said = {one.check: one.text for one in await doctor.examine(settings(pool_dev.address))}
    assert "no two of one model" in said["namespaces"]
    assert said["memory"].startswith("not judged")
    found = await doctor.examine(settings("127.0.0.1:9"))
    (servers,) = [one for one in found if one.check == "servers"]
    assert servers[1:3] == ("fail", "none is known: no block was written or read")


async def test_what_a_master_does_not_tell_is_a_finding(
    pool_dev: dev.Dev, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(self: Admin, **options: Any) -> Any:
        raise MasterLost("it told nothing")

    monkeypatch.setattr(Admin, "namespaces", refused)
    found = await doctor.examine(settings(pool_dev.address))
    (finding,) = [one for one in found if "it told nothing" in one.text]
    assert (finding.check, finding.verdict) == ("namespaces, memory", "warn")
    assert not [one for one in found if one.check in ("namespaces", "memory")]
    assert [one.verdict for one in found if one.check == "server dev-0 over tcp"] == ["ok"]


@pytest.mark.parametrize(
    ("folder", "mode", "verdict"),
    [(0o755, 0o644, "warn"), (0o755, 0o604, "warn"), (0o755, 0o640, "ok"), (0o700, 0o644, "ok")],
)
async def test_it_looks_who_may_read_the_secret(folder: int, mode: int, verdict: str) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # pytest's own is private
        os.chmod(place, folder)
        path = Path(place) / "secret"
        path.write_text("0123456789abcdef")
        path.chmod(mode)
        finding = doctor._secret(Config(secret_file=str(path)))
        assert finding.verdict == verdict
        assert (f"chmod 600 {path}" in finding.advice) is (verdict == "warn")
        link = Path(place) / "link"
        link.symlink_to(path)
        assert doctor._secret(Config(secret_file=str(link))).verdict == verdict
    assert doctor._secret(Config()).text.startswith("none")
    assert doctor._secret(Config(local_only=True)).verdict == "ok"


def test_the_largest_of_several_names_is_what_others_are_compared_with() -> None:
    names = [(named(model="m", block=str(number), tp="1"), 100 + number) for number in range(12)]
    found = compared([(named(model="m", block="x"), 5000), *names, (named(model="n"), 1)])
    assert len(found) == 8
    assert all("block x and" in one.text and "tp none and 1" in one.text for one in found)
    assert found[0].text.startswith("111 blocks are apart from the others: ")


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("tcp?x=1", "transport 'tcp' has no setting 'x'; its settings: none"),
        ("ucx?rails=many", "setting 'rails'"),
    ],
)
def test_a_wrong_setting_of_a_transport_is_a_usage_error(spec: str, why: str) -> None:
    """And no check that failed: starting a master would not help."""
    done = kvpool("doctor", "--transport", spec)
    assert done.code == 2
    assert "--transport" in done.err
    assert why in done.err
    assert done.out == ""
