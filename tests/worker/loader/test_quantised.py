"""Quantised Hugging Face checkpoints: numbers, products in blocks, ranks, and what is refused."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from deploy.models import hf_folder
from proto.errors import ModelError
from proto.messages.prepared_model import PreparedModel
from tests.fakes.dense_attention import DenseAttention
from tests.fakes.devices import CPU
from tests.fakes.gguf_models import PERPLEXITY, TOKENS, logits, packed, perplexity_change
from tests.fakes.prepared_models import prepare_checkpoint, spec_of
from tests.fakes.quantised_checkpoints import SCHEMES, Tensors, quantise_folder
from tests.fakes.ranks import Ranks
from tests.fakes.tiny_checkpoints import tiny_model
from worker.cpu.kernels import Kernels
from worker.cpu.weights import Fp8Weight
from worker.loader.files import TensorFiles, entries_by_name, read_index
from worker.loader.source import WeightSource
from worker.loader.weights import create_builder, load_model

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    initializer_range=0.15,
)
DOWN = "model.layers.1.mlp.down_proj"
IN_BLOCKS = [name for name, scheme in SCHEMES.items() if scheme.block_type]
NF4_ERROR = 0.004
"""Beside the largest number of a block: what whole numbers of 8 bits lose of NF4."""


ROUNDED = 0.05
"""What rounding activations to 8 bits changes in logits of random weights, of their norm."""


@dataclass(frozen=True)
class Case:
    """A quantised checkpoint, and transformers' logits of the numbers it stands for."""

    folder: Path
    prepared: PreparedModel
    numbers: Tensors
    expected: torch.Tensor


@cache
def made(folder: Path, name: str) -> Case:
    model = tiny_model(CONFIG)
    model.save_pretrained(folder / name)
    numbers = quantise_folder(folder / name, SCHEMES[name])
    model.load_state_dict(numbers)
    with torch.no_grad():
        expected = model(TOKENS[None]).logits[0]
    prepared = prepare_checkpoint(folder / name, folder / f"prepared {name}")
    return Case(folder / name, prepared, numbers, expected)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    folder = tmp_path_factory.mktemp("quantised")
    return lambda name: made(folder, name)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_model_computes_with_the_numbers_of_the_reference(
    name: str, case: Callable[[str], Case]
) -> None:
    checkpoint = case(name)
    index = read_index(checkpoint.prepared)
    files, entry = TensorFiles(index), entries_by_name(index)[f"{DOWN}.weight"]
    numbers = checkpoint.numbers[entry.name].float()
    assert torch.equal(files.read(entry), numbers)
    part = entry.with_rows(60, 200).with_rows(7, 100)
    assert torch.equal(files.read(part), numbers[67:160])
    found = logits(checkpoint.prepared)
    assert (found - checkpoint.expected).abs().max() < 1e-4
    assert torch.equal(found.argmax(1), checkpoint.expected.argmax(1))


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_weights_are_multiplied_in_blocks_of_the_size_of_the_file(
    name: str, case: Callable[[str], Case], kernels: Kernels
) -> None:
    checkpoint, form = case(name), packed(kernels)
    found = logits(checkpoint.prepared, form)
    assert (found - checkpoint.expected).norm() < ROUNDED * checkpoint.expected.norm()
    assert perplexity_change(found, checkpoint.expected) < PERPLEXITY
    assert form.dense_names == ["head.weight (F32)"]
    stored = [entry for entry in read_index(checkpoint.prepared).tensors if entry.parts]
    assert {entry.type for entry in stored} == {SCHEMES[name].block_type}
    assert form.memory["packed"] <= 1.11 * sum(entry.num_bytes for entry in stored)
    spec = spec_of(checkpoint.prepared)
    planned = create_builder(
        checkpoint.prepared, spec, torch.float32, CPU, packed(kernels)
    ).weight_sizes()
    assert planned.by_format == form.memory


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_blocks_have_the_numbers_of_the_file(
    name: str, case: Callable[[str], Case], kernels: Kernels
) -> None:
    """Exactly where the scales are of 16 bits; columns are in order again."""
    checkpoint = case(name)
    spec, weight_name = spec_of(checkpoint.prepared), "layers.1.down.weight"
    source = WeightSource(read_index(checkpoint.prepared), spec, torch.float32, CPU)
    (weight,) = packed(kernels).read_packed(source, [weight_name])
    numbers = source.read(weight_name)
    found = weight.rows(torch.arange(weight.out_features), torch.float32)
    if weight.type_name == "NVFP4":  # the reciprocal of the scale of all is rounded
        rtol = 2**-22 if name == "nvfp4" else 0
        assert torch.allclose(found, numbers, rtol=rtol, atol=0)
    elif weight.type_name == "NF4":
        largest = numbers.view(-1, 64).abs().amax(1, keepdim=True)
        assert ((found - numbers).view(-1, 64).abs() <= (NF4_ERROR + 2**-11) * largest).all()
    else:
        halves = checkpoint_scales(checkpoint) in (torch.float16, torch.bfloat16)
        exact = halves or isinstance(weight, Fp8Weight)
        assert torch.allclose(found, numbers, rtol=0 if exact else 2**-11, atol=0)
    x = torch.randn(3, weight.in_features, generator=torch.Generator().manual_seed(2))
    product, expected = weight.multiply(x), x @ numbers.t()
    assert (product - expected).norm() < 0.02 * expected.norm()


