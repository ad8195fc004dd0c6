"""Make the pictures of the page in docs/: `page_pictures.py FOLDER`.

In light and dark: a chat, a completion, the live view of an overloaded small pool, and a chat with
mathematics on a phone. All answers are the packaged model's.
"""

import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import sync_playwright

from tests.e2e.daemon import Daemon
from tests.e2e.visitor import CHROMIUM, PHONE

FLAGS = ("--num-gpu-blocks-override", "1300", "--max-num-seqs", "16")
NUM_CLIENTS = 20
WATCHED_MS = 45_000
SIZE = {"viewport": {"width": 1440, "height": 900}}
PHONE_QUESTION = (
    r"Repeat this sentence: The solutions of $ax^2 + bx + c = 0$ are "
    r"$$x = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}$$"
)


def load(url: str, ended: threading.Event, seed: int) -> None:
    """Send completions one after the other until `ended`; half of the prompts share a prefix."""
    draw = random.Random(seed)
    shared = " ".join(f"word{number}" for number in range(120))
    while not ended.is_set():
        words = " ".join(draw.choice(("sea", "ship", "wave", "wind")) for _ in range(400))
        prompt = (shared if seed % 2 else "") + words[: draw.choice((60, 600, 1800))]
        body = {"prompt": prompt, "max_tokens": draw.choice((100, 300, 600)), "ignore_eos": True}
        lines = httpx.stream(
            "POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=None
        )
        with lines as response:
            for _ in response.iter_lines():
                if ended.is_set():
                    return


def chat(page: Any) -> None:
    page.fill("#p-max_tokens", "110")
    page.fill("#p-temperature", "0")
    page.fill("#p-system", "Answer in one sentence.")
    for message in ("What is the capital of France?", "Why is the sky blue?"):
        page.fill("#message", message)
        page.press("#message", "Enter")
        page.wait_for_selector(".turn:last-child .ending")
    page.click(".turn:last-child >> button:text-is('Tokens')")
    page.hover(".turn:last-child .token >> nth=2")


def completion(page: Any) -> None:
    page.fill("#p-max_tokens", "110")
    page.fill("#p-temperature", "0.5")
    page.fill("#p-seed", "3")
    page.fill("#prompt", "The lighthouse keeper had not spoken to anyone for")
    page.press("#prompt", "Control+Enter")
    page.wait_for_selector("#completion-output .ending")
    page.hover("#completion-output .token >> nth=3")


def phone(page: Any) -> None:
    page.click("#parameters summary >> nth=0")
    page.fill("#p-temperature", "0")
    page.click("#parameters summary >> nth=0")
    page.fill("#message", PHONE_QUESTION)
    page.press("#message", "Enter")
    page.wait_for_selector(".turn .ending")
    page.wait_for_selector(".markdown math >> nth=-1")
    page.wait_for_timeout(1000)


def live(page: Any) -> None:
    page.wait_for_timeout(WATCHED_MS)


def main(folder: Path) -> None:
    scenes: dict[str, Callable[[Any], None]] = {
        "chat": chat,
        "completion": completion,
        "phone": phone,
    }
    with Daemon(*FLAGS) as daemon, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        def take(name: str, scene: Callable[[Any], None]) -> None:
            size = PHONE if name == "phone" else SIZE
            for scheme in ("light", "dark"):
                page = browser.new_page(color_scheme=scheme, **size)
                page.goto(f"{daemon.url}/#{name}")
                scene(page)
                page.screenshot(path=folder / f"page-{name}-{scheme}.png", full_page=name == "live")
                page.close()

        for name, scene in scenes.items():
            take(name, scene)
        ended = threading.Event()
        clients = [
            threading.Thread(target=load, args=(daemon.url, ended, seed))
            for seed in range(NUM_CLIENTS)
        ]
        for each in clients:
            each.start()
        take("live", live)
        ended.set()
        for each in clients:
            each.join()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
