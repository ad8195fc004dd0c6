"""Bidirectional models behind a real daemon: results, bad input, a death, a deadline, an abort."""

import asyncio
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.e2e.daemon import REQUEST_GAUGES, Daemon, eventually
from tests.fakes.adapters import make_adapter, merged
from tests.fakes.tiny_encoders import save_encoder
from tests.fakes.tiny_pooling import save_causal, save_modules

pytestmark = pytest.mark.suite("daemons")
SHORT = [[(7 * i + 3 * j) % 90 + 3 for j in range(1 + 5 * i)] for i in range(12)]
LONG = [[(11 * i + j) % 90 + 3 for j in range(100)] for i in range(1500)]
"""About a second of work."""


@torch.inference_mode()
def expected(model: Any, ids: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
    return torch.nn.functional.normalize(mean, dim=0).numpy()


def has_requests(daemon: Daemon) -> bool:
    return any(map(daemon.metric, REQUEST_GAUGES))


async def post(daemon: Daemon, path: str, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=daemon.url, timeout=120) as client:
        return await client.post(path, json=body)


def vectors(response: httpx.Response) -> np.ndarray[Any, np.dtype[np.float32]]:
    assert response.status_code == 200, response.text
    return np.array([entry["embedding"] for entry in response.json()["data"]], np.float32)


@pytest.mark.suite("adapters")
async def test_embeddings_with_adapters(tmp_path: Path) -> None:
    """`model` names one; a worker's death changes nothing."""
    model = save_encoder("bert", tmp_path / "model")
    save_modules(tmp_path / "model", model.config.hidden_size, "mean_tokens")
    paths = {
        name: make_adapter(model, tmp_path / name, seed, target_modules=["query", "value"])
        for seed, name in enumerate(("one", "two"), 1)
    }
    models = {"base": model} | {name: merged(model, path) for name, path in paths.items()}
    want = {name: np.stack([expected(of, ids) for ids in SHORT]) for name, of in models.items()}
    assert np.abs(want["one"] - want["two"]).max() > 0.05
    flags = ("--dtype", "float32", "--served-model-name", "base", "--enable-lora", "--lora-modules")
    named = [f"{name}={path}" for name, path in paths.items()]
    with Daemon(str(tmp_path / "model"), *flags, *named) as daemon:

        async def check() -> None:
            answers = [post(daemon, "/v1/embeddings", input=SHORT, model=name) for name in models]
            for name, answer in zip(models, await asyncio.gather(*answers), strict=True):
                assert answer.json()["model"] == name
                np.testing.assert_allclose(vectors(answer), want[name], atol=1e-5)

        await check()
        os.kill(daemon.processes()["worker"].pid, signal.SIGKILL)
        await check()


async def test_embeddings(tmp_path: Path) -> None:
    model = save_encoder("bert", tmp_path / "model")
    save_modules(tmp_path / "model", model.config.hidden_size, "mean_tokens")
    flags = ("--dtype", "float32", "--max-num-batched-tokens", "256")
    with Daemon(str(tmp_path / "model"), *flags) as daemon:
        assert "KV cache" not in daemon.text
        want = np.stack([expected(model, ids) for ids in SHORT])

        async def check() -> None:
            found = vectors(await post(daemon, "/v1/embeddings", input=SHORT))
            np.testing.assert_allclose(found, want, atol=1e-5)

        await check()
        first = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json")).encode("w5 w6").ids
        found = vectors(await post(daemon, "/v1/embeddings", input="w5 w6", dimensions=8))
        short = expected(model, first)[:8]
        np.testing.assert_allclose(found[0], short / np.linalg.norm(short), atol=1e-5)

        too_long = " ".join(["w5"] * 200)
        refused = await post(daemon, "/v1/embeddings", input=too_long)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
        cut = await post(daemon, "/v1/embeddings", input=too_long, truncate_prompt_tokens=-1)
        np.testing.assert_allclose(vectors(cut)[0], expected(model, [5] * 127 + [2]), atol=1e-5)
        generated = await post(daemon, "/v1/completions", prompt="w5")
        assert (generated.status_code, generated.json()["error"]["param"]) == (400, "model")

        late = await post(daemon, "/v1/embeddings", input=LONG, timeout_ms=20)
        assert late.status_code == 504, late.text
        task = asyncio.create_task(post(daemon, "/v1/embeddings", input=LONG))
        assert await asyncio.to_thread(eventually, lambda: has_requests(daemon))
        os.kill(daemon.processes()["worker"].pid, signal.SIGKILL)
        await check()  # beside the long request, and after the worker's death
        survived = vectors(await task)
        np.testing.assert_allclose(survived[-1], expected(model, LONG[-1]), atol=1e-5)

        task = asyncio.create_task(post(daemon, "/v1/embeddings", input=LONG))
        assert await asyncio.to_thread(eventually, lambda: has_requests(daemon))
        task.cancel()
        assert await asyncio.to_thread(eventually, lambda: not has_requests(daemon))
        await check()


async def test_scores_of_pairs(tmp_path: Path) -> None:
    """A cross encoder in bfloat16: token types come from the tokenizer."""
    model = save_encoder("bert", tmp_path / "model", num_labels=1)
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    documents = [f"w{7 + i} w{20 + 2 * i} w9" for i in range(8)]
    want = []
    for document in documents:
        pair = tokenizer.encode("w5 w6", document)
        assert set(pair.type_ids) == {0, 1}
        ids, types = torch.tensor([pair.ids]), torch.tensor([pair.type_ids])
        with torch.inference_mode():
            want.append(float(model(ids, token_type_ids=types).logits.sigmoid()))
    with Daemon(str(tmp_path / "model")) as daemon:
        response = await post(daemon, "/rerank", query="w5 w6", documents=documents)
        assert response.status_code == 200, response.text
        results = response.json()["results"]
        found = {result["index"]: result["relevance_score"] for result in results}
        assert [found[index] for index in range(8)] == pytest.approx(want, abs=0.02)
        asked = await post(daemon, "/v1/embeddings", input="w5")
        assert (asked.status_code, asked.json()["error"]["param"]) == (400, "model")


@pytest.mark.suite("models")
@pytest.mark.parametrize("save", [partial(save_encoder, "bert"), save_causal])
async def test_bits_of_an_embedding_alone_and_beside_others(
    save: Callable[[Path], Any], tmp_path: Path
) -> None:
    model = save(tmp_path / "model")
    save_modules(tmp_path / "model", model.config.hidden_size, "mean_tokens")
    with Daemon(str(tmp_path / "model"), "--batch-invariant") as daemon:
        texts = [LONG[0], *SHORT, *LONG[1:40]]
        together = vectors(await post(daemon, "/v1/embeddings", input=texts))
        for text, found in zip(texts[:14], together, strict=False):
            alone = vectors(await post(daemon, "/v1/embeddings", input=[text], cache_salt="other"))
            assert alone[0].tobytes() == found.tobytes()
