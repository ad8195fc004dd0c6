"""Adapters (LoRA) through the daemon: greedy tokens are those of transformers with merged weights.

Beside the model itself and each other, in float32; with prefixes found apart, after a reload under
the same name, the death of a worker and of the engine, and on two ranks.
"""

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.daemon import Daemon, eventually
from tests.e2e.reference import Reference, save_random
from tests.e2e.test_parity import body, client_of
from tests.fakes.adapters import make_adapter, merged

pytestmark = pytest.mark.suite("adapters")

PROMPTS = [[1000 + 300 * i + j for j in range(5 + 9 * i)] for i in range(5)]
SETTINGS: dict[str, dict[str, Any]] = {
    "small": {"r": 4},
    "large": {"r": 64, "lora_alpha": 32, "use_rslora": True},
    "dora": {"r": 8, "use_dora": True},
    "ends": {"r": 8, "modules_to_save": ["lm_head", "embed_tokens"]},
    "other": {"r": 16, "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v_proj": 1}},
}
"""Names of adapters, and what is not PEFT's default in them."""


class Adapted:
    """A tiny model with adapters in one folder, and the reference of each; "" is the model."""

    def __init__(self, folder: Path) -> None:
        from transformers import LlamaConfig

        self.model = folder / "model"
        self.adapters = folder / "adapters"
        plain = save_random(LlamaConfig, self.model)
        self._references = {"": Reference(plain, None)}
        for seed, (name, settings) in enumerate(SETTINGS.items(), 1):
            path = make_adapter(plain, self.adapters / name, seed, size=2.0, **settings)
            self._references[name] = Reference(merged(plain, path), None)

    def assert_greedy(self, name: str, outputs: list[list[int]]) -> None:
        self._references[name].assert_greedy(list(zip(PROMPTS, outputs, strict=True)))

    def assert_different(self) -> None:
        """Check that the adapters change answers, so that a wrong one would be seen."""
        tokens = [
            tuple(self._references[name].model.generate(_tensor(PROMPTS[0]), max_new_tokens=8)[0])
            for name in ("", *SETTINGS)
        ]
        assert len(set(map(str, tokens))) == len(tokens)


def _tensor(tokens: list[int]) -> Any:
    import torch

    return torch.tensor([tokens])


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    found = Adapted(tmp_path_factory.mktemp("adapted"))
    found.assert_different()
    return found


@pytest.fixture
def daemon(adapted: Adapted) -> Iterator[Daemon]:
    with Daemon(*flags(adapted)) as running:
        yield running


def flags(adapted: Adapted, *more: str) -> list[str]:
    return [
        str(adapted.model),
        *("--served-model-name", "base", "--dtype", "float32", "--enable-lora"),
        *("--lora-modules", f"small={adapted.adapters / 'small'}"),
        *("--lora-dir", str(adapted.adapters), "--max-loras", "2", "--max-cpu-loras", "3"),
        *more,
    ]


async def complete(
    client: httpx.AsyncClient, name: str, prompt: list[int], **changes: Any
) -> list[int]:
    asked = body(prompt, model=name or "base", **changes)
    response = await client.post("/v1/completions", json=asked)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == (name or "base")
    return response.json()["choices"][0]["token_ids"]


async def complete_all(daemon: Daemon, names: list[str]) -> dict[str, list[list[int]]]:
    """Complete all prompts with each adapter, all at once."""
    async with client_of(daemon) as client:
        pairs = [(name, prompt) for prompt in PROMPTS for name in names]
        outputs = await asyncio.gather(*(complete(client, *pair) for pair in pairs))
    found: dict[str, list[list[int]]] = {name: [] for name in names}
    for (name, _), output in zip(pairs, outputs, strict=True):
        found[name].append(output)
    return found


async def check(adapted: Adapted, daemon: Daemon, names: list[str]) -> None:
    for name, outputs in (await complete_all(daemon, names)).items():
        adapted.assert_greedy(name, outputs)


def post(daemon: Daemon, path: str, **fields: object) -> httpx.Response:
    return httpx.post(f"{daemon.url}{path}", json=fields, timeout=60)


def names_of(daemon: Daemon) -> list[str]:
    return [card["id"] for card in httpx.get(f"{daemon.url}/v1/models").json()["data"]]


async def test_tokens_of_merged_weights_and_deaths(adapted: Adapted, daemon: Daemon) -> None:
    """More adapters than a step, and than the workers' memory, hold; five formats of them."""
    everything = ["", *SETTINGS]
    await check(adapted, daemon, everything)
    first, *others = names_of(daemon)
    assert (first, sorted(others)) == ("base", sorted(SETTINGS))
    hits = daemon.metric("vllm:prefix_cache_hits_total")
    await check(adapted, daemon, everything)
    assert daemon.metric("vllm:prefix_cache_hits_total") > hits
    for role in ("worker", "engine_core"):
        pending = asyncio.create_task(check(adapted, daemon, everything))
        await asyncio.to_thread(eventually, lambda: daemon.metric("vllm:num_requests_running"))
        os.kill(daemon.processes()[role].pid, signal.SIGKILL)
        await pending
        await check(adapted, daemon, everything)


