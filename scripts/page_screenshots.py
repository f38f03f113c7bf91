"""Makes the pictures of the web page in docs/images/: a chat in light and in dark, the scheduler under load, and a phone.

python scripts/page_screenshots.py [FOLDER]

It serves the embedded model, and shows its page in Chromium: needs the extras ``test`` and ``browser``, and a Chromium of the
system or of ``playwright install chromium``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
SIZE, PHONE, TALL = ({"width": 1200, "height": 740}, {"width": 390, "height": 740}, {"width": 1120, "height": 1180})
MAX_BYTES = 150_000
NUM_CLIENTS, LOAD_SECONDS = 8, 40
CHATS = (
    ("Tell me a story about a lighthouse.",),
    ("What is the capital of France?", "And of Italy?"),
    ("What is an NPU?", "What is a KV cache?", "What is a token?"),
)


@contextmanager
def serving() -> Iterator[str]:
    """Serve the embedded model for few requests at once, and yield the URL."""
    properties = ("MAX_NUM_SEQS=4", "MAX_PROMPT_LEN=2048", "MIN_RESPONSE_LEN=1500", "PREFILL_ROWS=128")
    options = [part for each in properties for part in ("-p", each)]
    command = [sys.executable, "-m", "staticllm", "serve", "--port", "0", "--max-per-client", "8", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().split()[0].removesuffix("/v1")
        finally:
            server.terminate()


def chat(page: Page, texts: tuple[str, ...]) -> None:
    """Have a conversation, and wait for each answer."""
    page.get_by_role("button", name="New conversation").click()
    for text in texts:
        page.get_by_label("Message", exact=True).fill(text)
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Send", exact=True).wait_for(timeout=60_000)
        page.wait_for_timeout(200)


@contextmanager
def load(url: str) -> Iterator[None]:
    """Let clients send prompts, with answers of different lengths."""
    stop = threading.Event()

    def run(number: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            text = f"Story {number} {turn}. " + "The fox went on. " * (20 + 37 * ((number * 5 + turn) % 8))
            body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "ignore_eos": True}
            limit = 120 + 90 * ((number + 3 * turn) % 9)
            tier = "flex" if number % 2 else "default"  # nobody waits for the answers of every other client
            asked = {**body, "max_tokens": limit, "service_tier": tier}
            httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=120)
            stop.wait(0.4 * (number % 3))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def shoot(page: Page, path: Path) -> None:
    page.mouse.move(0, 0)
    page.wait_for_timeout(300)
    page.screenshot(path=path)
    print(path, f"{path.stat().st_size / 1e3:.0f} kB")
    assert path.stat().st_size < MAX_BYTES, "too large for the repository"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    folder.mkdir(exist_ok=True)
    with serving() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(url)
        page.get_by_label("Model").locator("option").first.wait_for(state="attached", timeout=120_000)
        for texts in CHATS:
            chat(page, texts)
        shoot(page, folder / "page_light.png")
        page.emulate_media(color_scheme="dark")
        shoot(page, folder / "page_dark.png")
        page.set_viewport_size(PHONE)
        page.emulate_media(color_scheme="light")
        shoot(page, folder / "page_phone.png")
        page.set_viewport_size(TALL)
        page.goto(url + "/#scheduler")
        with load(url):
            page.wait_for_timeout(LOAD_SECONDS * 1000)
            shoot(page, folder / "page_scheduler.png")
        browser.close()


if __name__ == "__main__":
    main()
