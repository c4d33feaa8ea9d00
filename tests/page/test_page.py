"""The status page in a real browser: what people see, and what a hostile name cannot do."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvpool
from kvpool import admin
from tests.support.programs import RunningPrograms, free_address

playwright = pytest.importorskip("playwright.async_api", reason="see make test WITH=page")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")

HOSTILE = "<img/src='x'onerror=document.title='owned'>"  # an id has no blanks
SCRIPT = "</script><script>document.title='owned'</script>"
NAMESPACE = kvpool.Namespace(f"model={SCRIPT}")
ROOT = Path(__file__).parents[2]


class RunningPool(RunningPrograms):
    """A master with a page and servers, as processes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.master, self.http = free_address(), free_address()
        self.start_kvpool("master", "master", "--bind", self.master, "--http", self.http)

    def serve(self, name: str) -> None:
        tiers = ["--tier", "dram:8MiB", "--tier", f"nvme:{self.folder}/{len(self.processes)}:32MiB"]
        self.start_kvpool(
            name.replace("/", "-"), "server", "--masters", self.master, "--id", name, *tiers
        )


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[RunningPool]:
    running = RunningPool(tmp_path)
    yield running
    running.close()


@pytest.fixture
async def browser() -> AsyncIterator[Any]:
    async with playwright.async_playwright() as driver:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        running = await driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield running
        await running.close()


async def opened(browser: Any, pool: RunningPool, **context: Any) -> Any:
    page = await (await browser.new_context(**context)).new_page()
    page.set_default_timeout(20_000)
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    for _ in range(100):
        try:
            await page.goto(f"http://{pool.http}/")
            break
        except playwright.Error:  # the master is still starting
            await asyncio.sleep(0.2)
    return page


async def connected(pool: RunningPool) -> kvpool.Pool:
    patient = kvpool.ClientConfig(masters=[pool.master], timeout_s=30.0, attempt_s=10.0)
    return await kvpool.connect(config=patient)


async def fill(pool: RunningPool, servers: int, seconds: float = 0.0) -> None:
    """Clients of two sessions that write, ask and read."""
    async with await connected(pool) as client:
        while len(await client.members()) < servers:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        until = time.monotonic() + seconds
        turn = 0
        while turn < 8 or time.monotonic() < until:
            chain = [_key(turn % 24, n) for n in range(16)]
            data = [bytes([n]) * (64 << 10) for n in range(16)]
            if turn % 3 != 2:
                await client.write(NAMESPACE, chain, data)
            match = await client.match(
                NAMESPACE, [*chain, _key(999, turn)], session=f"s-{turn % 5}"
            )
            if match.length:
                buffers = [bytearray(64 << 10) for _ in range(match.length)]
                await client.read(NAMESPACE, chain[: match.length], buffers, match=match)
            await client.session(f"s-{turn % 5}").hint(resume_in=20.0)
            turn += 1
            await asyncio.sleep(0.1)


async def until(page: Any, box: str, wanted: Callable[[str], object]) -> None:
    """Wait for a text of the page. Its policy forbids scripts of playwright's that wait there."""
    async with asyncio.timeout(20):
        while not wanted(await page.text_content(f"#{box}") or ""):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def _key(chain: int, number: int) -> bytes:
    return hashlib.sha256(f"{chain} {number}".encode()).digest()


async def test_a_killed_server_is_seen_within_three_seconds(
    pool: RunningPool, browser: Any
) -> None:
    for name in ("gpu-1", "gpu-2"):
        pool.serve(name)
    page = await opened(browser, pool)
    await until(page, "servers", lambda text: text == "2 / 2")
    assert await page.text_content("#state") == "all is well"
    await fill(pool, 2)
    pool.kill("gpu-2")
    began = time.monotonic()
    await until(page, "attention", lambda text: re.search("gpu-2(late|lost)no heartbeat", text))
    seen_s = time.monotonic() - began
    assert seen_s < 3.0
    assert await page.text_content("#state") == "needs a look"
    await until(page, "events", lambda text: "lost" in text)
    await until(page, "servers", lambda text: text == "1 / 2")
    assert not page.problems


async def test_a_master_that_is_gone_is_seen(pool: RunningPool, browser: Any) -> None:
    page = await opened(browser, pool)
    await until(page, "state", lambda text: "no server" in text)
    pool.kill("master")
    await page.wait_for_selector("#banner.on", timeout=5000)
    assert "does not answer" in await page.text_content("#banner")


async def test_names_of_strangers_are_text(pool: RunningPool, browser: Any) -> None:
    pool.serve(HOSTILE)
    page = await opened(browser, pool)
    await fill(pool, 1)
    async with await connected(pool) as client:
        await client.session(HOSTILE[:12]).hint(resume_in=5.0)
    for box, text in (("all", HOSTILE), ("sessions", HOSTILE[:12])):
        await until(page, box, lambda shown, text=text: text in shown)
    assert await page.locator("img").count() == 0
    assert await page.locator("script").count() == 1
    assert await page.title() == "1/1 kvpool"
    assert not page.problems


async def _infers(page: Any, pool: RunningPool) -> None:
    """The policies of a large fleet have inferred much."""
    answer = await (await page.request.get(f"http://{pool.http}/api/v1/pool")).json()
    kinds = ("returning", "dead")
    answer["inferred"] = {
        **{"programs": 98_765, "shared_blocks": 12_345_678},
        **{f"{kind}_programs": 98_765 for kind in kinds},
        **{f"{kind}_blocks": 12_345_678 for kind in kinds},
        **{f"{kind}_came": 3_000_000 for kind in kinds},
        **{f"{kind}_left": 1_000_000 for kind in kinds},
        **{f"{kind}_asked": 0 for kind in kinds},
    }

    async def changed(route: Any) -> None:
        await route.fulfill(json=answer)

    await page.route("**/api/v1/pool", changed)


