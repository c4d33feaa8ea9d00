"""`make gpu-acceptance` itself: it runs to its end without a GPU, and it sees what is wrong.

Its questions are asked on the device `cpu`; each is also asked where the answer must be no.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as kit
from benchmarks.gpu import checks, direct, direct_writes, hbm_reads, machine, questions, stage
from benchmarks.gpu.fake import fake_device
from benchmarks.gpu.perftest import rate
from benchmarks.gpu.report import (
    Answer,
    Claim,
    Line,
    NoTime,
    Result,
    as_json,
    is_accepted,
    lines,
    page,
)
from kvpool.client.device_direct import DirectReads
from kvpool_transports.ucx_worker import Transfer
from tests.support.fake_device import FakeGpu, FakeTensor

torch = pytest.importorskip("torch", reason="devices need torch")

needs_ucx = pytest.mark.skipif(
    importlib.util.find_spec("ucxx") is None, reason="needs ucxx: pip install kvpool[ucx]"
)


ROOT = Path(__file__).parents[2]


def claim(name: str, *needs: str, part: str = "part") -> Claim:
    return Claim(name, part, f"claim {name}", needs, lambda _: Answer(True, "fine"))


def test_every_claim_has_a_line_whatever_happens_to_it() -> None:
    answers = {
        "yes": Answer(True, "2 GB/s"),
        "no": Answer(False, "1 | 2", 1.0, 2.0),
        "fact": Answer(None, "two\nlines"),
    }

    def ask(one: Claim) -> Answer:
        if one.name == "late":
            raise NoTime("the 12 minutes of all claims are over")
        if one.name == "breaks":
            raise RuntimeError("CUDA error: unspecified launch failure\nCUDA kernel errors might")
        return answers[one.name]

    claims = [claim(name) for name in ("yes", "no", "fact", "breaks")]
    claims += [claim("away", "there", "gpu", "ucx"), claim("late")]
    clock = itertools.count(0.0, 2.0)
    found = list(lines(claims, PRESENT, ask, lambda: next(clock)))
    assert [(line.result, line.figures) for line in found] == [
        (Result.MET, "2 GB/s"),
        (Result.NOT_MET, "1 | 2"),
        (Result.FOUND, "two\nlines"),
        (Result.FAILED, "RuntimeError: CUDA error: unspecified launch failure"),
        (Result.NOT_RUN, "no GPU"),
        (Result.NOT_RUN, "the 12 minutes of all claims are over"),
    ]
    text = page("title", found)
    assert "1 true, 1 FALSE, 1 found, 1 FAILED, 2 not possible here." in text
    assert "| claim no | FALSE | 1 \\| 2 |" in text
    assert "| claim fact | found | two<br>lines |" in text
    rows = json.loads(as_json("title", found))["lines"]
    assert [row["true"] for row in rows] == [True, False, None, False, None, None]
    assert (rows[1]["figure"], rows[1]["limit"], rows[1]["seconds"]) == (1.0, 2.0, 2.0)


PRESENT = {"there": None, "gpu": "no GPU", "ucx": "no UCX"}


@pytest.mark.parametrize(
    ("results", "accepted"),
    [
        ([Result.MET, Result.FOUND, Result.NOT_RUN], True),
        ([Result.MET, Result.NOT_MET], False),
        ([Result.FAILED], False),
        ([], True),
    ],
)
def test_only_what_was_run_and_not_met_is_refused(
    results: Sequence[Result], accepted: bool
) -> None:
    assert is_accepted([Line("part", "text", one, "") for one in results]) is accepted


def test_it_runs_to_its_end_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kit, "ask_apart", lambda one, *_: Answer(True, f"asked {one.name}"))
    monkeypatch.setattr(sys, "argv", ["gpu", "--page", str(tmp_path / "page.md")])
    kit.main()  # and no SystemExit
    said = capsys.readouterr().out
    for one in kit.CLAIMS:
        if "gpu" in one.needs:
            assert f"not possible here {one.text}: no GPU" in said
    assert said.count(": no GPU") == sum("gpu" in one.needs for one in kit.CLAIMS)
    assert "| GPU | found | none: torch" in (tmp_path / "page.md").read_text()
    assert json.loads((tmp_path / "page.json").read_text())["lines"][0]["claim"] == "GPU"


def test_a_run_that_is_stopped_leaves_what_it_has_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the claims that are left when the time of all is over are named, not asked."""
    asked: list[str] = []

    def ask(one: Claim, device: str, left_s: float) -> Answer:
        asked.append(one.name)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return Answer(True, "fine")

    monkeypatch.setattr(kit, "ask_apart", ask)
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--page", str(tmp_path / "p.md")])
    with pytest.raises(KeyboardInterrupt):
        kit.main()
    assert (tmp_path / "p.md").read_text().count("| true | fine |") == 2
    monkeypatch.undo()
    with pytest.raises(NoTime, match="the 12 minutes of all claims are over"):
        kit.ask_apart(claim("left"), "cpu", -1.0)


