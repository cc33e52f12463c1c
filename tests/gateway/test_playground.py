"""The playground in a browser: what it shows is what the API tells."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.gateway.conftest import Running, serving

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]


@asynccontextmanager
async def browsing(running: Running, scheme: str = "light") -> AsyncIterator[Any]:
    """The page. It logs no error, and asks no other host."""
    problems: list[str] = []
    url = running.url
    async with playwright.async_playwright() as player:
        browser = await player.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = await browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 800})
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith(url) else problems.append(request.url))
        await page.goto(url)
        try:
            yield page
        finally:
            await browser.close()
    # A refused request is logged by the browser, whatever the page does about it.
    assert not [
        problem for problem in problems if "Failed to load resource" not in problem and "net::ERR" not in problem
    ]


async def ask(page: Any, prompt: str, **settings: Any) -> None:
    await page.locator("summary").click()
    for name, value in settings.items():
        field = page.locator(f"#{name.replace('_', '-')}")
        await (field.select_option(value) if name == "mode" else field.fill(str(value)))
    await page.locator("summary").click()
    await page.locator("#prompt").fill(prompt)
    await page.locator("#send").click()


async def finished(page: Any) -> None:
    await page.wait_for_selector("#send:enabled")
    await page.wait_for_selector("#log .token")


async def test_what_it_shows_is_what_the_api_tells() -> None:
    async with serving() as running, browsing(running) as page:
        await page.get_by_text("table-target").wait_for()
        await ask(page, "def f(", mode="completion", seed=7, max_tokens=120, draft_tokens=4)
        await finished(page)
        body = {"prompt": "def f(", "seed": 7, "max_tokens": 120, "num_draft_tokens": 4, "temperature": 0.7}
        answer = (await running.http.post("/v1/completions", json={**body, "return_origins": True})).json()
        [choice] = answer["choices"]
        turn = page.locator(".turn").last
        assert await turn.locator("p").text_content() == choice["text"]
        origins = await page.locator("#log .token").evaluate_all("spans => spans.map(s => s.dataset.origin)")
        assert origins == choice["specdec"]["origins"]
        counts = await page.locator("[data-count]").evaluate_all("all => all.map(o => [o.dataset.count, +o.value])")
        assert dict(counts) == {name: origins.count(name) for name in ("draft", "lookup", "correction", "bonus")}
        rounds = choice["specdec"]["rounds"]
        assert await page.locator("#rounds li").count() == len(rounds)
        dots = await page.locator(".dots").all_text_contents()
        assert [dot.count("●") for dot in dots] == [report["num_accepted_tokens"] for report in rounds]
        await page.locator("#log .token").nth(10).hover()
        assert await page.locator("#rounds li.lit").count() == 1
        await page.locator("#compare").click()
        await page.wait_for_selector(".verdict")
        assert re.match(r"identical: 120 tokens", await page.locator(".verdict").text_content())


async def test_it_chats_by_keyboard_remembers_and_stops() -> None:
    async with serving(pass_s=0.02) as running, browsing(running) as page:
        await page.locator("#prompt").fill("Hello")
        await page.keyboard.press("Control+Enter")
        await page.wait_for_selector("#log .token")
        await page.keyboard.press("Escape")
        await page.wait_for_selector("#send:enabled")
        for _ in range(100):
            if not (await running.cluster.client.server_info()).live_sequences:
                break
            await asyncio.sleep(0.05)
        assert not (await running.cluster.client.server_info()).live_sequences
        sent: list[Any] = []
        page.on("request", lambda request: sent.append(json.loads(request.post_data)) if request.post_data else None)
        await ask(page, "And then?", max_tokens=8)
        await finished(page)
        assert [message["role"] for message in sent[0]["messages"]] == ["user", "assistant", "user"]
        await page.locator("#clear").click()
        assert await page.locator(".turn").count() == 0


async def test_it_says_what_is_wrong(tmp_path: Any) -> None:
    key, file = "secret", tmp_path / "keys"
    file.write_text(json.dumps({"name": "one", "sha256": hashlib.sha256(key.encode()).hexdigest()}))
    async with serving(api_keys_file=str(file), client_key=key) as running, browsing(running) as page:
        await page.wait_for_selector("#problem:not([hidden])")
        assert "API key" in await page.locator("#problem").text_content()
        await ask(page, "Hello", key=key, max_tokens=8)
        await finished(page)
        assert await page.locator("#problem").is_hidden()
        await ask(page, "Hello", temperature=999)
        await page.wait_for_selector("#problem:not([hidden])")
        await running.gateway.stop()
        await page.locator("#send").click()
        await page.get_by_text("cannot be reached").wait_for()


async def test_a_busy_server_is_named_and_asked_again_later() -> None:
    async with serving(pass_s=0.01, max_live_sequences=1, max_waiting_requests=0) as running, browsing(running) as page:
        body = {"prompt": "x", "max_tokens": 5000, "stream": True}
        async with running.http.stream("POST", "/v1/completions", json=body) as other:
            assert other.status_code == 200
            await ask(page, "Hello", max_tokens=8)
            await page.get_by_text("Try again in a moment").wait_for()
        await running.cluster.settled()
        await page.locator("#send").click()
        await finished(page)


async def test_an_answer_of_5000_tokens_is_shown_as_a_whole() -> None:
    async with serving() as running, browsing(running) as page:
        await ask(page, "x", mode="completion", max_tokens=5000, draft_tokens=4)
        await finished(page)
        assert await page.locator("#log .token").count() == 5000
        assert sum(map(int, await page.locator("[data-count]").all_text_contents())) == 5000


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing_serious(scheme: str, request: pytest.FixtureRequest) -> None:
    axe = pytest.importorskip("axe_playwright_python.async_playwright", reason="axe is not installed")
    async with serving() as running, browsing(running, scheme) as page:
        await ask(page, "def f(", mode="completion", max_tokens=60, seed=1, draft_tokens=4)
        await finished(page)
        await page.locator("summary").click()
        report = await axe.Axe().run(page)
        serious = [
            violation for violation in report.response["violations"] if violation["impact"] in ("serious", "critical")
        ]
        assert not serious, [(violation["id"], [node["html"] for node in violation["nodes"]]) for violation in serious]