def checkpoint_scales(checkpoint: Case) -> torch.dtype:
    tensors = load_file(checkpoint.folder / "model.safetensors")
    (scales,) = (
        tensors[DOWN + end]
        for end in (".scales", ".weight_scale", ".weight_scale_inv")
        if DOWN + end in tensors
    )
    return scales.dtype


@pytest.mark.parametrize(
    "name",
    [
        *("awq 128", "gptq desc_act", "gptq 8", "w4a16 asym", "w8a8", "nf4", "nvfp4 modelopt"),
        *("fp8 blocks", "fp8 rows", "fp8 one scale"),
    ],
)
def test_two_ranks_compute_the_results_of_one(
    name: str, case: Callable[[str], Case], kernels: Kernels
) -> None:
    """Columns in another order are not divided in blocks: those weights are converted."""
    checkpoint, cpu = case(name), CPU
    spec, forms = spec_of(checkpoint.prepared), [packed(kernels), packed(kernels)]

    def run(rank: int) -> torch.Tensor:
        decoder = decoders[rank]
        attention = DenseAttention(decoder.spec)
        return decoder.float32_logits(decoder.forward(TOKENS, torch.arange(len(TOKENS)), attention))

    with Ranks(2) as ranks:
        decoders = [
            load_model(
                checkpoint.prepared, spec, torch.float32, cpu, lambda fraction: None, form, group
            )
            for form, group in zip(forms, ranks.groups, strict=True)
        ]
        found = ranks.run_on_all(run)
    assert torch.equal(*found)
    assert (found[0] - checkpoint.expected).norm() < ROUNDED * checkpoint.expected.norm()
    divided = sorted(name for name in forms[0].dense_names if "INT" in name or "NF4" in name)
    expected = [f"layers.{layer}.{each}.weight (INT4_128)" for layer in (0, 1) for each in "do"]
    wanted = [each.replace(".d.", ".down.") for each in expected]
    assert divided == (wanted if name == "gptq desc_act" else [])


# ---- what is refused -----------------------------------------------------------------------------


def _in_blocks(structure: Any) -> dict[str, Any]:
    """Return a configuration of compressed-tensors with FP8 in blocks of this structure."""
    weights = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": structure}
    return SCHEMES["fp8 tensor"].config | {"config_groups": {"group_0": {"weights": weights}}}


def read_folder(folder: Path) -> None:
    hf_folder.read(str(folder), lambda what: None)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "hqq"}, "quantization_config: quant_method = 'hqq': supported: 'awq'"),
        ({"bits": 4}, "quant_method = None"),
        ([4], "quantization_config = [4]: an object is needed"),
        (SCHEMES["awq 128"].config | {"bits": 3}, "bits = 3: supported: 4"),
        (SCHEMES["awq 128"].config | {"version": "gemv"}, "version = 'gemv'"),
        (SCHEMES["awq 128"].config | {"group_size": 48}, "group_size = 48: -1 or a multiple of 32"),
        (SCHEMES["gptq sym"].config | {"bits": 3}, "bits = 3: supported: 4, 8"),
        (SCHEMES["gptq sym"].config | {"dynamic": {"-:o": {}}}, "dynamic = "),
        (SCHEMES["gptq sym"].config | {"checkpoint_format": "marlin"}, "checkpoint_format = "),
        (SCHEMES["fp8 blocks"].config | {"fmt": "e5m2"}, "fmt = 'e5m2': supported: 'e4m3'"),
        (SCHEMES["fp8 blocks"].config | {"weight_block_size": 128}, "weight_block_size = 128"),
        (SCHEMES["w8a8"].config | {"format": "marlin-24"}, "format = 'marlin-24'"),
        (SCHEMES["w8a8"].config | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme = "),
        (SCHEMES["w8a8"].config | {"config_groups": {}}, "config_groups = {}"),
        (SCHEMES["w8a8"].config | {"format": "mixed-precision"}, "the format of the group"),
        (_in_blocks([0, 128]), "block_structure = [0, 128]"),
        (_in_blocks("128x128"), "block_structure = '128x128'"),
        (SCHEMES["nf4"].config | {"load_in_8bit": True}, "load_in_8bit = True"),
        (SCHEMES["nvfp4 modelopt"].config | {"quant_algo": "W4A8_AWQ"}, "quant_algo = 'W4A8_AWQ'"),
        (SCHEMES["nvfp4 modelopt"].config | {"group_size": 32}, "group_size = 32: supported: 16"),
        (SCHEMES["nvfp4 modelopt"].config | {"kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo"),
    ],
    ids=str,
)
def test_unknown_quantisations_are_named_before_the_weights(
    config: Any, named: str, tmp_path: Path
) -> None:
    """There is no file of weights yet, which would be the next complaint."""
    whole = CONFIG.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"quantization_config": config}))
    with pytest.raises(ModelError) as caught:
        read_folder(tmp_path)
    assert named in str(caught.value)


