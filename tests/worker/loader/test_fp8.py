"""FP8 checkpoints with a scale of each block of 128 x 128: loaded as the numbers they stand for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, Qwen3Config

from proto.errors import ModelError
from proto.prepared_model import PreparedModel
from tests.fakes.dense_attention import DenseAttention
from tests.fakes.prepared_models import prepare_checkpoint, spec_of
from tests.fakes.tiny_checkpoints import CONFIGS, tiny_model
from worker.loader.files import TensorFiles, entries_by_name, read_index
from worker.loader.source import WeightSource
from worker.loader.weights import load_model
from worker.models.parts import Shard

Tensors = dict[str, torch.Tensor]
SCHEME: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
CPU = torch.device("cpu")
DOWN = "model.layers.0.mlp.down_proj.weight"


def config_of(name: str) -> Any:
    """A configuration whose matrices have several blocks, the last ones not whole."""
    if name == "qwen3":
        changes = {"hidden_size": 200, "intermediate_size": 330}
        return Qwen3Config(**CONFIGS["qwen3"].to_dict() | changes)
    sizes = {"hidden_size": 200, "intermediate_size": 330, "moe_intermediate_size": 136}
    return DeepseekV3Config(**CONFIGS["deepseek3"].to_dict() | sizes)


def quantised(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Return the tensors with matrices of layers in FP8, and with the numbers these stand for."""
    stored, numbers = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if weight.dim() != 2 or not name.endswith("_proj.weight"):
            continue
        rows, columns = weight.shape
        scales = torch.rand(-(-rows // 128), -(-columns // 128)) * 0.01 + 0.005
        each = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        codes = (weight / each).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored |= {name: codes, f"{name}_scale_inv": scales}
        numbers[name] = codes.float() * each
    return stored, numbers


def save_pair(
    folder: Path, name: str = "deepseek3", change: Callable[[Tensors], None] = lambda tensors: None
) -> tuple[PreparedModel, PreparedModel]:
    """Save a model in FP8, changed, and with the numbers it stands for."""
    model = tiny_model(config_of(name))
    model.save_pretrained(folder / "fp8")
    model.save_pretrained(folder / "plain")
    stored, numbers = quantised(load_file(folder / "fp8" / "model.safetensors"))
    change(stored)
    save_file(stored, folder / "fp8" / "model.safetensors")
    save_file(numbers, folder / "plain" / "model.safetensors")
    path = folder / "fp8" / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": SCHEME}
    path.write_text(json.dumps(config))
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
            f"tensor {DOWN} has type F8_E4M3",
        ),
        (
            lambda tensors: tensors.update({f"{DOWN}_scale_inv": torch.ones(1, 3)}),
            f"tensor {DOWN} of type F8_E4M3 and shape [200, 330] does not fit tensor {DOWN}_scale",
        ),
        (
            lambda tensors: tensors.update({DOWN: tensors[DOWN].float()}),
            f"tensor {DOWN} of type F32",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight_scale_inv": torch.ones(2)}),
            "tensor model.norm.weight of type F32 and shape [200] does not fit",
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


@pytest.mark.parametrize(
    "change",
    [
        {"activation_scheme": "static"},
        {"fmt": "e5m2"},
        {"weight_block_size": [128, 64]},
        {"weight_block_size": None},
        {"quant_method": "compressed-tensors"},
    ],
    ids=str,
)
def test_other_schemes_are_refused_by_name(change: dict[str, Any], tmp_path: Path) -> None:
    fp8, _ = save_pair(tmp_path)
    path = Path(fp8.folder, "config.json")
    config = json.loads(path.read_text()) | {"quantization_config": SCHEME | change}
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"quantization_config = .*not supported"):
        spec_of(fp8)
