"""`make demo-vllm` with a stand-in for `vllm serve`: what it leaves behind, however it ends.

The pool is a real one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples import vllm_two_instances
from tests.conftest import soon

ROOT = Path(__file__).parents[2]
FAKE = Path(__file__).parent / "fake_vllm"
RUN = """
import sys
from examples import vllm_two_instances
from tests.conftest import soon
vllm_two_instances.main(sys.argv[1:], lambda folder: folder)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    return tmp_path / "pids"


@pytest.fixture
def start(tmp_path: Path, pids: Path) -> Iterator[Start]:
    started = []

    def run(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        paths = [str(FAKE), str(ROOT), *(str(ROOT / one) for one in ("transports", "tiers"))]
        started.append(
            subprocess.Popen(
                [sys.executable, "-u", "-c", RUN, "--sessions", "1", *arguments],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(paths),
                    "FAKE_VLLM_PIDS": str(pids),
                    **environment,
                },
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def pool_of(demo: subprocess.Popen[str]) -> int:
    """The id of the pool's process, when the demo has printed it."""
    assert demo.stdout is not None
    line = demo.stdout.readline()
    return int(line.removeprefix("the pool is process ").partition(":")[0])


def gone(*processes: int) -> None:
    """None of them runs, some seconds later at the latest."""
    soon(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), 10)


def engines(pids: Path, at_least: int = 1) -> list[int]:
    """Their ids, when so many have started."""
    soon(lambda: pids.exists() and len(pids.read_text().split()) >= at_least, 30)
    return [int(pid) for pid in pids.read_text().split()]


def test_it_prints_medians_and_draws_a_picture(start: Start, pids: Path, tmp_path: Path) -> None:
    demo = start("--picture", "out.svg", "--each")
    pool = pool_of(demo)
    out, err = demo.communicate(timeout=100)
    assert demo.returncode == 0, err
    assert "All 4 answers are equal." in out
    assert "session 1: computed, although the pool should have it" in out  # this one has no cache
    assert "the pool ended" not in out
    assert (tmp_path / "out.svg").read_text().startswith("<svg")
    gone(pool, *engines(pids, 3))


def test_a_pool_that_is_killed_in_the_middle_does_not_end_it(start: Start, pids: Path) -> None:
    demo = start()
    pool = pool_of(demo)
    engines(pids)
    os.kill(pool, signal.SIGKILL)
    out, err = demo.communicate(timeout=100)
    assert demo.returncode == 0, err
    assert "the pool ended on the way; the engines went on without it" in out
    gone(*engines(pids, 3))


@pytest.mark.parametrize(
    ("sent", "code", "number"),  # of engines: the first one, or the two others as well
    [(signal.SIGINT, 130, 1), (signal.SIGTERM, 143, 3), (signal.SIGHUP, 129, 3)],
    ids=["Ctrl-C", "terminate", "closed terminal"],
)
def test_it_leaves_no_process_when_it_is_stopped(
    start: Start, pids: Path, sent: signal.Signals, code: int, number: int
) -> None:
    demo = start()
    pool = pool_of(demo)
    running = engines(pids, number)
    demo.send_signal(sent)
    _, err = demo.communicate(timeout=60)
    assert demo.returncode == code
    assert "Traceback" not in err
    gone(pool, *running)


def test_an_engine_that_dies_is_shown_with_the_end_of_its_log(start: Start, pids: Path) -> None:
    demo = start(FAKE_VLLM_DIES_AFTER="5")
    _, err = demo.communicate(timeout=100)
    assert demo.returncode == 1
    assert "the engine core has died" in err
    assert "Traceback" not in err
    gone(*engines(pids))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--servers", "x"), "unrecognized arguments: --servers"),
        (("--sessions", "0"), "--sessions: at least 1"),
        (("--picture", "nowhere/out.svg"), "--picture: there is no directory nowhere"),
    ],
)
def test_arguments_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    told: str,
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(SystemExit) as ended:
        vllm_two_instances.main(arguments, lambda folder: folder)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
