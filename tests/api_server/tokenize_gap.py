"""Measure how long a stream stalls while a prompt of 100,000 tokens is tokenized.

    python -m tests.api_server.tokenize_gap PREPARED_FOLDER

A scripted engine sends a stream a token every 5 ms; meanwhile the prompt is sent to the endpoints
in turn. Prints the longest time between two tokens at the client: without other requests, with the
tokenizer on its thread, and with it on the event loop, best of several runs.
"""

import asyncio
import itertools
import sys
import tempfile
import time
from pathlib import Path

import httpx
from tokenizers import Tokenizer

from api_server.text import tokenizer as inputs
from proto.messages.engine_io import FinishReason
from proto.messages.prepared_model import PreparedModel
from tests.api_server.conftest import FrontEnd, prepared, serving

NUM_TOKENS = 100_000
TOKEN_SECONDS = 0.005
ROUNDS = 5


def long_text(tokenizer: Tokenizer) -> str:
    """Return a text of at least NUM_TOKENS tokens, with hardly any repeated words."""
    pieces = (tokenizer.decode([each % 40_000 + 1000]) for each in range(0, NUM_TOKENS * 7, 7))
    return "".join(pieces)


async def longest_gap(front_end: FrontEnd, path: str | None, text: str) -> float:
    """Return seconds; path: None for no prompt."""
    arrivals: list[float] = []
    over = asyncio.Event()

    async def read() -> None:
        body = {"prompt": "hello", "stream": True, "max_tokens": 100_000}
        async with front_end.http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line:
                    arrivals.append(time.perf_counter())

    async def draw() -> None:
        request = await front_end.engine.requests.get()
        while not over.is_set():
            front_end.engine.emit(request, [40])
            await asyncio.sleep(TOKEN_SECONDS)
        front_end.engine.emit(request, [40], finish=FinishReason.LENGTH)

    reading, drawing = asyncio.create_task(read()), asyncio.create_task(draw())
    while len(arrivals) < 20:
        await asyncio.sleep(TOKEN_SECONDS)
    begin = time.perf_counter()
    if path is None:
        await asyncio.sleep(1.0)
    else:
        body = {"prompt": text, "max_tokens": 1}
        body = body if path != "/tokenize" else {"prompt": text}
        asking = asyncio.create_task(front_end.http.post(path, json=body))
        if path != "/tokenize":
            asked = await front_end.engine.requests.get()
            assert len(asked.prompt_token_ids) >= NUM_TOKENS
            front_end.engine.emit(asked, [40], finish=FinishReason.LENGTH)
        (await asking).raise_for_status()
    over.set()
    await asyncio.gather(reading, drawing)
    seen = [each for each in arrivals if each >= begin - TOKEN_SECONDS]
    return max(after - before for before, after in itertools.pairwise(seen))


async def measure(model: PreparedModel, text: str) -> None:
    with tempfile.TemporaryDirectory(prefix="td-") as run_dir:
        async with serving(run_dir, model, accepts=True, max_model_len=200_000) as front_end:
            front_end.http.timeout = httpx.Timeout(120)
            for path in (None, "/tokenize", "/v1/completions"):
                for where, size in (("thread", inputs.INLINE_SIZE), ("event loop", 1 << 60)):
                    if path is None and where != "thread":
                        continue
                    kept, inputs.INLINE_SIZE = inputs.INLINE_SIZE, size
                    gaps = [await longest_gap(front_end, path, text) for _ in range(ROUNDS)]
                    inputs.INLINE_SIZE = kept
                    print(f"{path or 'no prompt'}, {where}: {1000 * min(gaps):.1f} ms", flush=True)


def main() -> None:
    folder = Path(sys.argv[1])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = prepared(folder, tokenizer.get_vocab_size(), has_chat_template=True)
    asyncio.run(measure(model, long_text(tokenizer)))


if __name__ == "__main__":
    main()
