"""Images beside drafts, states, experts and transformers' code, against transformers in float32."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from engine_core.request import Request
from proto.errors import ConfigError
from tests.fakes.devices import CPU
from tests.fakes.drafted_engine import joined
from tests.fakes.drafts import SyntheticDrafts
from tests.fakes.events import num_cached_tokens
from tests.fakes.tiny_heads import head_config, head_tensors, prepare_head, save_head
from tests.fakes.tiny_vision import GRIDS
from tests.worker.test_images import BLOCK, Case
from worker.loaded_model import LoadedDraft, LoadedModel
from worker.models.decoder import Decoder
from worker.plan.draft_settings import draft_cache
from worker.speculation.eagle_head import load_head, read_head

pytestmark = pytest.mark.suite("long")

TEXTS: Final[dict[str, dict[str, Any]]] = {
    "lfm2": {
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
    },
    "falcon_h1": {
        "model_type": "falcon_h1",
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_chunk_size": 16,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
"""Language models for a Llava: two with states, and a mixture of experts."""


def check_engine(case: Case, loaded: LoadedModel, **settings: Any) -> None:
    """Compare answers to a prompt in chunks, to the same from the cache, and to another image."""
    harness = case.engine(loaded, max_num_batched_tokens=50, **settings)
    expected = case.expected()
    (first,) = case.add(harness)
    harness.run()
    (again,) = case.add(harness)
    harness.run()
    assert harness.tokens_of(first) == harness.tokens_of(again) == expected
    outputs = harness.outputs[again.request_id, 0]
    assert max(filter(None, map(num_cached_tokens, outputs))) >= BLOCK
    case.another_first_image()
    (other,) = case.add(harness)
    harness.run()
    assert harness.tokens_of(other) == case.expected()


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_a_language_model_on_the_code_of_transformers(name: str, tmp_path: Path) -> None:
    case = Case(name, tmp_path)
    case.model_settings = {"model_impl": "transformers"}
    loaded = case.load()
    assert "Transformers" in type(loaded.model.spec).__name__
    check_engine(case, loaded)


def test_three_positions_are_refused_on_the_code_of_transformers(tmp_path: Path) -> None:
    case = Case("qwen3_vl", tmp_path)
    case.model_settings = {"model_impl": "transformers"}
    with pytest.raises(ConfigError, match="images of Qwen3VLForConditionalGeneration have three"):
        case.load()


@pytest.mark.parametrize("text", ["lfm2", "falcon_h1"])
def test_a_language_model_with_states(text: str, tmp_path: Path) -> None:
    case = Case("llava", tmp_path, text_config=TEXTS[text])
    loaded = case.load()
    assert loaded.layout.states is not None
    check_engine(case, loaded)


def test_the_experts_of_image_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    """In chunks, and from the cache."""
    case = Case("llava", tmp_path, text_config=TEXTS["qwen3_moe"])
    case.model_settings = {"enable_return_routed_experts": True}
    harness = case.engine(case.load(), max_num_batched_tokens=50)
    answers = []
    for _ in range(2):
        (request,) = case.add(harness, return_routed_experts=True)
        harness.run()
        answers.append(joined(harness.outputs[request.request_id, 0]))
    assert max(answers[1]["cached"]) >= BLOCK
    chosen: list[torch.Tensor] = []
    for module in case.model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(
                lambda _, arguments: chosen.append(arguments[1].sort(1).values)
            )
    inputs = case.inputs
    tokens = torch.tensor([answers[0]["tokens"][:-1]])
    inputs["input_ids"] = torch.cat((inputs["input_ids"], tokens), dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.inference_mode():
        case.model(**inputs, use_cache=False)
    expected = torch.stack(chosen, dim=1)
    for answer in answers:
        assert answer["tokens"] == answers[0]["tokens"]
        rows = [answer["experts"][position] for position in range(len(expected))]
        found = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
        assert torch.equal(found.view(expected.shape).sort(-1).values.long(), expected)


@pytest.mark.parametrize(
    ("name", "has_draft_model"),
    [
        *((name, False) for name in ("llava", "smolvlm", *GRIDS)),
        *((name, True) for name in ("llava", "smolvlm", "qwen2_5_vl", "qwen3_vl_moe")),
    ],
)
def test_drafts_change_no_token(name: str, has_draft_model: bool, tmp_path: Path) -> None:
    """Some are accepted, and some are not. A draft model knows nothing of the images."""
    case = Case(name, tmp_path)
    loaded, num_outputs = case.load(), 40
    expected = case.expected(num_outputs)

    def answer(request: Request, num_tokens: int) -> list[int]:
        first = request.num_output_tokens
        return expected[first : first + num_tokens] or [5]

    drafting = SyntheticDrafts(0.4, answer, vocab_size=case.prepared.vocab_size)
    drafting.has_draft_model = has_draft_model
    if has_draft_model:
        loaded = with_draft(loaded)
    harness = case.engine(loaded, drafting=drafting, max_num_batched_tokens=70)
    requests = []
    for _ in range(3):
        requests += case.add(harness, num_outputs)
        harness.step()
    harness.run()
    assert [harness.tokens_of(each) for each in requests] == [expected] * 3
    assert 10 < drafting.num_accepted < drafting.num_drafted
    assert (drafting.num_proposed > 0) is has_draft_model


def with_draft(loaded: LoadedModel) -> LoadedModel:
    """Return a model whose language model drafts, too."""
    assert isinstance(loaded.model, Decoder)
    layout, geometry = draft_cache(loaded.model.spec, torch.float32)
    draft = LoadedDraft(
        method="draft_model",
        model=loaded.model,
        weight_format=loaded.weight_format,
        layout=layout,
        geometry=geometry,
        max_model_len=512,
        weights_sample="",
        attention_kernels=loaded.attention_kernels,
    )
    return replace(loaded, draft=draft)


@pytest.mark.parametrize(("name", "method"), [("llava", "eagle3"), ("gemma3", "eagle")])
def test_a_head_of_eagle_changes_no_token(name: str, method: str, tmp_path: Path) -> None:
    """It reads the target's states of image tokens, and is asked beside drafts of another kind."""
    case = Case(name, tmp_path)
    loaded, num_outputs = case.load(), 40
    expected = case.expected(num_outputs)

    def answer(request: Request, num_tokens: int) -> list[int]:
        first = request.num_output_tokens
        return expected[first : first + num_tokens] or [5]

    drafting = SyntheticDrafts(0.4, answer, vocab_size=case.prepared.vocab_size)
    drafting.has_draft_model = True
    loaded = with_head(loaded, method, tmp_path / "head")
    harness = case.engine(loaded, drafting=drafting, max_num_batched_tokens=70)
    requests = []
    for _ in range(3):
        requests += case.add(harness, num_outputs)
        harness.step()
    harness.run()
    assert [harness.tokens_of(each) for each in requests] == [expected] * 3
    assert 10 < drafting.num_accepted < drafting.num_drafted
    assert drafting.num_proposed > 0


def with_head(loaded: LoadedModel, method: str, folder: Path) -> LoadedModel:
    """Return a model with a random head."""
    target = loaded.model
    assert isinstance(target, Decoder)
    sizes = {"hidden_size": target.spec.hidden_size, "vocab_size": target.spec.vocab_size}
    config = head_config(method, max_position_embeddings=512, **sizes)
    draft = prepare_head(save_head(folder, config, head_tensors(method, config)))
    spec = read_head(method, draft, target.spec, CPU)
    head = load_head(draft, spec, target, torch.float32, CPU, loaded.weight_format)
    layout, geometry = spec.cache(torch.float32)
    return replace(
        loaded,
        draft=LoadedDraft(
            method=method,
            model=head,
            weight_format=loaded.weight_format,
            layout=layout,
            geometry=geometry,
            max_model_len=512,
            weights_sample="",
            attention_kernels=loaded.attention_kernels,
        ),
    )