async def test_adapters_that_are_loaded_replaced_and_unloaded(
    adapted: Adapted, tmp_path: Path
) -> None:
    """Over two front ends; 15 requests that run keep what they began with."""
    with Daemon(*flags(adapted, "--api-server-count", "2")) as daemon:
        path = shutil.copytree(adapted.adapters / "large", tmp_path / "mine")
        loaded = post(daemon, "/v1/load_lora_adapter", lora_name="mine", lora_path=str(path))
        assert loaded.text == "Success: LoRA adapter 'mine' added successfully."
        again = post(daemon, "/v1/load_lora_adapter", lora_name="mine", lora_path=str(path))
        assert again.status_code == 400
        for _ in range(8):  # connections reach either front end
            assert "mine" in names_of(daemon)
        async with client_of(daemon) as client:
            first = [await complete(client, "mine", prompt) for prompt in PROMPTS]
            adapted.assert_greedy("large", first)
            hits = daemon.metric("vllm:prefix_cache_hits_total")
            adapted.assert_greedy("large", [await complete(client, "large", p) for p in PROMPTS])
            assert daemon.metric("vllm:prefix_cache_hits_total") > hits, "equal contents share KV"

            running = [
                asyncio.create_task(complete_long(client, "mine", prompt)) for prompt in PROMPTS * 3
            ]
            in_all = len(running)
            await asyncio.to_thread(
                eventually, lambda: daemon.metric("vllm:num_requests_running") == in_all
            )
            shutil.rmtree(path)
            shutil.copytree(adapted.adapters / "other", path)
            fields = {"lora_name": "mine", "lora_path": str(path), "load_inplace": True}
            assert post(daemon, "/v1/load_lora_adapter", **fields).status_code == 200
            hits = daemon.metric("vllm:prefix_cache_hits_total")
            second = [await complete(client, "mine", prompt) for prompt in PROMPTS]
            adapted.assert_greedy("other", second)
            assert daemon.metric("vllm:prefix_cache_hits_total") == hits, "stale KV was found"
            for tokens, begun in zip(await asyncio.gather(*running), first * 3, strict=True):
                assert tokens[: len(begun)] == begun

            os.kill(daemon.processes()["engine_core"].pid, signal.SIGKILL)
            assert await complete(client, "mine", PROMPTS[2]) == second[2]
            unloaded = post(daemon, "/v1/unload_lora_adapter", lora_name="mine")
            assert unloaded.status_code == 200, unloaded.text
            for _ in range(8):
                gone = post(daemon, "/v1/completions", model="mine", prompt="a", max_tokens=1)
                assert gone.status_code == 404
            assert await complete(client, "", PROMPTS[0]) != second[0]


async def complete_long(client: httpx.AsyncClient, name: str, prompt: list[int]) -> list[int]:
    response = await client.post(
        "/v1/completions", json=body(prompt, model=name, max_tokens=300), timeout=300
    )
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


async def test_two_ranks(adapted: Adapted) -> None:
    with Daemon(*flags(adapted, "--tensor-parallel-size", "2")) as daemon:
        await check(adapted, daemon, ["", *SETTINGS])


async def test_reload_keeps_adapters_and_their_answers(adapted: Adapted, daemon: Daemon) -> None:
    path = str(adapted.adapters / "dora")
    assert post(daemon, "/v1/load_lora_adapter", lora_name="mine", lora_path=path).is_success
    os.kill(daemon.pid, signal.SIGHUP)
    assert await asyncio.to_thread(eventually, lambda: "reloaded after" in daemon.text)
    async with client_of(daemon) as client:
        adapted.assert_greedy("dora", [await complete(client, "mine", p) for p in PROMPTS])


async def test_an_adapter_that_becomes_nan_is_named_and_harms_no_other_request(
    adapted: Adapted, daemon: Daemon, tmp_path: Path
) -> None:
    """Tokens and log-probabilities of the others are those of a run without it."""
    from safetensors.torch import load_file, save_file

    path = shutil.copytree(adapted.adapters / "small", tmp_path / "huge")
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: it * 1e18 for name, it in tensors.items()}, file)  # q · k overflows
    loaded = post(daemon, "/v1/load_lora_adapter", lora_name="huge", lora_path=str(path))
    assert loaded.status_code == 200, loaded.text

    async def choices(client: httpx.AsyncClient, names: list[str], salt: str) -> list[Any]:
        asked = [
            body(prompt, model=name or "base", logprobs=3, cache_salt=salt)
            for prompt in PROMPTS
            for name in names
        ]
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=each) for each in asked)
        )
        found = []
        for each, answer in zip(asked, answers, strict=True):
            if each["model"] == "huge":
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (500, "model")
                assert "NaN or infinity with the adapter huge" in error["message"]
            else:
                found.append(answer.json()["choices"])
        return found

    async with client_of(daemon) as client:
        alone = await choices(client, ["", "small"], "1")
        assert await choices(client, ["huge", "", "huge", "small"], "2") == alone
    assert daemon.metric('tokend:lora_corrupted_requests{adapter="huge"}') == 2 * len(PROMPTS)
    assert daemon.metric("vllm:corrupted_requests_total") == 2 * len(PROMPTS)
    assert daemon.text.count("adapter huge: the logits of a request contain NaN or infinity") == 1


def test_adapters_that_cannot_be_loaded_harm_nothing(
    adapted: Adapted, daemon: Daemon, tmp_path: Path
) -> None:
    def refused(path: Path, *words: str) -> None:
        answer = post(daemon, "/v1/load_lora_adapter", lora_name="bad", lora_path=str(path))
        assert answer.status_code in (400, 404), answer.text
        for word in words:
            assert word in answer.json()["error"]["message"], answer.text

    refused(tmp_path / "nothing", "nothing")
    broken = shutil.copytree(adapted.adapters / "small", tmp_path / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"x" * 100)
    refused(broken, "adapter_model.safetensors")
    config = shutil.copytree(adapted.adapters / "large", tmp_path / "rank") / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 64', '"r": 65'))
    refused(config.parent, "rank")
    (gone,) = [post(daemon, "/v1/completions", model="../small", prompt="a", max_tokens=1)]
    assert gone.status_code == 404
    assert "bad" not in names_of(daemon)
    assert post(daemon, "/v1/completions", model="small", prompt="a", max_tokens=1).is_success
