"""Which models can draft for which: the others are refused by name before a weight is read."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from proto.codec import changed
from proto.errors import ConfigError
from proto.messages.prepared_model import PreparedModel
from proto.settings.config import ServeConfig
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.simulated_gpu import device_of
from tests.fakes.tiny_checkpoints import save_tiny
from tests.worker.test_memory_plan import config_of, cpu_of
from worker.loaded_model import load
from worker.parallel.group import RankGroup
from worker.plan.draft_settings import require_draft_model
from worker.plan.memory_plan import plan_memory
from worker.plan.memory_refusal import refusal
from worker.speculation.draft_model import TOKEN_BYTES

TOKENS = {f"t{number}": number for number in range(96)}


def write_tokenizer(prepared: PreparedModel, **changes: Any) -> None:
    document = {"model": {"type": "BPE", "vocab": TOKENS}, "added_tokens": []} | changes
    Path(prepared.folder, "tokenizer.json").write_text(json.dumps(document))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreparedModel]:
    root = tmp_path_factory.mktemp("models")
    found = {}
    for name in ("llama", "qwen3", "gemma3", "deepseek3", "qwen3next", "mistral-window"):
        folder = root / name
        folder.mkdir()
        save_tiny(name, folder)
        found[name] = changed(
            prepare_checkpoint(folder, folder / "prepared"), eos_token_ids=(2,), name=name
        )
        write_tokenizer(found[name])
    return found


def settings(*flags: str, **keys: Any) -> ServeConfig:
    text = json.dumps({"method": "draft_model", "model": "draft"} | keys)
    return config_of("--speculative-config", text, *flags)


@pytest.mark.parametrize(("target", "draft"), [("llama", "qwen3"), ("deepseek3", "gemma3")])
def test_models_of_other_families_can_draft(
    models: dict[str, PreparedModel], target: str, draft: str
) -> None:
    config = settings()
    require_draft_model(config, models[target], models[draft], cpu_of(config))


@pytest.mark.parametrize(
    ("target", "draft", "flags", "keys", "message"),
    [
        (
            "llama",
            "qwen3",
            (),
            {"draft_tensor_parallel_size": 2},
            "draft_tensor_parallel_size must",
        ),
        ("llama", "qwen3", (), {"max_model_len": 129}, "max_model_len 129 is more than the 128"),
        ("llama", "qwen3", ("--runner", "pooling"), {}, "its outputs are pooled"),
        ("llama", "qwen3", (), {"method": "eagle"}, "a head has one layer"),
        (
            "llama",
            "qwen3",
            ("--model-impl", "transformers"),
            {"method": "eagle"},
            "runs on transformers' code, which has no heads",
        ),
        ("qwen3next", "llama", (), {}, "Qwen3NextForCausalLM has recurrent states"),
        ("llama", "qwen3next", (), {}, "layers with a recurrent state"),
        ("mistral-window", "llama", (), {}, "all layers of mistral-window have windows"),
        (
            "llama",
            "qwen3",
            ("--tensor-parallel-size", "8"),
            {"draft_tensor_parallel_size": 4},
            "--tensor-parallel-size 8",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    models: dict[str, PreparedModel],
    target: str,
    draft: str,
    flags: tuple[str, ...],
    keys: dict[str, Any],
    message: str,
) -> None:
    config = settings(*flags, **keys)
    with pytest.raises(ConfigError, match=message) as refused:
        require_draft_model(config, models[target], models[draft], cpu_of(config))
    assert refused.value.param == "speculative_config"
    assert str(refused.value).startswith("--speculative-config: ")


def test_ranks_on_gpus_are_refused(models: dict[str, PreparedModel]) -> None:
    device = device_of(free=1 << 30)
    require_draft_model(settings(), models["llama"], models["qwen3"], device)
    config = settings("--tensor-parallel-size", "2")
    with pytest.raises(ConfigError, match="--tensor-parallel-size 1 is needed, got 2"):
        require_draft_model(config, models["llama"], models["qwen3"], device)


@pytest.mark.parametrize("flags", [("--batch-invariant",), ("--attention-backend", "flashinfer")])
def test_kernels_that_a_gpu_lacks_for_the_draft_model_are_named(
    models: dict[str, PreparedModel], flags: tuple[str, ...]
) -> None:
    config = settings(*flags, "--dtype", "bfloat16", "--max-model-len", "64")
    with pytest.raises(ConfigError, match="kernels for heads of") as refused:
        plan_memory(config, models["llama"], device_of(free=1 << 30), draft=models["qwen3"])
    assert str(refused.value).startswith("--speculative-config: model qwen3: ")


def test_a_model_without_a_head_is_refused(models: dict[str, PreparedModel]) -> None:
    config, encoder = settings(), changed(models["qwen3"], generates=False)
    with pytest.raises(ConfigError, match="does not generate"):
        require_draft_model(config, models["llama"], encoder, cpu_of(config))


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, False),
        (
            {"model": {"type": "Unigram", "vocab": [[f"t{each}", -1.0] for each in range(96)]}},
            False,
        ),
        ({"added_tokens": [{"id": 96, "content": "<|new|>"}]}, False),
        ({"added_tokens": [{"id": 5, "content": "<|new|>"}]}, True),
        ({"model": {"type": "BPE", "vocab": TOKENS | {"t8": 9, "t9": 8}}}, True),
    ],
)
def test_another_tokenizer_is_refused(
    models: dict[str, PreparedModel], tmp_path: Path, changes: dict[str, Any], refused: bool
) -> None:
    config = settings()
    draft = prepare_checkpoint(Path(models["qwen3"].source).parent, tmp_path)
    write_tokenizer(draft, **changes)
    if not refused:
        require_draft_model(config, models["llama"], draft, cpu_of(config))
        return
    with pytest.raises(ConfigError, match=r"another tokenizer than llama: token [58] is"):
        require_draft_model(config, models["llama"], draft, cpu_of(config))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_the_plan_has_what_the_draft_model_takes(
    models: dict[str, PreparedModel], size: int, kv_dtype: str
) -> None:
    config = settings("--tensor-parallel-size", str(size), "--kv-cache-dtype", kv_dtype)
    target, draft, cpu = models["llama"], models["gemma3"], cpu_of(config)
    plan = plan_memory(config, target, cpu, draft=draft)
    ranks = [
        load(config, target, cpu, RankGroup(rank, size), lambda message: None, draft=draft)
        for rank in range(size)
    ]
    loaded = [each.draft for each in ranks if each.draft is not None]
    assert len(loaded) == size
    assert plan.draft_weights == sum((each.weight_format.memory for each in loaded), Counter())
    assert plan.weights == sum((each.weight_format.memory for each in ranks), Counter())
    token_bytes = sum(
        own.geometry.bytes_per_token + drafts.geometry.bytes_per_token + TOKEN_BYTES
        for own, drafts in zip(ranks, loaded, strict=True)
    )
    assert plan.block_bytes == config.cache.block_size * token_bytes
    without = plan_memory(config, target, cpu)
    needed = plan.free - plan.left - plan.draft_weights.total()
    assert needed > without.free - without.left
    table = "\n".join(plan.table())
    assert "draft model" in table
    assert "draft model" not in "\n".join(without.table())


def test_a_draft_model_that_does_not_fit_is_refused(
    models: dict[str, PreparedModel], tmp_path: Path
) -> None:
    config = settings("--kv-cache-memory", "100000G")
    plan = plan_memory(config, models["llama"], cpu_of(config), draft=models["qwen3"])
    assert not plan.fits
    message = str(refusal(plan, config, models["llama"], cpu_of(config), draft=models["qwen3"]))
    assert "draft model" in message
