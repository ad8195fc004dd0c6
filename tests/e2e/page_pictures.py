"""Make the pictures of the page in docs/: `page_pictures.py FOLDER [NAME]`.

In light and dark: a chat, a completion, the live view of an overloaded small pool, a chat with
mathematics on a phone, and one with an image; NAME is one of them. All answers are the packaged
model's but for the last: it reads no images, so the script writes list of models and answer.
"""

import io
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from PIL import Image, ImageDraw
from playwright.sync_api import sync_playwright

from tests.e2e.daemon import Daemon
from tests.e2e.visitor import CHROMIUM, PHONE, script_answers

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


def harbour() -> bytes:
    """Return a drawing of a boat at sunset as a PNG."""
    image = Image.new("RGB", (640, 420), "#f6c177")
    draw = ImageDraw.Draw(image)
    draw.ellipse((420, 110, 520, 210), fill="#eb6f4d")
    draw.rectangle((0, 260, 640, 420), fill="#2a6f97")
    draw.polygon(((150, 270), (400, 270), (360, 330), (190, 330)), fill="#6b3e26")
    draw.polygon(((270, 80), (270, 255), (390, 255)), fill="#fffaf3")
    draw.polygon(((258, 110), (258, 255), (180, 255)), fill="#f2e9de")
    encoded = io.BytesIO()
    image.save(encoded, "PNG")
    return encoded.getvalue()


def image(page: Any) -> None:
    card = {
        "id": "a-model-that-reads-images",
        "max_model_len": 8192,
        "supported_tasks": ["generate", "chat"],
        "default_sampling_params": {},
        "input_modalities": ["text", "image"],
    }
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [card]}))
    count = {"count": 288, "max_model_len": 8192, "tokens": []}
    page.route("**/tokenize", lambda route: route.fulfill(json=count))
    page.reload()
    page.wait_for_selector(f"#model >> text={card['id']}")
    script_answers(page)
    file = {"name": "harbour.png", "mimeType": "image/png", "buffer": harbour()}
    page.set_input_files("#attach-file", file)
    page.wait_for_selector(".thumb")
    page.fill("#message", "What is in the picture?")
    page.press("#message", "Enter")
    page.wait_for_function("chats.length > 0")
    answer = "A sailing boat with two white sails on blue water, and a low sun behind it."
    page.evaluate("(answer) => { chats.at(-1).add(answer); chats.at(-1).end(); }", answer)
    page.wait_for_selector("#busy", state="hidden")
    page.set_input_files("#attach-file", file)
    page.wait_for_selector(".thumb")
    page.fill("#message", "And in which direction does it sail?")
    page.wait_for_timeout(500)


def live(page: Any) -> None:
    page.wait_for_timeout(WATCHED_MS)


def main(folder: Path, only: str = "") -> None:
    scenes: dict[str, Callable[[Any], None]] = {
        "chat": chat,
        "completion": completion,
        "phone": phone,
        "image": image,
    }
    with Daemon(*FLAGS) as daemon, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        def take(name: str, scene: Callable[[Any], None]) -> None:
            size = PHONE if name == "phone" else SIZE
            for scheme in ("light", "dark"):
                page = browser.new_page(color_scheme=scheme, **size)
                page.goto(f"{daemon.url}/#{'chat' if name == 'image' else name}")
                scene(page)
                page.screenshot(path=folder / f"page-{name}-{scheme}.png", full_page=name == "live")
                page.close()

        for name, scene in scenes.items():
            if only in ("", name):
                take(name, scene)
        if only not in ("", "live"):
            browser.close()
            return
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
    main(Path(sys.argv[1]), *sys.argv[2:])
