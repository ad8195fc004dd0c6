"""FP8 checkpoints with a scale of each block of 128 x 128: loaded as the numbers they stand for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, Qwen3Config

from proto.errors import ModelError
from proto.messages.prepared_model import PreparedModel
from tests.fakes.dense_attention import DenseAttention
from tests.fakes.devices import CPU
from tests.fakes.prepared_models import prepare_checkpoint, spec_of
from tests.fakes.quantised_checkpoints import SCHEMES, Tensors, quantise_folder
from tests.fakes.tiny_checkpoints import CONFIGS, tiny_model
from worker.loader.files import TensorFiles, entries_by_name, read_index
from worker.loader.source import WeightSource
from worker.loader.weights import load_model
from worker.models.parts import Shard

DOWN = "model.layers.0.mlp.down_proj.weight"


def config_of(name: str) -> Any:
    """A configuration whose matrices have several blocks, the last ones not whole."""
    if name == "qwen3":
        changes = {"hidden_size": 200, "intermediate_size": 330}
        return Qwen3Config(**CONFIGS["qwen3"].to_dict() | changes)
    sizes = {"hidden_size": 200, "intermediate_size": 330, "moe_intermediate_size": 136}
    return DeepseekV3Config(**CONFIGS["deepseek3"].to_dict() | sizes)


def save_pair(
    folder: Path, name: str = "deepseek3", change: Callable[[Tensors], None] = lambda tensors: None
) -> tuple[PreparedModel, PreparedModel]:
    """Save a model in FP8, changed, and with the numbers it stands for."""
    model = tiny_model(config_of(name))
    model.save_pretrained(folder / "fp8")
    model.save_pretrained(folder / "plain")
    quantise_folder(folder / "fp8", SCHEMES["fp8 blocks"], folder / "plain")
    stored = load_file(folder / "fp8" / "model.safetensors")
    change(stored)
    save_file(stored, folder / "fp8" / "model.safetensors")
    fp8, plain = (
        prepare_checkpoint(folder / kind, folder / f"prepared {kind}") for kind in ("fp8", "plain")
    )
    return fp8, plain


def logits(prepared: PreparedModel) -> torch.Tensor:
    decoder = load_model(prepared, spec_of(prepared), torch.float32, CPU, lambda fraction: None)
    tokens = torch.arange(20)
    hidden = decoder.forward(tokens, tokens, DenseAttention(decoder.spec))
    return decoder.logits(hidden)


@pytest.mark.parametrize("name", ["deepseek3", "qwen3"])
def test_logits_are_those_of_the_numbers(name: str, tmp_path: Path) -> None:
    fp8, plain = save_pair(tmp_path, name)
    assert torch.equal(logits(fp8), logits(plain))


@pytest.mark.parametrize(
    ("rows", "columns"),
    [((0, 128), (0, 128)), ((100, 200), (0, 330)), ((130, 199), (50, 260)), ((128, 129), (0, 330))],
)
def test_a_shard_has_the_scales_of_its_blocks(
    rows: tuple[int, int], columns: tuple[int, int], tmp_path: Path
) -> None:
    fp8, plain = save_pair(tmp_path)
    shard = {"layers.0.down.weight": Shard(slice(*rows), slice(*columns))}
    found, expected = (
        WeightSource(read_index(each), spec_of(each), torch.float32, CPU, shard).read(*shard)
        for each in (fp8, plain)
    )
    assert found.shape == (rows[1] - rows[0], columns[1] - columns[0])
    assert torch.equal(found, expected)


def test_rows_of_rows_begin_within_a_block(tmp_path: Path) -> None:
    fp8, _ = save_pair(tmp_path)
    index = read_index(fp8)
    files, entry = TensorFiles(index), entries_by_name(index)[DOWN]
    part = entry.with_rows(60, 199).with_rows(70, 100)
    assert torch.equal(files.read(part), files.read(entry)[130:160])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.__delitem__(f"{DOWN}_scale_inv"),
            f"tensor {DOWN} has no {DOWN}_scale",
        ),
        (
            lambda tensors: tensors.update({f"{DOWN}_scale_inv": torch.ones(1, 3)}),
            f"the tensors of {DOWN} do not fit: a scale of each block of 128 x 128",
        ),
        (
            lambda tensors: tensors.update({DOWN: tensors[DOWN].float()}),
            f"tensor {DOWN}_scale_inv is no part",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight_scale_inv": torch.ones(2)}),
            "tensor model.norm.weight_scale_inv is no part",
        ),
        (
            lambda tensors: tensors.update({"lost.weight_scale_inv": torch.ones(2, 2)}),
            "tensor lost.weight_scale_inv is no part",
        ),
    ],
    ids=["missing", "another shape", "numbers are not FP8", "of a vector", "of nothing"],
)
def test_scales_that_do_not_fit_are_named(
    change: Callable[[Tensors], None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        logits(save_pair(tmp_path, change=change)[0])
    assert message in str(caught.value)