def test_a_claim_that_is_not_met_is_its_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kit, "ask_apart", lambda *_: Answer(False, "slow"))
    arguments = ["--device", "cpu", "--only", "rot", "--page", str(tmp_path / "page.md")]
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        kit.main()
    assert ended.value.code == 1
    assert "| FALSE | slow |" in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize("device", machine.IN_PLACE)
def test_nothing_is_claimed_of_how_fast_the_host_is(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the place of a device only to show that the questions work."""
    monkeypatch.setattr(kit, "ask_apart", lambda *_: Answer(False, "slow", 1.0, 2.0))
    there = dict.fromkeys(machine.present("cpu"))
    monkeypatch.setattr(machine, "present", lambda _: there)
    arguments = ["--only", "pool-4", "--page", str(tmp_path / "page.md"), "--device"]
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments, device])
    kit.main()
    (row,) = [
        one
        for one in json.loads((tmp_path / "page.json").read_text())["lines"]
        if one["part"] == "Figures"
    ]
    assert (row["result"], row["figure"], row["true"]) == ("found", 1.0, None)
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments, "cuda"])
    with pytest.raises(SystemExit):
        kit.main()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "xpu"], "--device xpu: expected cuda, cuda:N, cpu or fake"),
        (["--device", "cuda:x"], "--device cuda:x: expected"),
        (["--only", "rot", "nothing"], "--only nothing: expected some of "),
        (["--only"], "expected at least one argument"),
        (["--page", "/nowhere/page.md"], "there is no folder /nowhere"),
    ],
)
def test_a_wrong_argument_is_a_sentence_and_no_page(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    """It would be a page of claims that were not asked, and exit code 0."""
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        kit.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_names_are_unique_and_needs_are_known() -> None:
    assert len({one.name for one in kit.CLAIMS}) == len(kit.CLAIMS)
    assert {need for one in kit.CLAIMS for need in one.needs} <= machine.present("cpu").keys()


@pytest.mark.parametrize(
    ("arguments", "installs"), [([], True), (["GPU_PYTHON=/opt/vllm/bin/python"], False)]
)
def test_an_interpreter_of_another_place_needs_no_network(
    tmp_path: Path, arguments: list[str], installs: bool
) -> None:
    """A machine with a GPU may have none: nothing is installed there."""
    command = ["make", "-n", "gpu-acceptance", f"VENV={tmp_path / 'none'}", *arguments]
    alone = {"PATH": os.environ["PATH"]}  # and no variables of a `make test`
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=alone)
    assert ("pip install" in done.stdout) is installs
    assert done.stdout.rstrip().endswith("python -m benchmarks.gpu")


def test_a_test_that_cannot_be_run_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pytest_asyncio" else find(name)
    )
    assert machine.present("cpu")["pytest"] == "no pytest with pytest-asyncio"
    asking = [one.name for one in kit.CLAIMS if "pytest" in one.needs]
    assert asking == ["tests", "layouts"]


def test_a_process_that_asks_answers_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    (flush,) = (one for one in kit.CLAIMS if one.name == "flush")
    answer = kit.ask_apart(flush, "cpu", 100.0)
    assert answer[:2] == (None, "the device cpu: writes are seen at once")
    monkeypatch.setattr(kit, "_CLAIM_S", 0.01)
    with pytest.raises(RuntimeError, match="no answer within"):
        kit.ask_apart(flush, "cpu", 100.0)
    with pytest.raises(NoTime, match="stopped: the 12 minutes"):
        kit.ask_apart(flush, "cpu", 0.001)


@needs_ucx
def test_the_fake_device_is_asked_what_no_processor_can_be() -> None:
    lacks = {name for name, why in machine.present("fake").items() if why is not None}
    assert lacks == {"triton", "pytest", "vllm"}
    (order,) = (one for one in kit.CLAIMS if one.name == "stage-omissions")
    answer = kit.ask_apart(order, "fake", 100.0)
    assert answer[0], answer


def test_the_order_of_a_staged_step_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_ROUNDS", 2)
    monkeypatch.setattr(stage, "_WORK", 1 << 10)
    assert stage.keeps_the_order("cpu").met
    monkeypatch.setattr("kvpool.device.lane._copy", lambda *_: None)
    assert stage.keeps_the_order("cpu").met is False


def test_a_staged_step_without_its_order_is_seen_to_be_wrong(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that works as late as it may. Where it is right all the same, the claim fails."""
    monkeypatch.setattr(stage, "_ROUNDS", 1)
    assert stage.keeps_the_order("cuda:0").met
    answer = stage.omissions_are_seen("cuda:0")
    assert answer.met, answer.figures
    assert answer.figures.count(", nothing") == 2
    monkeypatch.setitem(stage._OMISSIONS, "nothing", lambda _: contextlib.nullcontext())
    assert stage.omissions_are_seen("cuda:0").met is False


def test_a_load_beside_its_parts(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.overlap._BLOCKS", 8)
    (claim,) = (one for one in kit.CLAIMS if one.name == "overlap")
    answer = claim.ask("cuda:0")
    assert "network and verification" in answer.figures
    monkeypatch.setattr("kvpool.device.lane._copy", lambda *_: None)
    with pytest.raises(RuntimeError, match="wrong bytes came"):
        claim.ask("cuda:0")


class Driver:
    """A driver that knows one attribute, or refuses."""

    def __init__(self, code: int, value: int) -> None:
        self._code, self._value = code, value
        self.ready = False

    def cuInit(self, _: int) -> int:  # noqa: N802
        self.ready = True
        return 0

    def cuDeviceGetAttribute(self, place: Any, number: int, _: int) -> int:  # noqa: N802
        assert (self.ready, number) == (True, 118)
        place._obj.value = self._value
        return self._code


def test_what_the_driver_says_of_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda _: Driver(0, 0))
    assert machine.writes_ordering("cuda").startswith("none: a flush is needed")
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda _: Driver(0, 100))
    assert machine.writes_ordering("cuda:1").startswith("owner")
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda _: Driver(101, -1))
    with pytest.raises(RuntimeError, match="answered 101"):  # and not "unknown (-1)", or "yes"
        machine.writes_ordering("cuda:9")


