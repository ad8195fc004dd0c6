"""Images through the daemon: greedy tokens are those of transformers on the same weights.

One and several images, between texts, in a second turn, in chunks, from the caches, and after the
death of a worker and of the engine; beside adapters, reloads, KV in host memory and on a disk, and
KV of 8 bits.
"""

import base64
import io
import json
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image

from tests.e2e.daemon import Daemon, eventually
from tests.fakes.adapters import SEVEN, make_adapter, merged
from tests.fakes.tiny_vision import (
    END_ID,
    VISION_MODELS,
    random_image,
    read_vision_model,
    save_vision_model,
    vision_processor,
)

pytestmark = pytest.mark.suite("images")

NUM_TOKENS = 8
FLAGS = ("--dtype", "float32", "--max-model-len", "512", "--no-enable-log-requests")


def data_uri(image: Image.Image) -> str:
    encoded = io.BytesIO()
    image.save(encoded, "PNG")
    return "data:image/png;base64," + base64.b64encode(encoded.getvalue()).decode()


def message(*content: str | Image.Image, role: str = "user") -> dict[str, Any]:
    """Return a message of texts and images for the API."""
    parts = [
        {"type": "text", "text": each}
        if isinstance(each, str)
        else {"type": "image_url", "image_url": {"url": data_uri(each)}}
        for each in content
    ]
    return {"role": role, "content": parts}