def test_a_file_of_modelopt_says_how_a_folder_is_quantised(
    case: Callable[[str], Case], tmp_path: Path
) -> None:
    """Its older exports say nothing in config.json, which counts where it says something."""
    source = case("nvfp4 modelopt").folder
    config = json.loads((source / "config.json").read_text())
    stated = config.pop("quantization_config")
    own = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16}
    own["exclude_modules"] = ["lm_head"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    of_modelopt = tmp_path / "hf_quant_config.json"
    of_modelopt.write_text(json.dumps({"producer": {}, "quantization": own}))
    for name in ("model.safetensors", "tokenizer.json"):
        link = tmp_path / name
        link.symlink_to(source / name) if (source / name).exists() else link.write_text("{}")

    def entries() -> dict[str, Any]:
        index = hf_folder.read(str(tmp_path), lambda what: None).tensors
        return {entry.name: (entry.type, entry.packing) for entry in index.tensors}

    read = entries()
    assert read[f"{DOWN}.weight"][1] == "modelopt_nvfp4"
    assert not any(name.endswith("_scale") for name in read)
    of_modelopt.write_text(json.dumps({"quantization": own | {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(ModelError, match=r"hf_quant_config\.json: quantization: quant_algo = 'W4A"):
        entries()
    of_modelopt.write_text(json.dumps({"quantization": ["FP8"]}))
    with pytest.raises(ModelError, match=r"hf_quant_config\.json: quantization = \['FP8'\]: an"):
        entries()
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    assert entries() == read


def without(suffix: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(DOWN + suffix)


def with_tensor(suffix: str, make: Callable[[Tensors], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({DOWN + suffix: make(tensors)})


def with_number(suffix: str, value: float) -> Callable[[Tensors], None]:
    return lambda tensors: tensors[DOWN + suffix].view(-1)[5:6].fill_(value) and None


def zero(tensors: Tensors) -> torch.Tensor:
    return torch.zeros(1)


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("awq 128", without(".scales"), f"{DOWN}.qweight has no {DOWN}.scales beside it"),
        (
            "awq 128",
            with_tensor(".scales", lambda tensors: tensors[DOWN + ".scales"][:3].clone()),
            f"the tensors of {DOWN}.weight do not fit: zeros of shape [3, 32]",
        ),
        (
            "awq 64",
            lambda tensors: tensors.update(
                {DOWN + end: tensors[DOWN + end][::2].clone() for end in (".scales", ".qzeros")}
            ),
            "512 columns are not groups of 64",
        ),
        (
            "gptq sym",
            with_tensor(".weight", lambda tensors: torch.zeros(256, 512)),
            f"tensor {DOWN}.qweight and tensor {DOWN}.weight are the same weight",
        ),
        ("gptq desc_act", with_number(".g_idx", 2), "its g_idx does not have 128 columns of each"),
        ("gptq 8", with_number(".scales", math.nan), f"{DOWN}.scales holds nan"),
        ("w4a16", with_number(".weight_scale", math.inf), f"{DOWN}.weight_scale holds inf"),
        ("fp8 rows", with_number(".weight_scale", -math.inf), f"{DOWN}.weight_scale holds -inf"),
        ("fp8 channel", with_number(".weight_scale", math.nan), f"{DOWN}.weight_scale holds nan"),
        ("nf4", with_number(".weight.absmax", math.nan), f"{DOWN}.weight.absmax holds nan"),
        ("nvfp4", with_number(".weight_scale", math.nan), f"{DOWN}.weight_scale holds nan"),
        ("nvfp4", with_tensor(".weight_global_scale", zero), f"a scale of {DOWN}.weight is inf"),
        (
            "nvfp4 modelopt",
            with_tensor(".weight_scale_2", lambda tensors: torch.zeros(2)),
            "one scale of all in F32 is needed",
        ),
        (
            "nf4 nested",
            with_number(".weight.nested_quant_map", math.nan),
            f"{DOWN}.weight.nested_quant_map holds nan",
        ),
        (
            "fp8 rows",
            with_tensor(".qweight", lambda tensors: torch.zeros(32, 256, dtype=torch.int32)),
            f"tensor {DOWN}.qweight is no part",
        ),
        ("fp8 rows", with_number(".weight", math.nan), f"a number of {DOWN}.weight is nan"),
        (
            "nf4",
            with_tensor(
                ".weight.quant_state.bitsandbytes__nf4",
                lambda tensors: torch.zeros(9, dtype=torch.uint8),
            ),
            "the state is no JSON object",
        ),
        (
            "w4a16",
            with_tensor(".weight_shape", lambda tensors: torch.tensor([256, 500])),
            "shape [256, 500] needs whole words",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) and len(each) < 20 else "",
)
def test_tensors_that_do_not_fit_are_named(
    name: str,
    change: Callable[[Tensors], None],
    named: str,
    case: Callable[[str], Case],
    tmp_path: Path,
) -> None:
    source = case(name).folder
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(ModelError) as caught:
        logits(prepare_checkpoint(tmp_path, tmp_path / "prepared"))
    assert named in str(caught.value)
