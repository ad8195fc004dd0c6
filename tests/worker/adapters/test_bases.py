"""Adapters on quantised models and under drafts."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig

from proto.messages.prepared_model import PreparedModel
from proto.messages.scheduler_output import SchedulerOutput
from tests.fakes.adapters import SEVEN, Served, make_adapter, merged
from tests.fakes.dense_attention import DenseAttention, logits_in_chunks
from tests.fakes.devices import CPU, REFERENCE
from tests.fakes.gguf_files import write
from tests.fakes.lookahead_runner import LookaheadRunner
from tests.fakes.prepared_models import gguf_index, prepare, prepare_checkpoint, prepared_file
from tests.fakes.quantised_checkpoints import awq, quantise_folder
from tests.fakes.ranks import Ranks
from tests.fakes.real_engine import engine_for, load
from tests.fakes.step_messages import StepMessages
from tests.fakes.tiny_checkpoints import config_in_blocks, tiny_model
from tests.fakes.tiny_families import save_gguf
from tests.fakes.tiny_ggufs import SIZES, config_of, tiny
from tests.worker.adapters.test_formats import NEAR, write_gguf
from tests.worker.adapters.test_steps import (
    EXPERTS,
    TIE,
    Adapting,
    Model,
    prompts,
    runner_with,
    serve,
)
from tests.worker.speculation.test_draft_model import with_drafter
from worker.attention.kv_cache import kv_layout
from worker.cpu.formats import Bf16Format, Int8Format, PackedFormat, RotatedFormat
from worker.cpu.kernels import Kernels
from worker.loader.formats import DenseFormat, WeightFormat
from worker.step.routed_experts import record_experts

TOKENS = torch.randint(0, 60, (30,), generator=torch.Generator().manual_seed(7))
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": SEVEN, "r": 8},
    "dora": {"target_modules": SEVEN, "use_dora": True},
}


def gguf_model(folder: Path) -> tuple[PreparedModel, Any]:
    """A quantised Llama, and the same numbers in transformers."""
    with torch.no_grad():
        model, tensors = tiny("Q5_0", LlamaConfig(**SIZES), True, {"down_proj": "Q8_0"})
    write(folder / "model.gguf", tensors)
    config = config_of(model.config)
    return prepare(folder / "prepared", config, gguf_index(folder / "model.gguf")), model


def awq_model(folder: Path) -> tuple[PreparedModel, Any]:
    """The same of a Hugging Face folder with AWQ's codes."""
    model = tiny_model(config_in_blocks("llama"))
    model.save_pretrained(folder)
    numbers = quantise_folder(folder, awq(32))
    model.load_state_dict(numbers, strict=False)
    return prepare_checkpoint(folder, folder / "prepared"), model


def logits_of(served: Served, number: int) -> torch.Tensor:
    with served.running([number] * len(TOKENS)):
        return logits_in_chunks(served.decoder, TOKENS, 30)


