"""Measure images through a daemon: text beside them, the same image again, and memory.

The model has SigLIP-so400m's tower (384 pixels a side, 729 rows an image), a LLaVA projector and
the layers of SmolLM2-135M, with random weights; its folder is written once. The loads:

    alone     4 text requests at once
    beside    the same, while a client sends one new image after the other
    again     a photo of 12 megapixels, new and then again, and text of as many tokens, both cached
    memory    different images by 8 clients: resident memory of the daemon's processes
"""

import argparse
import base64
import io
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import httpx
import torch
import transformers
from PIL import Image
from rich.console import Console
from rich.table import Table

from deploy.bench.client import BenchRequest, Target
from deploy.bench.datasets import Session, random_words, single
from deploy.bench.figures import figures_of
from deploy.bench.limits import percentile
from deploy.bench.load import LoadPattern, measure
from deploy.bench.options import BenchParser, at_least_one
from deploy.bench.servers import StartedServer, tokend
from deploy.environment import HostEnvironment
from tests.benchmarks.command import run
from tests.benchmarks.usage import usage_by_title
from tests.fakes.tiny_vision import END_ID, IMAGE_ID, VOCABULARY, vision_processor

_MODEL: Final = "images"
_AT_ONCE: Final = 4
_IMAGE_CLIENTS: Final = 8
_PHOTO: Final = (4000, 3000)
_TIMEOUT: Final = 600.0


def model_folder(environment: HostEnvironment) -> Path:
    """Return the folder of the model, written now if it does not exist."""
    path = Path(environment.cache, "synthetic", "llava-so400m")
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    config = transformers.LlavaConfig(
        text_config={
            "model_type": "llama",
            "vocab_size": len(VOCABULARY),
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "eos_token_id": END_ID,
        },
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 384,
            "patch_size": 14,
        },
        image_token_index=IMAGE_ID,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    model = transformers.LlavaForConditionalGeneration(config).bfloat16()
    processor = vision_processor("llava siglip")
    processor.image_processor.size = {"height": 384, "width": 384}
    processor.patch_size = 14
    with tempfile.TemporaryDirectory(dir=path.parent) as workspace:
        target = Path(workspace, "model")
        model.save_pretrained(target)
        processor.save_pretrained(target)
        settings = processor.image_processor.to_json_string()
        (target / "preprocessor_config.json").write_text(settings)
        os.replace(target, path)
    return path


def data_uri(seed: int, size: tuple[int, int], form: str = "JPEG") -> str:
    """Return an image of random colours as a data URI; no two seeds give the same."""
    coarse = random.Random(seed).randbytes(3 * 64 * 48)
    image = Image.frombytes("RGB", (64, 48), coarse).resize(size)
    file = io.BytesIO()
    image.save(file, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def chat(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "ignore_eos": True}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def image_part(uri: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri}}


def texts(options: argparse.Namespace, seed: int) -> Iterator[Session]:
    """Yield requests of text that no other run has."""
    rng = random.Random(seed)
    while True:
        content = chat(text_part(random_words(rng, options.words)))
        yield single(BenchRequest("/v1/chat/completions", content, options.output_tokens))


class Images:
    """Sends images to a daemon."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=_TIMEOUT)

    def seconds(self, *parts: dict[str, Any]) -> float:
        """Return the seconds until the answer, of one token, is complete."""
        body = json.dumps({"model": _MODEL, "max_tokens": 1, **chat(*parts)}).encode()
        headers = {"Content-Type": "application/json"}
        start = perf_counter()
        answer = self._client.post("/v1/chat/completions", content=body, headers=headers)
        seconds = perf_counter() - start
        if answer.status_code != httpx.codes.OK:
            raise SystemExit(f"an image was answered with {answer.status_code}: {answer.text}")
        return seconds


@contextmanager
def image_stream(url: str, seeds: Iterator[int]) -> Iterator[list[float]]:
    """Send one new image after the other; yields the seconds of those that are answered."""
    ended, answered = threading.Event(), list[float]()
    images = Images(url)

    def send_all() -> None:
        while not ended.is_set():
            answered.append(images.seconds(image_part(data_uri(next(seeds), (640, 480)))))

    thread = threading.Thread(target=send_all)
    thread.start()
    try:
        yield answered
    finally:
        ended.set()
        thread.join()


def gaps(url: str, options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Return figures of the text requests of one load."""
    pattern = LoadPattern(concurrency=_AT_ONCE, max_requests=options.requests)
    result = measure(Target(url, _MODEL), texts(options, seed), pattern, "text", sys.stderr)
    figures = figures_of("text", result)
    if figures.num_failed:
        raise SystemExit(f"{figures.num_failed} requests failed: {figures.errors}")
    itl = figures.times["itl"]
    return {
        "gap_p50_ms": percentile(itl, 50),
        "gap_p99_ms": percentile(itl, 99),
        "tokens_per_s": figures.output_tokens_per_s,
    }