# --- right bytes ------------------------------------------------------------------------------


def test_right_bytes_are_seen(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_SIZE", 4096)
    assert checks.a_wrong_byte_is_found("cuda:0").met
    assert checks.pieces_are_gathered_and_scattered("cuda:0").met


def test_a_checksum_that_misses_bytes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_SIZE", 4096)
    right = checks.device_checksums

    def half(blocks: Any, seeds: Any) -> Any:
        return right([[row[: len(row) // 2] for row in rows] for rows in blocks], seeds)

    monkeypatch.setattr(checks, "device_checksums", half)
    assert checks.a_wrong_byte_is_found("cpu").met is False
    assert checks.pieces_are_gathered_and_scattered("cpu").met is False


def test_a_copy_that_swaps_pieces_or_writes_beside_them_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = checks.copy_rows
    monkeypatch.setattr(
        checks, "copy_rows", lambda sources, targets: right(sources[:-1], targets[:-1])
    )
    assert checks.pieces_are_gathered_and_scattered("cpu").met is False

    def beside(sources: Any, targets: Any) -> None:
        right(sources, targets)
        torch.as_strided(targets[0], (1,), (1,), targets[0].storage_offset() - 1).fill_(9)

    monkeypatch.setattr(checks, "copy_rows", beside)
    assert checks.pieces_are_gathered_and_scattered("cpu").met is False


def test_work_beside_the_products_that_fails_is_no_figure() -> None:
    def fails(_: Any) -> None:
        raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        checks._beside(fails, 0.05, "cpu")


def test_device_to_pool_and_back(gpu: FakeGpu) -> None:
    """Through real processes, with small blocks: only that it works."""
    answer = checks.pool_beside_a_plain_copy(4)("cuda:0")
    assert "of a pinned copy; read" in answer.figures


# --- what direct reads rely on ------------------------------------------------------------------


@needs_ucx
def test_what_ucx_does_with_memory_of_the_host() -> None:
    assert questions.rendezvous("cpu").met
    assert questions.closing("cpu").met


@needs_ucx
def test_what_ucx_brings_by_itself() -> None:
    assert re.fullmatch(r"ucx_perftest \d+\.\d GB/s", rate("tcp,self", "host"))
    assert re.fullmatch(r"ucx_perftest: .*\w.*", rate("tcp,self", "nowhere"))


@needs_ucx
def test_a_receive_that_goes_on_after_its_end_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def returns_early(transfer: Transfer) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(Transfer, "stop", returns_early)
    assert questions.closing("cpu").met is False


@needs_ucx
def test_a_sender_that_does_not_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Transfer.send
    monkeypatch.setattr(Transfer, "send", lambda *args: send(*args) or True)
    assert questions.rendezvous("cpu").met is False


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """A device that is none, and blocks that it hashes in a moment."""
    with fake_device(monkeypatch) as gpu:
        yield gpu


@needs_ucx
def test_direct_reads_are_asked_for(gpu: FakeGpu) -> None:
    right = direct.gives_right_bytes("cuda:0")
    assert right.met, right.figures
    ended = direct.ends_when_it_returns("cuda:0")
    assert ended.met, ended.figures
    assert "of 20 ended in mid-transfer; 0 bytes came later" in ended.figures


@needs_ucx
def test_a_device_that_hashes_nothing_is_seen(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = DirectReads.verify

    async def trusts(self: Any, options: Any, *arguments: Any) -> Any:
        return await verify(self, options._replace(verify=False), *arguments)

    monkeypatch.setattr(DirectReads, "verify", trusts)
    answer = direct.gives_right_bytes("cuda:0")
    assert answer.met is False
    assert "NOT FOUND, and REACHES the layers" in answer.figures


@needs_ucx
def test_bytes_after_a_direct_read_are_seen(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that writes once more when its endpoint is closed."""
    stop = Transfer.stop

    def once_more() -> None:
        gpu.registered[-1].behind.zero_()

    async def stops_early(transfer: Transfer) -> None:
        await stop(transfer)
        asyncio.get_running_loop().call_later(0.005, once_more)

    monkeypatch.setattr(Transfer, "stop", stops_early)
    answer = direct.ends_when_it_returns("cuda:0")
    assert answer.met is False, answer.figures


@needs_ucx
def test_direct_writes_are_asked_for(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_SIZE", 6000)
    right = direct_writes.give_right_bytes("cuda:0")
    assert right.met, right.figures
    ended = direct_writes.end_when_they_return("cuda:0")
    assert ended.met, ended.figures


@needs_ucx
def test_reads_from_a_servers_device_are_asked_for(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "_SIZE", 8192)
    right = hbm_reads.give_right_bytes("cuda:0")
    assert right.met, right.figures
    beside = hbm_reads.are_not_slower_than_promoted("cuda:0")
    assert "from the tier" in beside.figures


@needs_ucx
def test_a_server_that_does_not_send_from_its_device_is_seen(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it measured as if it did; and the bytes that it sends are compared."""
    send = Transfer.send

    def stale(transfer: Transfer, buffer: Any) -> bool:
        """A card that sees what was in the tier before."""
        if isinstance(buffer, FakeTensor) and len(buffer) > 8:
            buffer = memoryview(bytearray(len(buffer)))
        return send(transfer, buffer)

    with monkeypatch.context() as patch:
        patch.setattr(Transfer, "send", stale)
        assert hbm_reads.give_right_bytes("cuda:0").met is False
    monkeypatch.setattr(
        Transfer, "send", lambda self, one: send(self, one) or isinstance(one, FakeTensor)
    )
    answer = hbm_reads.give_right_bytes("cuda:0")
    assert answer.met is False
    assert "came by way of memory" in answer.figures


@needs_ucx
def test_blocks_that_are_sent_before_they_are_filled_are_seen(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(blocks: Any, deadline: float) -> None:
        pass

    monkeypatch.setattr("kvpool.client.device_writes.wait_for_stream", at_once)
    assert direct_writes.give_right_bytes("cuda:0").met is False


@needs_ucx
def test_what_a_card_sends_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "_MESSAGES", 10)
    assert questions.sending_order("cpu").met
    buffer, sent = questions._buffer, []

    def stale(memory: Any) -> Any:
        """A card that reads what was there before."""
        sent.append(memory.clone())
        return buffer(sent[-3] if len(sent) % 2 == 0 and len(sent) > 2 else memory)

    monkeypatch.setattr(questions, "_buffer", stale)
    assert questions.sending_order("cpu").met is False
