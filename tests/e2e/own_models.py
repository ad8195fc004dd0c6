"""A model of the user: a small Qwen 3 with random weights."""

from pathlib import Path

import httpx
import torch

from tests.e2e.daemon import Daemon
from tests.e2e.reference import save_random

PROMPT = list(range(100, 160))


def save_qwen3(folder: Path) -> torch.nn.Module:
    """Save a tiny random Qwen3 with the packaged model's tokenizer; returns it in float32."""
    from transformers import Qwen3Config

    return save_random(Qwen3Config, folder, head_dim=32)


def greedy(
    daemon: Daemon, prompt: list[int], num_tokens: int, engine: int | None = None
) -> list[int]:
    """Return the tokens of an answer. engine: by index, None for any."""
    request = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "data_parallel_rank": engine,
    }
    response = httpx.post(f"{daemon.url}/v1/completions", json=request, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]