CUT = """[...document.querySelectorAll("main *")].filter(one => one.clientWidth
    && getComputedStyle(one).display !== "inline" && one.scrollWidth > one.clientWidth + 1
).map(one => one.textContent)"""
LONG = "a-server-with-a-name-that-is-quite-long-for-a-narrow-screen-0123456789"


@pytest.mark.parametrize("width", [360, 1100])
async def test_it_fits_a_phone_and_a_desktop(pool: RunningPool, browser: Any, width: int) -> None:
    pool.serve(LONG)
    page = await opened(browser, pool, viewport={"width": width, "height": 740})
    await until(page, "servers", lambda text: text == "1 / 1")
    pool.serve("gpu-2")  # it is seen to join
    await fill(pool, 2)
    async with await connected(pool) as client:
        await client.session(f"program={HOSTILE[:4]};x").hint(resume_in=5.0)  # no program's name
        await admin(client).drain("gpu-2", within_s=60)
    await until(page, "moves", lambda text: "gpu-2" in text and "leaves" in text)
    await until(page, "events", lambda text: "joined" in text and "leaving" in text)
    await until(page, "usage", lambda text: SCRIPT in text)
    await until(page, "misses", lambda text: "never written" in text)
    await _infers(page, pool)
    await until(page, "inferred", lambda text: "12,345,678" in text and "75.0 % of" in text)
    assert await page.evaluate("document.documentElement.scrollWidth") <= width
    assert await page.evaluate(CUT) == []
    for cell, least in (("who", 100), ("what", 80)):
        wide = await page.evaluate(f"document.querySelector('#events td.{cell}').clientWidth")
        assert wide >= least, "it is read in lines of a dozen characters, not of four"
    assert await page.locator("#look").is_visible()
    assert not page.problems


async def test_an_hour_is_drawn_and_what_is_not_known_is_said(
    pool: RunningPool, browser: Any
) -> None:
    page = await opened(browser, pool)
    await until(page, "state", lambda text: "no server" in text)
    assert not await page.locator("#look").is_visible()  # there is nothing
    answer = await (await page.request.get(f"http://{pool.http}/api/v1/pool")).json()
    hour = {"step_s": 20, "used": [1 << 30] * 180, "hit_rate": [None] * 90 + [0.5, 0.75] * 45}
    answer["history_hour"] = hour | {
        f"{one}_bytes_s": [1 << 20] * 180 for one in ("read", "written")
    }
    keys = ("server", "move", "bytes_s", "moved_bytes", "left_bytes", "left_s")
    moves = [
        ("a", "drain", 1 << 20, 3 << 20, 90 << 20, 90),
        ("b", "copies", 5 << 20, 0, None, None),
        ("c", "later", 0, 0, 9, None),
    ]
    answer["moves"] = [dict(zip(keys, one, strict=True)) for one in moves]
    answer["named"] = False

    async def changed(route: Any) -> None:
        await route.fulfill(json=answer)

    await page.route("**/api/v1/pool", changed)
    await until(page, "hourhit", lambda text: text == "50.0 % to 75.0 %")
    assert await page.text_content("#hourline .ends") == "60 min agonow"
    shown = await page.text_content("#moves")
    assert "3 MiB of 93 MiB, 1 MiB/s, 2 min left" in shown
    assert "bfetches from others5 MiB/s, of unknown size" in shown
    assert "clater0 B of 9 B, nothing moves at the moment" in shown
    for box in ("sessions", "usage", "demand"):
        assert "on the master's own host only" in await page.text_content(f"#{box}")
    assert not page.problems


@pytest.mark.skipif("DRAW_PICTURES" not in os.environ, reason="draws the pictures of the docs")
async def test_pictures_for_the_docs(pool: RunningPool, browser: Any) -> None:
    """DRAW_PICTURES=1 make test WITH=page: docs/pictures/page-*.png."""
    for name in ("gpu-1", "gpu-2", "gpu-3"):
        pool.serve(name)
    sizes = {"desktop": {"width": 1100, "height": 1000}, "phone": {"width": 360, "height": 780}}
    global NAMESPACE
    NAMESPACE = kvpool.Namespace("vllm model=qwen3-8b dtype=bfloat16")
    await fill(pool, 3, seconds=75)  # some points of the last hour
    pool.kill("gpu-3")
    await fill(pool, 2, seconds=6)
    for name, size in sizes.items():
        for look in ("light", "dark"):
            page = await opened(browser, pool, viewport=size, color_scheme=look)
            await until(page, "servers", lambda text: text == "2 / 3")
            await until(page, "usage", lambda text: "qwen3" in text)
            path = ROOT / "docs" / "pictures" / f"page-{name}-{look}.png"
            await page.screenshot(path=path)
            await page.close()
            assert path.stat().st_size < 150_000


def test_the_pictures_are_small_and_there() -> None:
    text = (ROOT / "docs" / "operate.md").read_text()
    shown = re.findall(r"\]\((pictures/page-[a-z-]+\.png)\)", text)
    assert len(shown) >= 2
    for name in shown:
        assert (ROOT / "docs" / name).stat().st_size < 150_000
