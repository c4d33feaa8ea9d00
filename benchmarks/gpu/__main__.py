"""What is true of device memory on this machine: each claim of docs/gpu.md, met or not.

    python -m benchmarks.gpu [--device cuda] [--page gpu-acceptance.md] [--only NAME ...]

Each claim is asked in a process of its own: one that hangs, or that leaves the device with an
error, spoils no other. What the machine lacks is named, and the claims that need it are not run.
All together take 12 minutes at most. The page, and a JSON of the same name, are written after each
claim, so that a run which is stopped leaves what it has found. Ends with 1 if a claim that was run
is not met. `--device cpu` shows only that the questions work, and `--device fake` the same of those
that no processor can take.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.gpu import (
    checks,
    direct,
    direct_writes,
    hbm_reads,
    machine,
    overlap,
    questions,
    stage,
)
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

#: Of one claim, and of all. The longest here compiles what vLLM or a kernel needs.
_CLAIM_S: Final = 150.0
_ALL_S: Final = 12 * 60.0

_BYTES, _SPEED, _VLLM = "Right bytes", "Figures", "vLLM"
_UCX = "What direct reads and writes rely on"
_DIRECT = ("gpu", "cuda", "ucx", "ucx-cuda")

CLAIMS: Final = (
    Claim(
        "torch",
        _BYTES,
        "The torch program is xxhash's XXH3-64",
        ("gpu",),
        checks.torch_equals_xxhash,
    ),
    Claim(
        "kernel",
        _BYTES,
        "The Triton kernel is, too: every length to 4 KiB, edges, 64 MiB, any start",
        ("gpu", "triton"),
        checks.kernel_equals_xxhash,
    ),
    Claim(
        "pieces",
        _BYTES,
        "Blocks in pieces are gathered, hashed and scattered",
        ("gpu",),
        checks.pieces_are_gathered_and_scattered,
    ),
    Claim(
        "rot",
        _BYTES,
        "A changed bit on the device is found",
        ("gpu",),
        checks.a_wrong_byte_is_found,
    ),
    Claim(
        "tests",
        _BYTES,
        "The tests that need a GPU pass",
        ("gpu", "cuda", "pytest"),
        checks.tests_pass("tests/client/test_gpu.py"),
    ),
    Claim(
        "stage",
        _BYTES,
        "What a step computes is saved, and a load waits for the blocks' last user: staged",
        ("gpu", "connector"),
        stage.keeps_the_order,
    ),
    Claim(
        "stage-omissions",
        _BYTES,
        "That order without its events is seen to be wrong: recorded, waited for, synchronized",
        ("gpu", "cuda", "connector"),
        stage.omissions_are_seen,
    ),
    Claim(
        "host-rendezvous",
        _UCX,
        "A sender waits for its receiver: memory of the host",
        ("ucx",),
        lambda _: questions.rendezvous("cpu"),
    ),
    Claim(
        "host-closing",
        _UCX,
        "Closing an endpoint ends a receive that has begun: memory of the host",
        ("ucx",),
        lambda _: questions.closing("cpu"),
    ),
    Claim(
        "rendezvous",
        _UCX,
        "A sender waits for its receiver: memory of the device",
        ("gpu", "ucx", "ucx-cuda"),
        questions.rendezvous,
    ),
    Claim(
        "closing",
        _UCX,
        "Closing an endpoint ends a receive that has begun: memory of the device",
        ("gpu", "ucx", "ucx-cuda"),
        questions.closing,
    ),
    Claim(
        "ordering",
        _UCX,
        "A kernel that starts after UCX's completion sees every byte",
        ("gpu", "ucx", "ucx-cuda"),
        questions.ordering,
    ),
    Claim(
        "flush",
        _UCX,
        "What a network card has written is seen by",
        ("gpu",),
        lambda d: Answer(None, machine.writes_ordering(d)),
    ),
    Claim(
        "direct",
        _UCX,
        "Direct reads give right bytes, and a bit that rots is found on the device",
        _DIRECT,
        direct.gives_right_bytes,
    ),
    Claim(
        "direct-ending",
        _UCX,
        "No byte comes after a direct read that was cancelled in mid-transfer",
        _DIRECT,
        direct.ends_when_it_returns,
    ),
    Claim(
        "sending-order",
        _UCX,
        "What a kernel has written is sent when its event has passed",
        ("gpu", "ucx", "ucx-cuda"),
        questions.sending_order,
    ),
    Claim(
        "direct-writes",
        _UCX,
        "Direct writes give right bytes, with the work that fills the blocks still queued",
        _DIRECT,
        direct_writes.give_right_bytes,
    ),
    Claim(
        "direct-writes-ending",
        _UCX,
        "A direct write that was cancelled in mid-transfer leaves right blocks or none",
        _DIRECT,
        direct_writes.end_when_they_return,
    ),
    Claim(
        "hbm-reads",
        _UCX,
        "Blocks of a server's HBM tier come right, and from there; a bit that rots is found",
        _DIRECT,
        hbm_reads.give_right_bytes,
    ),
    Claim(
        "batch",
        _SPEED,
        "A batch is hashed at 190 GB/s or more",
        ("gpu", "triton"),
        checks.batch_is_hashed_fast,
    ),
    Claim(
        "block",
        _SPEED,
        "One block of 2 MiB is hashed within 0.7 ms",
        ("gpu", "triton"),
        checks.one_block_is_hashed_soon,
    ),
    Claim(
        "share",
        _SPEED,
        "Hashing 50 GB/s makes products of matrices at most 3 % slower",
        ("gpu", "triton"),
        checks.hashing_leaves_the_device_to_others,
    ),
    *[
        Claim(
            f"pool-{calls}",
            _SPEED,
            f"Device to pool and back, {calls} at once: a quarter of a plain pinned copy or more",
            ("gpu",),
            checks.pool_beside_a_plain_copy(calls),
        )
        for calls in (1, 2, 4, 8)
    ],
    Claim(
        "pool-share",
        _SPEED,
        "Reads into the device make products of matrices at most 5 % slower",
        ("gpu",),
        checks.pool_leaves_the_device_to_others,
    ),
    Claim(
        "overlap",
        _SPEED,
        "A load of 64 MiB takes 1.15 times its slowest part or less: staged",
        ("gpu", "connector"),
        overlap.load_overlaps,
    ),
    Claim(
        "direct-rate",
        _SPEED,
        "Direct reads are not slower than staged ones",
        _DIRECT,
        direct.is_not_slower_than_staged,
    ),
    Claim(
        "direct-writes-rate",
        _SPEED,
        "Direct writes are not slower than staged ones",
        _DIRECT,
        direct_writes.are_not_slower_than_staged,
    ),
    Claim(
        "hbm-reads-rate",
        _SPEED,
        "Direct reads from a server's HBM tier are not slower than by way of its memory",
        _DIRECT,
        hbm_reads.are_not_slower_than_promoted,
    ),
    Claim(
        "direct-share",
        _SPEED,
        "Direct reads make products of matrices at most 5 % slower",
        _DIRECT,
        direct.leaves_the_device_to_others,
    ),
    Claim(
        "layouts",
        _VLLM,
        "Blocks come back in the layouts of the installed vLLM",
        ("gpu", "vllm", "pytest"),
        checks.tests_pass("tests/connector/vllm/test_gpu_layouts.py"),
    ),
)


def facts(device: str) -> list[Line]:
    """What this machine has. A fact that cannot be had is `unknown`, and ends nothing."""
    asked: dict[str, Callable[[], str]] = {
        "GPU": partial(machine.gpu, device),
        "UCX": machine.ucx,
        "GPUDirect": partial(machine.gpudirect, device),
        "topology": machine.topology,
        "vLLM": machine.vllm,
    }
    found = []
    for name, ask in asked.items():
        try:
            text = ask()
        except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
            text = f"unknown: {type(error).__name__}: {error}"
        found.append(Line("This machine", name, Result.FOUND, text))
    return found


def ask_apart(claim: Claim, device: str, left_s: float) -> Answer:
    """In a process of its own. Raises RuntimeError when that fails or takes too long, NoTime when
    the time of all is over."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--one", claim.name, "--device", device]
    if left_s <= 0:
        raise NoTime(f"the {_ALL_S / 60:.0f} minutes of all claims are over")
    # A session of its own: servers that it has started end with it.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        said, errors = process.communicate(timeout=min(_CLAIM_S, left_s))
    except subprocess.TimeoutExpired:
        if left_s < _CLAIM_S:
            raise NoTime(f"stopped: the {_ALL_S / 60:.0f} minutes of all claims are over") from None
        raise RuntimeError(f"no answer within {_CLAIM_S:.0f} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        last = errors.strip().rpartition("\n")[2]
        raise RuntimeError(last or f"ended with {process.returncode}")
    return Answer(*json.loads(said.strip().rpartition("\n")[2]))


@contextlib.contextmanager
def _present(device: str) -> Iterator[str]:
    """The name that torch has for it."""
    if device != machine.FAKE:
        yield device
        return
    import pytest  # and the tests: a machine with a GPU may have neither

    from benchmarks.gpu.fake import DEVICE, fake_device

    with pytest.MonkeyPatch.context() as patch, fake_device(patch):
        yield DEVICE


def _tell(line: Line) -> None:
    first = line.figures.partition("\n")[0]
    print(f"{line.result.value:8} {line.text}: {first} ({line.seconds:.1f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, cpu or fake")
    parser.add_argument("--page", type=Path, default=Path("gpu-acceptance.md"))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of claims")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = [claim.name for claim in CLAIMS]
    if not re.fullmatch(r"cpu|fake|cuda(:\d+)?", options.device):
        parser.error(f"--device {options.device}: expected cuda, cuda:N, cpu or fake")
    if unknown := [name for name in options.only or () if name not in names]:
        parser.error(f"--only {' '.join(unknown)}: expected some of {', '.join(names)}")
    if not options.page.parent.is_dir():
        parser.error(f"--page {options.page}: there is no folder {options.page.parent}")
    if options.one:
        (claim,) = (claim for claim in CLAIMS if claim.name == options.one)
        with _present(options.device) as device:
            print(json.dumps(claim.ask(device)))
        return
    chosen = [claim for claim in CLAIMS if claim.name in (options.only or names)]
    until = time.monotonic() + _ALL_S
    title = f"Device memory, {time.strftime('%Y-%m-%d %H:%M')}"
    found: list[Line] = []

    def ask(claim: Claim) -> Answer:
        print(f"  {claim.text} ...", file=sys.stderr, flush=True)
        answer = ask_apart(claim, options.device, until - time.monotonic())
        # Nothing is claimed of how fast the host is in the place of a device.
        is_figure = claim.part == _SPEED and options.device in machine.IN_PLACE
        return answer._replace(met=None) if is_figure else answer

    answers = lines(chosen, machine.present(options.device), ask, time.monotonic)
    for line in itertools.chain(facts(options.device), answers):
        found.append(line)
        _tell(line)
        options.page.write_text(page(title, found))
        options.page.with_suffix(".json").write_text(as_json(title, found))
    print(f"written to {options.page} and {options.page.with_suffix('.json')}")
    if not is_accepted(found):
        sys.exit(1)


if __name__ == "__main__":
    main()
