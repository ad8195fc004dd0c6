"""Models of the user through the daemon: a Hugging Face folder, a GGUF file, and bad ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.daemon import Daemon
from tests.e2e.own_models import PROMPT, greedy, save_qwen3
from tests.e2e.reference import Reference, packaged_model
from tests.fakes.tiny_families import save_folder
from tests.fakes.tiny_wrapped import save_wrapped

pytestmark = pytest.mark.suite("daemons")


def test_a_hugging_face_folder_is_served(tmp_path: Path) -> None:
    folder = tmp_path / "my-qwen3"
    model = save_qwen3(folder)
    with Daemon(str(folder), "--dtype", "float32") as daemon:
        (served,) = httpx.get(f"{daemon.url}/v1/models").json()["data"]
        assert served["id"] == "my-qwen3"
        assert served["max_model_len"] == 512
        output = greedy(daemon, PROMPT, 40)
        messages = [{"role": "user", "content": "hi"}]
        chat = httpx.post(f"{daemon.url}/v1/chat/completions", json={"messages": messages})
        assert chat.status_code == 400
        assert "chat template" in chat.json()["error"]["message"]
    Reference(model, None).assert_greedy([(PROMPT, output)])


def test_the_sampling_defaults_of_a_folder_are_applied(tmp_path: Path) -> None:
    folder = tmp_path / "careful"
    save_qwen3(folder)

    def drawn(daemon: Daemon, **fields: Any) -> list[int]:
        body = {"prompt": PROMPT, "ignore_eos": True, "return_token_ids": True, "seed": 3}
        response = httpx.post(f"{daemon.url}/v1/completions", json=body | fields, timeout=60)
        return response.json()["choices"][0]["token_ids"]

    (folder / "generation_config.json").write_text(json.dumps({"top_k": 1, "typical_p": 0.9}))
    with Daemon(str(folder), "--dtype", "float32") as daemon:
        assert "sampling  top_k 1 (generation_config.json); not applied: typical_p" in daemon.text
        (card,) = httpx.get(f"{daemon.url}/v1/models").json()["data"]
        assert card["default_sampling_params"] == {"top_k": 1}
        likeliest = greedy(daemon, PROMPT, 16)
        assert drawn(daemon) == likeliest
        assert drawn(daemon, top_k=0) != likeliest
    daemon = Daemon(str(folder), "--override-generation-config", '{"top_p": 0}')
    assert daemon.wait_exit() == 2
    assert "--override-generation-config: top_p must be above 0" in daemon.text
    (folder / "generation_config.json").write_text(json.dumps({"temperature": -1}))
    daemon = Daemon(str(folder))
    assert daemon.wait_exit(60) == 2
    assert f"{folder}/generation_config.json: temperature must be between" in daemon.text


@pytest.mark.suite("models")
def test_the_language_model_of_a_folder_for_images_is_served(tmp_path: Path) -> None:
    """Chat with the template of the processor; an image is refused."""
    folder = tmp_path / "my-gemma"
    sizes = {"vocab_size": 49152, "max_position_embeddings": 512}
    reference = Reference(save_wrapped("gemma3", folder, **sizes), None)
    shutil.copy(Path(packaged_model().folder) / "tokenizer.json", folder)
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    with Daemon(str(folder), "--dtype", "float32") as daemon:
        assert " is not in the vocabulary of 49152) part is not loaded: text only" in daemon.text
        content = [{"type": "text", "text": "The capital "}, {"type": "text", "text": "of France"}]
        pairs = []
        for each in (content, "The capital of France"):
            request = {
                "messages": [{"role": "user", "content": each}],
                "max_tokens": 24,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            response = httpx.post(f"{daemon.url}/v1/chat/completions", json=request, timeout=60)
            assert response.status_code == 200, response.text
            answer = response.json()
            pairs.append((answer["prompt_token_ids"], answer["choices"][0]["token_ids"]))
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}
        request["messages"] = [{"role": "user", "content": [*content, image]}]
        refused = httpx.post(f"{daemon.url}/v1/chat/completions", json=request, timeout=60)
        assert refused.status_code == 400
        assert "text only" in refused.json()["error"]["message"]
    assert pairs[0] == pairs[1]
    reference.assert_greedy(pairs[:1])


def test_a_gguf_file_is_served_under_a_chosen_name(tmp_path: Path) -> None:
    link = tmp_path / "some-model.gguf"
    link.symlink_to(packaged_model().source)
    with Daemon(str(link), "--served-model-name", "mine", "--max-model-len", "64") as daemon:
        (served,) = httpx.get(f"{daemon.url}/v1/models").json()["data"]
        assert served["id"] == "mine"
        assert served["max_model_len"] == 64
        assert len(greedy(daemon, PROMPT[:20], 44)) == 44


def test_a_missing_model_is_one_clear_error() -> None:
    daemon = Daemon("/nowhere/model.gguf")
    assert daemon.wait_exit() == 2
    assert "/nowhere/model.gguf" in daemon.text
    assert "Traceback" not in daemon.text


def with_settings(**settings: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    return change


def without_tensor(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        save_file(tensors, folder / "model.safetensors")

    return change


EXPERT = "model.layers.2.mlp.experts.3.down_proj.weight"
BAD_MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "unknown architecture": (
        with_settings(architectures=["OtherForCausalLM"]),
        "OtherForCausalLM is not supported",
    ),
    "unknown rope kind": (
        with_settings(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        "rope_type = 'spiral'",
    ),
    "remote code": (
        with_settings(auto_map={"AutoModelForCausalLM": "modeling.Own"}),
        "auto_map names code of the model",
    ),
    "missing expert": (without_tensor(EXPERT), f"tensor {EXPERT} of shape [64, 64] is missing"),
    "other shapes": (
        with_settings(moe_intermediate_size=48),
        "has shape [64, 64], the configuration asks for [48, 64]",
    ),
}


@pytest.mark.suite("settings")
@pytest.mark.parametrize("kind", BAD_MODELS)
def test_a_bad_model_is_one_clear_error_before_a_weight_is_read(kind: str, tmp_path: Path) -> None:
    change, message = BAD_MODELS[kind]
    save_folder("Qwen3MoeForCausalLM", tmp_path)
    change(tmp_path)
    daemon = Daemon(str(tmp_path), "--dtype", "float32")
    assert daemon.wait_exit(60.0) != 0
    assert message in daemon.text
    assert "Traceback" not in daemon.text
    assert "restart" not in daemon.text
    assert "INFO worker 0: weights:" not in daemon.text