@dataclass
class Served:
    """A daemon, and the same model in transformers."""

    name: str
    model: Any
    daemon: Daemon

    def answer(self, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """Return a greedy answer. fields: others of the request; None leaves one out."""
        body = {
            "messages": list(messages),
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        body = {name: value for name, value in (body | fields).items() if value is not None}
        response = httpx.post(f"{self.daemon.url}/v1/chat/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def inputs(self, *contents: Sequence[str | Image.Image]) -> Any:
        """Return what transformers makes of messages, alternately of the user and the assistant."""
        prompt, images = "<s>", []
        for number, content in enumerate(contents):
            prompt += ("user", "assistant")[number % 2] + ":"
            for each in content:
                prompt += each if isinstance(each, str) else VISION_MODELS[self.name].placeholder
                images += [] if isinstance(each, str) else [each]
            prompt += "<|end|>"
        prompt += "assistant:"
        return vision_processor(self.name)(
            images=[images] if images else None,
            text=[prompt],
            return_tensors="pt",
            add_special_tokens=False,
        )

    def assert_greedy(self, answer: dict[str, Any], *contents: Sequence[str | Image.Image]) -> None:
        """Check the tokens of an answer to messages, alternately of the user and the assistant."""
        batch = self.inputs(*contents)
        tokens = batch["input_ids"][0].tolist()
        assert answer["prompt_token_ids"] == tokens
        assert answer["usage"]["prompt_tokens"] == len(tokens)
        with torch.inference_mode():
            output = self.model.generate(
                **batch, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
            )
        assert answer["choices"][0]["token_ids"] == output[0, len(tokens) :].tolist()


OTHERS = ("qwen2_vl", "qwen3_vl_moe", "qwen3_5_moe")
"""Models that are much like another one; tests/worker/test_images.py has them."""


@pytest.fixture(scope="module", params=[each for each in VISION_MODELS if each not in OTHERS])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("model") / "model"
    save_vision_model(request.param, folder)
    with Daemon(*FLAGS, "--model", str(folder)) as daemon:
        yield Served(request.param, read_vision_model(folder), daemon)


def test_images_between_texts(served: Served) -> None:
    first, second = random_image(1, 40, 30), random_image(2, 20, 50)
    for content in (("see", first), (first, "see"), ("a", first, "b", second, "c"), ("text",)):
        served.assert_greedy(served.answer(message(*content)), content)


def test_the_next_turn_finds_the_image_in_the_caches(served: Served) -> None:
    first = ("look", random_image(3, 33, 44))
    served.assert_greedy(served.answer(message(*first)), first)
    hits = served.daemon.metric("vllm:prefix_cache_hits_total")
    second = ("and", random_image(4, 30, 30))
    messages = [message(*first), {"role": "assistant", "content": "a"}, message(*second)]
    served.assert_greedy(served.answer(*messages), first, ("a",), second)
    assert served.daemon.metric("vllm:prefix_cache_hits_total") > hits
    other = ("look", random_image(5, 33, 44))
    served.assert_greedy(served.answer(message(*other)), other)


def test_choices_share_the_image_and_are_the_same_from_the_caches(served: Served) -> None:
    content = ("see", random_image(6, 25, 25))
    sampled = {"n": 3, "temperature": 1.0, "seed": 5}
    first, again = (served.answer(message(*content), **sampled) for _ in range(2))
    tokens = [choice["token_ids"] for choice in first["choices"]]
    assert tokens == [choice["token_ids"] for choice in again["choices"]]
    assert len(set(map(tuple, tokens))) > 1
    served.assert_greedy(served.answer(message(*content)), content)


@pytest.mark.parametrize("role", ["worker", "engine_core"])
def test_an_answer_goes_on_after_a_death(served: Served, role: str) -> None:
    content = ("dies", random_image(7, 30, 20))
    before = served.answer(message(*content))
    restarts = served.daemon.metric("tokend:restarts_total")
    os.kill(served.daemon.processes()[role].pid, signal.SIGKILL)
    after = served.answer(message(*content))
    assert after["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]
    served.assert_greedy(after, content)
    eventually(lambda: served.daemon.metric("tokend:restarts_total") > restarts)


def test_beams_are_those_of_transformers(served: Served) -> None:
    content = ("see", random_image(8, 40, 30), "it")
    search = {"temperature": None, "ignore_eos": None, "use_beam_search": True, "n": 3}
    choices = served.answer(message(*content), **search)["choices"]
    batch = served.inputs(content)
    with torch.inference_mode():
        expected = served.model.generate(
            **batch,
            max_new_tokens=NUM_TOKENS,
            num_beams=3,
            num_return_sequences=3,
            do_sample=False,
            eos_token_id=END_ID,
            pad_token_id=END_ID,
        )
    length = batch["input_ids"].shape[1]
    outputs = [each[length:].tolist() for each in expected]
    outputs = [each[: each.index(END_ID) + 1] if END_ID in each else each for each in outputs]
    assert [each["token_ids"] for each in choices] == outputs


def test_logprobs_of_a_prompt(served: Served) -> None:
    """Image tokens have them, too; the second time the prompt is in the prefix cache."""
    content = ("see", random_image(9, 40, 30), "it")
    for _ in range(2):
        found = served.answer(message(*content), prompt_logprobs=0)["prompt_logprobs"]
        batch = served.inputs(content)
        tokens = batch["input_ids"]
        with torch.inference_mode():
            logprobs = served.model(**batch).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, tokens[0, 1:, None])[:, 0]
        assert found[0] is None
        pairs = zip(found[1:], tokens[0, 1:].tolist(), strict=True)
        given = [each[str(token)]["logprob"] for each, token in pairs]
        assert (torch.tensor(given) - expected).abs().max() < 1e-3


def reload(daemon: Daemon) -> None:
    times = daemon.text.count("tokend reloaded after")
    daemon.process.send_signal(signal.SIGHUP)
    assert eventually(lambda: daemon.text.count("tokend reloaded after") > times, 60)


def test_an_adapter_and_a_reload(tmp_path: Path) -> None:
    """Two front ends; the next engine serves images, and the adapter with them, as the first did.

    An adapter of the language model has its names in the whole model. Another one also changes the
    vision part, so that each has the images for itself.
    """
    model = save_vision_model("smolvlm", tmp_path / "model")
    modules = rf".*text_model.*\.({'|'.join(SEVEN)})"
    adapter = make_adapter(model, tmp_path / "adapter", size=2.0, target_modules=modules)
    whole = make_adapter(model, tmp_path / "whole", seed=2)
    references = {"base": model, "own": merged(model, adapter), "whole": merged(model, whole)}
    flags = ("--served-model-name", "base", "--enable-lora", "--lora-modules", f"own={adapter}")
    flags += (f"whole={whole}", "--model", str(tmp_path / "model"), "--api-server-count", "2")
    content = ("see", random_image(10, 40, 30))
    with Daemon(*FLAGS, *flags) as daemon:
        for is_reloaded in (False, True):
            if is_reloaded:
                reload(daemon)
            for _ in range(4):  # of either front end
                answers = {}
                for name, reference in references.items():
                    served = Served("smolvlm", reference, daemon)
                    answer = served.answer(message(*content), model=name)
                    served.assert_greedy(answer, content)
                    answers[name] = tuple(answer["choices"][0]["token_ids"])
                assert len({*answers.values()}) == len(references)


@pytest.mark.parametrize("medium", ["host memory", "disk"])
def test_kv_of_an_image_comes_back(medium: str, tmp_path: Path) -> None:
    """In a pool of one prompt, whose images change; also after a restart, from the disk."""
    model = save_vision_model("llava", tmp_path / "model")
    on_disk = {"spec_name": "DiskOffloadingSpec", "disk_path": str(tmp_path / "disk")}
    on_disk |= {"disk_bytes_to_use": 1 << 28}
    media = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": on_disk if medium == "disk" else {"cpu_bytes_to_use": 1 << 27},
    }
    flags = (*FLAGS, "--model", str(tmp_path / "model"), "--async-scheduling")
    flags += ("--num-gpu-blocks-override", "34", "--kv-transfer-config", json.dumps(media))
    contents = [("see", random_image(number, 40, 30), "text " * 60) for number in range(11, 15)]
    for num_loads in (4, 8) if medium == "disk" else (4,):
        with Daemon(*flags) as daemon:
            served = Served("llava", model, daemon)
            for content in contents * 2:
                served.assert_greedy(served.answer(message(*content)), content)
            assert daemon.metric("vllm:kv_offload_load_size_count") >= num_loads
            assert daemon.metric("tokend:kv_offload_failures_total") == 0


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("smolvlm", ("--dtype", "bfloat16", "--batch-invariant")),
        ("gemma3", ("--dtype", "float32", "--kv-cache-dtype", "int8")),
    ],
    ids=["batch-invariant", "int8 KV"],
)
def test_answers_are_the_same_alone_in_a_batch_and_from_the_cache(
    name: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Images are encoded again, beside others: the workers keep the output of one."""
    save_vision_model(name, tmp_path / "model")
    images = [random_image(number, 40 + number, 30) for number in range(8)]
    messages = [
        message("see", each, "and", *["text"] * number) for number, each in enumerate(images)
    ]
    fields = {"max_tokens": 24, "logprobs": True}
    flags += ("--encoder-cache-size", "45")
    with Daemon(*FLAGS, *flags, "--model", str(tmp_path / "model")) as daemon:
        served = Served(name, None, daemon)
        rounds = [[served.answer(each, **fields) for each in messages]]
        for _ in range(2):
            with ThreadPoolExecutor(len(messages)) as threads:
                rounds.append(
                    list(threads.map(lambda each: served.answer(each, **fields), messages))
                )
            for cache in ("prefix", "encoder"):
                assert httpx.post(f"{daemon.url}/reset_{cache}_cache").status_code == 200
        assert daemon.metric("vllm:prefix_cache_hits_total") > 0
    tokens = [[each["choices"][0]["token_ids"] for each in answers] for answers in rounds]
    assert tokens[1:] == [tokens[0]] * 2
    assert len(set(map(tuple, tokens[0]))) > 1
    if "--batch-invariant" in flags:
        logprobs = [[each["choices"][0]["logprobs"] for each in answers] for answers in rounds]
        assert logprobs[1:] == [logprobs[0]] * 2


def test_without_images_the_language_model_is_served_alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("text") / "model"
    save_vision_model("smolvlm", folder)
    limit = ("--limit-mm-per-prompt", '{"image": 0}')
    with Daemon(*FLAGS, "--model", str(folder), *limit) as daemon:
        assert "vision part is not loaded: text only" in daemon.text
        served = Served("smolvlm", read_vision_model(folder), daemon)
        served.assert_greedy(served.answer(message("text")), ("text",))
        body = {"messages": [message(random_image(1, 20, 20))]}
        refused = httpx.post(f"{daemon.url}/v1/chat/completions", json=body)
        assert refused.status_code == 400
        assert "image_url" in refused.json()["error"]["message"]
