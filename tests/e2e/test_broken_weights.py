"""A model with a NaN token embedding: only requests with this token fail."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest
import torch

from tests.e2e.daemon import Daemon, eventually
from tests.e2e.own_models import PROMPT, save_qwen3
from tests.e2e.reference import Reference

pytestmark = pytest.mark.suite("daemons")

BROKEN_TOKEN = 777
NUM_OUTPUT_TOKENS = 24


def body(prompt: list[int], **changes: object) -> dict[str, object]:
    request = {"prompt": prompt, "max_tokens": NUM_OUTPUT_TOKENS, "temperature": 0}
    return request | {"ignore_eos": True, "return_token_ids": True} | changes


async def test_only_requests_with_the_nan_token_fail(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    model = save_qwen3(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[BROKEN_TOKEN] = float("nan")
    model.save_pretrained(folder)
    good = [PROMPT[number:] for number in range(6)]
    bad = [[*PROMPT[:40], BROKEN_TOKEN, *PROMPT[40 + number :]] for number in range(3)]
    with Daemon(str(folder), "--dtype", "float32", "--async-scheduling") as daemon:
        async with httpx.AsyncClient(base_url=daemon.url, timeout=60) as client:
            answers = await asyncio.gather(
                *(client.post("/v1/completions", json=body(each)) for each in good[:3] + bad)
            )
            # The server closes the connection of a failed stream, so it has a client of its own.
            stream = await client.post(
                "/v1/completions", json=body(bad[0], stream=True), headers={"Connection": "close"}
            )
            answers[3:3] = [
                await client.post("/v1/completions", json=body(each)) for each in good[3:]
            ]
        assert [answer.status_code for answer in answers] == [200] * 6 + [500] * 3
        assert "NaN or infinity" in answers[-1].json()["error"]["message"]
        *_, event, done = stream.text.strip().split("\n\n")
        assert json.loads(event.removeprefix("data: "))["error"]["code"] == 500
        assert done == "data: [DONE]"
        assert daemon.metric("vllm:corrupted_requests_total") == 4
        assert eventually(lambda: daemon.metric("vllm:kv_cache_usage_perc") == 0)
    outputs = [answer.json()["choices"][0]["token_ids"] for answer in answers[:6]]
    Reference(model, None).assert_greedy(list(zip(good, outputs, strict=True)))