def again(url: str, rounds: int) -> dict[str, float]:
    """Return the milliseconds of a photo when it is new, again, and of cached text as long."""
    images, new, repeated, plain = Images(url), [], [], []
    for number in range(rounds):
        photo = image_part(data_uri(-1 - number, _PHOTO))
        new.append(images.seconds(photo))
        repeated.append(min(images.seconds(photo) for _ in range(3)))
        text = text_part(random_words(random.Random(number), 60))
        images.seconds(text)
        plain.append(min(images.seconds(text) for _ in range(3)))
    found = {"new_ms": new, "again_ms": repeated, "text_ms": plain}
    return {name: 1e3 * statistics.median(seconds) for name, seconds in found.items()}


def memory(url: str, pid: int, seeds: Iterator[int], number: int) -> dict[str, float]:
    """Return resident MiB of all processes, after half of the images and after all of them."""
    found = {}
    for count in (number // 2, number):
        uris = [data_uri(next(seeds), (1024, 768)) for _ in range(number // 2)]
        left = iter(uris)
        lock = threading.Lock()

        def send(left: Iterator[str] = left, lock: threading.Lock = lock) -> None:
            images = Images(url)
            while True:
                with lock:
                    uri = next(left, None)
                if uri is None:
                    return
                images.seconds(image_part(uri))

        threads = [threading.Thread(target=send) for _ in range(_IMAGE_CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        usage = usage_by_title(pid)
        found[f"mib_after_{count}"] = sum(each.resident_mib for each in usage.values())
    return found


def main(words: Sequence[str]) -> None:
    """Measure, print the tables, and write the figures where --json says so."""
    options = _parse(words)
    folder = model_folder(HostEnvironment.of(os.environ))
    spec = tokend("tokend", [str(folder), "--served-model-name", _MODEL, *options.serve_flags])
    seeds = itertools.count(1)
    found: dict[str, list[dict[str, float]]] = {"alone": [], "beside": []}
    with StartedServer(spec) as server:
        gaps(server.url, options, 0)  # warms up
        for turn in range(options.rounds):
            found["alone"].append(gaps(server.url, options, 2 * turn + 1))
            with image_stream(server.url, seeds) as answered:
                figures = gaps(server.url, options, 2 * turn + 2)
            figures["images"] = len(answered)
            figures["seconds_per_image"] = statistics.fmean(answered)
            found["beside"].append(figures)
        repeated = again(server.url, options.rounds)
        resident = memory(server.url, server.pid, seeds, options.images)
    document = {**found, "again": repeated, "memory": resident}
    if options.json:
        Path(options.json).write_text(json.dumps(document, indent=2) + "\n")
    _show(Console(width=120), found, repeated, resident)


def _show(
    console: Console,
    found: dict[str, list[dict[str, float]]],
    repeated: dict[str, float],
    resident: dict[str, float],
) -> None:
    table = Table(title=f"{_AT_ONCE} text requests at once; medians of the rounds")
    for column in ("", "p50 gap, ms", "p99 gap, ms", "p99 / p50 alone", "tokens/s", "images"):
        table.add_column(column, justify="right")
    alone = statistics.median(row["gap_p50_ms"] for row in found["alone"])
    for name, rows in found.items():
        p50, p99, rate = (
            statistics.median(row[key] for row in rows)
            for key in ("gap_p50_ms", "gap_p99_ms", "tokens_per_s")
        )
        count = sum(row.get("images", 0) for row in rows)
        table.add_row(
            name, f"{p50:.1f}", f"{p99:.1f}", f"{p99 / alone:.2f}", f"{rate:.0f}", f"{count:.0f}"
        )
    console.print(table)
    for what, figures in (("a photo of 12 megapixels", repeated), ("memory", resident)):
        cells = ", ".join(f"{name} {value:.1f}" for name, value in figures.items())
        console.print(f"{what}: {cells}")


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = BenchParser(prog="python -m tests.benchmarks.served_images", description=__doc__)
    parser.add_argument("--words", type=at_least_one, default=60, help="of a prompt (60)")
    parser.add_argument("--output-tokens", type=at_least_one, default=128, help="of each (128)")
    parser.add_argument("--requests", type=at_least_one, default=24, help="of a load (24)")
    parser.add_argument("--rounds", type=at_least_one, default=3, help="of all loads (3)")
    parser.add_argument("--images", type=at_least_one, default=100, help="for memory (100)")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("serve_flags", nargs="*", help="flags of tokend serve, after --")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(run(main))
