"""Make the pictures of the page in docs/: `page_pictures.py FOLDER [NAME]`.

In light and dark: a chat, a completion, the live view of an overloaded small pool and one with
adapters, a chat with mathematics on a phone, and one with an image; NAME is one of them. All
answers are the packaged model's but for the last: it reads no images, so the script writes list of
models and answer. The adapters are random numbers.
"""

import io
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from PIL import Image, ImageDraw
from playwright.sync_api import sync_playwright

from tests.benchmarks.adapters import write_adapter
from tests.e2e.daemon import Daemon
from tests.e2e.reference import packaged_model
from tests.e2e.visitor import CHROMIUM, PHONE, script_answers

FLAGS = ("--num-gpu-blocks-override", "1300", "--max-num-seqs", "16")
NUM_CLIENTS = 20
WATCHED_MS = 45_000
ADAPTERS_MS = 15_000
ADAPTERS = ("sql", "poems", "tickets", "summaries")
SIZE = {"viewport": {"width": 1440, "height": 900}}
PHONE_QUESTION = (
    r"Repeat this sentence: The solutions of $ax^2 + bx + c = 0$ are "
    r"$$x = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}$$"
)


def load(url: str, ended: threading.Event, models: Sequence[str], seed: int) -> None:
    """Send completions one after the other until `ended`; half of the prompts share a prefix."""
    draw = random.Random(seed)
    shared = " ".join(f"word{number}" for number in range(120))
    while not ended.is_set():
        words = " ".join(draw.choice(("sea", "ship", "wave", "wind")) for _ in range(400))
        prompt = (shared if seed % 2 else "") + words[: draw.choice((60, 600, 1800))]
        body = {"prompt": prompt, "max_tokens": draw.choice((100, 300, 600)), "ignore_eos": True}
        body |= {"model": draw.choice(models)} if models else {}
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


def adapters(page: Any) -> None:
    page.wait_for_selector("#adapters-list li >> nth=3")
    page.check("#adapters-colour")
    page.wait_for_timeout(ADAPTERS_MS)


PLAYGROUND: dict[str, Callable[[Any], None]] = {
    "chat": chat,
    "completion": completion,
    "phone": phone,
    "image": image,
}
"""Pictures of a daemon that serves nothing else."""


class Camera:
    """Takes pictures of a daemon's page."""

    def __init__(self, folder: Path, browser: Any, url: str) -> None:
        self._folder, self._browser, self._url = folder, browser, url

    def take(self, name: str, view: str, scene: Callable[[Any], None]) -> None:
        """Play a scene in a view of the page, in light and dark, and take its picture."""
        size = PHONE if name == "phone" else SIZE
        for scheme in ("light", "dark"):
            page = self._browser.new_page(color_scheme=scheme, **size)
            page.goto(f"{self._url}/#{view}")
            scene(page)
            path = self._folder / f"page-{name}-{scheme}.png"
            page.screenshot(path=path, full_page=view == "live")
            page.close()


@contextmanager
def clients(url: str, models: Sequence[str] = ()) -> Iterator[None]:
    """Load a daemon in the block. models: one of them for each request; none for the default."""
    ended = threading.Event()
    threads = [
        threading.Thread(target=load, args=(url, ended, models, seed))
        for seed in range(NUM_CLIENTS)
    ]
    for each in threads:
        each.start()
    yield
    ended.set()
    for each in threads:
        each.join()


@contextmanager
def adapter_flags() -> Iterator[list[str]]:
    """Yield the flags that serve adapters of random numbers."""
    prepared = packaged_model()
    with tempfile.TemporaryDirectory() as folder:
        for seed, name in enumerate(ADAPTERS):
            write_adapter(Path(folder, name), prepared, 16, seed)
        yield ["--enable-lora", "--lora-modules", *(f"{each}={folder}/{each}" for each in ADAPTERS)]


def main(folder: Path, only: str = "") -> None:
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        if only != "adapters":
            with Daemon(*FLAGS) as daemon:
                camera = Camera(folder, browser, daemon.url)
                for name, scene in PLAYGROUND.items():
                    if only in ("", name):
                        camera.take(name, "chat" if name == "image" else name, scene)
                if only in ("", "live"):
                    with clients(daemon.url):
                        camera.take("live", "live", live)
        if only in ("", "adapters"):
            with (
                adapter_flags() as flags,
                Daemon(*FLAGS, *flags) as daemon,
                clients(daemon.url, ADAPTERS),
            ):
                Camera(folder, browser, daemon.url).take("adapters", "live", adapters)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