@torch.no_grad()
def oracle(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(TOKENS[None]).logits[0]
    return logits


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("base", [gguf_model, awq_model])
def test_quantised_bases(base: Any, settings: str, tmp_path: Path) -> None:
    """In float32: norms of DoRA are those of the quantised numbers."""
    prepared, model = base(tmp_path)
    path = make_adapter(model, tmp_path / "adapter", **SETTINGS[settings])
    served = Served(prepared)
    served.load(path, 1)
    wanted = oracle(merged(model, path))
    assert (wanted - oracle(model)).abs().max() > 0.3, "a difference would not be visible"
    assert (logits_of(served, 1) - wanted).abs().max() < NEAR


def test_a_file_of_llama_cpp_on_a_file_of_llama_cpp(tmp_path: Path) -> None:
    prepared, model = gguf_model(tmp_path)
    path = make_adapter(model, tmp_path / "adapter", r=4)
    served = Served(prepared)
    served.load(write_gguf(tmp_path / "adapter.gguf", path), 1)
    assert (logits_of(served, 1) - oracle(merged(model, path))).abs().max() < NEAR


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}], ids=["plain", "dora"])
def test_value_heads_of_a_file_are_in_another_order_than_those_of_an_adapter(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Of Qwen 3.5: on one rank, and on three, of which the first has two key heads."""
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 12}
    path, model = save_gguf("Qwen3_5ForCausalLM", tmp_path, **heads)
    targets = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=targets, **settings)
    prepared = prepared_file(path)
    wanted = oracle(merged(model, adapter))
    assert (wanted - oracle(model)).abs().max() > 0.3, "a difference would not be visible"
    served = Served(prepared)
    served.load(adapter, 1)
    assert (logits_of(served, 1) - wanted).abs().max() < NEAR
    with Ranks(3) as ranks:
        of_ranks = [Served(prepared, group=group) for group in ranks.groups]
        for each in of_ranks:
            each.load(adapter, 1)
        found = ranks.run_on_all(lambda rank: logits_of(of_ranks[rank], 1))
    assert all((each - wanted).abs().max() < NEAR for each in found)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("form", ["packed", "int8", "bf16"])
def test_products_of_bytes(form: str, settings: str, kernels: Kernels, tmp_path: Path) -> None:
    """The error beside merged weights is that of the same format without an adapter."""
    prepared, model = gguf_model(tmp_path)
    path = make_adapter(model, tmp_path / "adapter", **SETTINGS[settings])
    dense = DenseFormat(torch.float32)
    weights: WeightFormat = PackedFormat(kernels, dense, torch.float32)
    if form == "int8":
        blocks = Int8Format(kernels, dense, torch.float32)
        weights = RotatedFormat(blocks, dense, kernels)
    dtype = torch.bfloat16 if form == "bf16" else torch.float32
    if form == "bf16":
        weights = Bf16Format(kernels)
    served = Served(prepared, dtype, weights)
    served.load(path, 1)
    error = (logits_of(served, 1) - oracle(merged(model, path))).abs().mean()
    assert error < 2 * (logits_of(served, 0) - oracle(model)).abs().mean()


def test_drafts_are_verified_with_the_adapter(tmp_path: Path) -> None:
    """Right drafts are accepted, a wrong one ends them, beside another sequence's."""
    model = Model(tmp_path, (4, 8))
    served = model.served()
    prompts = {1: list(range(20, 31)), 2: list(range(50, 57))}

    def adapted(step: SchedulerOutput) -> SchedulerOutput:
        new = [msgspec.structs.replace(each, lora_int_id=each.seq_id) for each in step.new_requests]
        return msgspec.structs.replace(step, new_requests=new)

    def first_step() -> tuple[Any, StepMessages, list[list[int]]]:
        groups = kv_layout(served.decoder.spec.windows).num_groups
        messages = StepMessages(groups, 16)
        runner = runner_with(served, 1 + 2 * groups * 16)
        output = runner.execute(adapted(messages.next_step(prompts, params={"max_tokens": 20})))
        return runner, messages, output.sampled_token_ids

    runner, messages, found = first_step()
    outputs = [list(tokens) for tokens in found]
    for _ in range(4):
        more = runner.execute(messages.next_step()).sampled_token_ids
        for tokens, new in zip(outputs, more, strict=True):
            tokens += new
    assert outputs[0] != outputs[1]
    runner, messages, _ = first_step()
    wrong = (outputs[1][2] + 1) % 96
    drafts = {1: outputs[0][1:4], 2: [outputs[1][1], wrong, 5]}
    verified = runner.execute(messages.next_step(drafts=drafts)).sampled_token_ids
    assert verified == [outputs[0][1:5], outputs[1][1:3]]


def experts_of(served: Served, ids: list[int]) -> torch.Tensor:
    """Return the experts of a step whose tokens have these adapters, int64 [mixtures, T, top_k]."""
    record = record_experts(served.decoder, len(ids), CPU.torch_device)
    attention = DenseAttention(served.decoder.spec)
    attention.begin_chunk(len(ids))
    with served.running(ids):
        served.decoder.forward(TOKENS, torch.arange(len(TOKENS)), attention)
    return record.long().sort(2).values


def test_experts_are_those_that_the_adapter_leads_to(tmp_path: Path) -> None:
    """Of a step with one adapter, and of rows with and without one as on the reference device."""
    targets = {"target_modules": SEVEN[:4], "target_parameters": EXPERTS}
    model = Model(tmp_path, (4,), "qwen3moe", **targets)
    oracle_of, chosen = merged(model.own, model.paths[0]), list[torch.Tensor]()
    for module in oracle_of.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(
                lambda module, given: chosen.append(given[1].sort(1).values)
            )
    oracle(oracle_of)
    served = model.served()
    found = experts_of(served, [1] * len(TOKENS))
    assert torch.equal(found, torch.stack(chosen))
    assert not torch.equal(found, experts_of(served, [0] * len(TOKENS)))
    mixed = [0, 1, 1] * (len(TOKENS) // 3)
    assert torch.equal(experts_of(served, mixed), experts_of(model.served(device=REFERENCE), mixed))


def test_a_draft_model_proposes_without_the_adapter(tmp_path: Path) -> None:
    """What the model itself goes on with, though requests have adapters; answers stay the same."""
    model = Model(tmp_path, (4, 8))
    served, requests = model.served(), prompts((1, 0, 2))
    expected, _ = serve(served, requests)
    harness, blocks = engine_for(served.decoder, 400)
    runner = runner_with(served, blocks)
    with_drafter(runner, load(model.prepared))
    lookahead = LookaheadRunner(runner)
    harness.runner = Adapting(lookahead, requests)  # type: ignore[assignment]
    rows = [
        harness.add(prompt, len(tokens), ignore_eos=True, temperature=0.0)[0]
        for (prompt, _), tokens in zip(requests, expected, strict=True)
    ]
    harness.run()
    assert [harness.tokens_of(row) for row in rows] == expected
    drafts = [(known, draft) for _, known, draft, _ in lookahead.proposals if draft]
    assert len(drafts) > 6
    for known, draft in drafts:
        logits = model.own(torch.tensor([known + draft])).logits[0, len(known) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(draft)[:, None])[:, 0]
        assert (logits.max(1).values - chosen).max() < TIE
