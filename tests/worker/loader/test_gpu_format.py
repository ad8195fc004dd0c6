"""Quantised checkpoints on a simulated GPU: their forms, memory, results, and two ranks."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, Qwen3Config, Qwen3MoeConfig

from proto.errors import ModelError
from tests.fakes.cuda_runner import compute_by_torch
from tests.fakes.dense_attention import DenseAttention
from tests.fakes.devices import GPU
from tests.fakes.fake_cuda import (
    CUDA,
    CodedLinearWithoutTriton,
    ExpertsWithoutTriton,
    FakeCuda,
)
from tests.fakes.fake_device import FakeDevice, on_host
from tests.fakes.fake_flashinfer import FakeFlashInfer
from tests.fakes.fake_fp8 import FakeScaledMm, on_fake_hopper
from tests.fakes.gguf_models import TOKENS
from tests.fakes.prepared_models import prepare_checkpoint, spec_of
from tests.fakes.quantised_checkpoints import SCHEMES, quantise_folder
from tests.fakes.ranks import Ranks
from tests.fakes.tiny_checkpoints import CONFIGS, save_mxfp4, tiny_model
from tests.worker.loader.test_quantised import DOWN, Case, case
from tests.worker.models.test_gptoss import SMALL
from worker.cuda import formats as gpu_format
from worker.cuda.formats import GpuFormat
from worker.cuda.layers import fp8_linear
from worker.cuda.layers.fp8_linear import Fp8BlockLinear, Fp8RowLinear
from worker.cuda.layers.triton_codes import TritonCodedLinear
from worker.layers.linear import DenseLinear
from worker.loader.files import TensorFiles, entries_by_name, read_index
from worker.loader.formats import Product
from worker.loader.quantised import Codes, read_codes
from worker.loader.source import WeightSource
from worker.loader.weights import create_builder, load_model
from worker.models.decoder import Decoder

pytestmark = pytest.mark.suite("devices")

__all__ = ["case"]

BF16 = torch.bfloat16
CODED = [name for name, scheme in SCHEMES.items() if scheme.block_type.startswith(("INT", "NF4"))]
FP8 = [name for name in SCHEMES if name.startswith("fp8")]
ROUNDED = {"packed": 0.03, "fp8": 0.15}
"""What bfloat16, and inputs in FP8, change in the logits of random weights, of their norm."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    compute_by_torch(monkeypatch)
    monkeypatch.setattr(gpu_format, "TritonCodedLinear", CodedLinearWithoutTriton)
    monkeypatch.setattr(gpu_format, "TritonExperts", ExpertsWithoutTriton)
    monkeypatch.setattr(fp8_linear, "is_hopper", lambda device: False)
    with FakeCuda() as fake:
        yield fake


@pytest.fixture
def hopper(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeFlashInfer, FakeScaledMm]:
    library = FakeFlashInfer(cuda.device)
    return library, on_fake_hopper(monkeypatch, library)


class OnHostAttention(DenseAttention):
    """DenseAttention for tensors of a FakeDevice."""

    def __init__(self, decoder: Decoder, device: FakeDevice) -> None:
        super().__init__(decoder.spec)
        self._device = device

    def run(self, layer: int, *tensors: Any) -> torch.Tensor:
        own = (each if each is None else on_host(each) for each in tensors)
        return self._device.adopt(super().run(layer, *own))


def logits(decoder: Decoder, cuda: FakeCuda) -> torch.Tensor:
    with cuda.loading(), torch.inference_mode():
        tokens, positions = TOKENS.to(CUDA), torch.arange(len(TOKENS)).to(CUDA)
        hidden = decoder.forward(tokens, positions, OnHostAttention(decoder, cuda.device))
        return on_host(decoder.float32_logits(hidden)).float()


def loaded(checkpoint: Case, form: GpuFormat, cuda: FakeCuda) -> Decoder:
    with cuda.loading():
        return load_model(
            checkpoint.prepared, spec_of(checkpoint.prepared), BF16, GPU, lambda _: None, form
        )


def check(
    checkpoint: Case, cuda: FakeCuda, form_name: str, stored: int, tolerance: float
) -> Decoder:
    """Load a checkpoint: in which form its weights are, in how much memory, and its logits."""
    form = GpuFormat(BF16)
    decoder = loaded(checkpoint, form, cuda)
    found = logits(decoder, cuda)
    assert (found - checkpoint.expected).norm() < tolerance * checkpoint.expected.norm()
    assert not form.dense_names
    assert form.memory[form_name] <= 1.11 * stored
    planned = create_builder(
        checkpoint.prepared, spec_of(checkpoint.prepared), BF16, GPU, GpuFormat(BF16)
    ).weight_sizes()
    assert planned.by_format == form.memory
    return decoder


def stored_bytes(checkpoint: Case) -> int:
    entries = read_index(checkpoint.prepared).tensors
    return sum(entry.num_bytes for entry in entries if entry.parts)


@pytest.mark.parametrize("name", CODED)
def test_codes_stay_as_they_are(name: str, case: Callable[[str], Case], cuda: FakeCuda) -> None:
    checkpoint = case(name)
    check(checkpoint, cuda, "packed", stored_bytes(checkpoint), ROUNDED["packed"])


@pytest.mark.parametrize("name", FP8)
def test_fp8_is_multiplied_as_fp8(
    name: str,
    case: Callable[[str], Case],
    cuda: FakeCuda,
    hopper: tuple[FakeFlashInfer, FakeScaledMm],
) -> None:
    library, scaled_mm = hopper
    checkpoint = case(name)
    check(checkpoint, cuda, "fp8", stored_bytes(checkpoint), ROUNDED["fp8"])
    num_products = 2 * 4
    blocks = "blocks" in name
    assert (library.gemm.num_calls, scaled_mm.num_calls) == (
        (num_products, 0) if blocks else (0, num_products)
    )


@pytest.mark.parametrize("name", ["fp8 blocks", "fp8 rows"])
def test_other_gpus_keep_fp8_in_memory(
    name: str, case: Callable[[str], Case], cuda: FakeCuda
) -> None:
    checkpoint = case(name)
    check(checkpoint, cuda, "fp8", stored_bytes(checkpoint), ROUNDED["packed"])


def is_quantised(name: str) -> bool:
    return name.endswith(("_proj.weight", "lm_head.weight", "embed_tokens.weight"))


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def same_as_plain(folder: Path, plain: Path, cuda: FakeCuda) -> GpuFormat:
    """Check that logits have the bits of the same numbers in bfloat16; return the form."""
    found, forms = [], (GpuFormat(BF16), GpuFormat(BF16))
    for form, each in zip(forms, (folder, plain), strict=True):
        prepared = prepare_checkpoint(each, each.with_name(each.name + " prepared"))
        with cuda.loading():
            decoder = load_model(prepared, spec_of(prepared), BF16, GPU, lambda _: None, form)
        found.append(logits(decoder, cuda))
        sizes = create_builder(prepared, spec_of(prepared), BF16, GPU, GpuFormat(BF16))
        assert sizes.weight_sizes().by_format == form.memory
    assert found[1].std() > 0.1
    assert torch.equal(*found)
    assert set(forms[1].memory) == {"bf16"}
    return forms[0]


@pytest.mark.parametrize("name", ["awq 32", "gptq 8", "nf4", "fp8 blocks", "gptq desc_act"])
def test_experts_head_and_embedding_stay_as_they_are(
    name: str, cuda: FakeCuda, tmp_path: Path
) -> None:
    """Experts with columns in orders of their own are converted, and named."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "tie_word_embeddings": False}
    config = Qwen3MoeConfig(**CONFIGS["qwen3moe"].to_dict() | sizes)
    model = tiny_model(config)
    folder, plain = saved(model, tmp_path / "quantised"), saved(model, tmp_path / "plain")
    quantise_folder(folder, SCHEMES[name], plain, is_quantised)
    form = same_as_plain(folder, plain, cuda)
    if name != "gptq desc_act":
        assert not form.dense_names
        assert set(form.memory) == {"fp8" if "fp8" in name else "packed"}
        return
    assert set(form.memory) == {"packed", "bf16"}
    assert all(".experts." in each for each in form.dense_names)


def test_a_tied_embedding_in_codes_exists_once(cuda: FakeCuda, tmp_path: Path) -> None:
    model = tiny_model(Qwen3Config(**CONFIGS["qwen3"].to_dict() | {"tie_word_embeddings": True}))
    folder, plain = saved(model, tmp_path / "quantised"), saved(model, tmp_path / "plain")
    scheme = SCHEMES["awq 32"]
    quantise_folder(folder, scheme, plain, lambda name: name == "model.embed_tokens.weight")
    form = same_as_plain(folder, plain, cuda)
    vocab, hidden = model.get_input_embeddings().weight.shape
    assert form.memory["packed"] == vocab * hidden * (4 + 0.5 + 0.25) / 8


@torch.no_grad()
def test_experts_in_mxfp4_stay_as_they_are(cuda: FakeCuda, tmp_path: Path) -> None:
    model = tiny_model(GptOssConfig(**SMALL))
    (tmp_path / "quantised").mkdir()
    save_mxfp4(model, tmp_path / "quantised")
    form = same_as_plain(tmp_path / "quantised", saved(model, tmp_path / "plain"), cuda)
    experts = [each for name, each in model.named_parameters() if name.endswith("_proj")]
    assert form.memory["packed"] == sum(each.numel() for each in experts) * 4.5 / 8
    assert not form.dense_names


def numbers_of(codes: Codes) -> torch.Tensor:
    """Return the float32 numbers that codes stand for, [rows, columns], in the codes' order."""
    rows, groups = codes.scales.shape
    each, middle = codes.codes, 128
    if each.shape[1] < groups * codes.group:
        halves = each.view(rows, -1, 16)
        each, middle = torch.cat((halves & 15, halves >> 4), -1).view(rows, -1), 8
    wide = each.view(rows, groups, codes.group)
    if codes.table is not None:
        numbers = codes.table[wide.long()]
    else:
        zeros = middle if codes.zeros is None else codes.zeros[:, :, None].float()
        numbers = wide.float() - zeros
    return (numbers * codes.scales.float()[:, :, None]).view(rows, -1)


@pytest.mark.parametrize("name", CODED)
def test_codes_have_the_numbers_of_the_file(name: str, case: Callable[[str], Case]) -> None:
    """Bit by bit, of whole weights and of every second row of some columns."""
    checkpoint = case(name)
    index = read_index(checkpoint.prepared)
    files, entry = TensorFiles(index), entries_by_name(index)[f"{DOWN}.weight"]
    numbers = checkpoint.numbers[entry.name].float()
    parts = files.parts_of(entry)
    if "order" in parts:
        numbers = numbers[:, parts["order"].argsort(stable=True)]
    assert torch.equal(numbers_of(read_codes(entry, parts)), numbers)
    some = entry.with_rows(60, 201)
    found = numbers_of(read_codes(some, parts, slice(128, 384), 2))
    assert torch.equal(found, numbers[60:201:2, 128:384])


@pytest.mark.parametrize(
    ("name", "form_name"),
    [("awq 128", "packed"), ("gptq desc_act", "packed"), ("nf4", "packed")]
    + [(name, "fp8") for name in ("fp8 blocks", "fp8 rows", "fp8 one scale")],
)
def test_two_ranks_compute_the_results_of_one(
    name: str,
    form_name: str,
    case: Callable[[str], Case],
    cuda: FakeCuda,
    hopper: tuple[FakeFlashInfer, FakeScaledMm],
) -> None:
    """Each has its shard of the scales; where blocks do not divide, weights are converted."""
    checkpoint = case(name)
    spec, forms = spec_of(checkpoint.prepared), [GpuFormat(BF16), GpuFormat(BF16)]

    def run(rank: int) -> torch.Tensor:
        with cuda:
            return logits(decoders[rank], cuda)

    with Ranks(2) as ranks, cuda.loading():
        decoders = [
            load_model(checkpoint.prepared, spec, BF16, GPU, lambda _: None, form, group)
            for form, group in zip(forms, ranks.groups, strict=True)
        ]
        found = ranks.run_on_all(run)
    assert torch.equal(*found)
    tolerance = ROUNDED[form_name]
    assert (found[0] - checkpoint.expected).norm() < tolerance * checkpoint.expected.norm()
    alone = GpuFormat(BF16)
    loaded(checkpoint, alone, cuda)
    both = sum((form.memory for form in forms), Counter())
    assert forms[0].memory == forms[1].memory
    if name == "gptq desc_act":  # a rank's columns of output and down belong to all groups
        assert both["packed"] < alone.memory["packed"]
    elif name == "fp8 blocks":  # the two heads of K and V are half a block each: scales of rows
        assert alone.memory["fp8"] <= both["fp8"] < 1.04 * alone.memory["fp8"]
    else:
        assert alone.memory[form_name] <= both[form_name] < 1.02 * alone.memory[form_name]


def linear_of(folder: Path, name: str = "down") -> object:
    """Return the layer of a weight in a folder that is prepared first."""
    prepared = prepare_checkpoint(folder, folder / "prepared")
    source = WeightSource(read_index(prepared), spec_of(prepared), BF16, GPU)
    return GpuFormat(BF16).read_product(source, Product((f"layers.1.{name}.weight",)))()


def changed_checkpoint(source: Path, folder: Path, **config: object) -> dict[str, torch.Tensor]:
    """Copy a checkpoint with other keys in its quantisation; return its tensors."""
    text = json.loads((source / "config.json").read_text())
    text["quantization_config"] |= config
    (folder / "config.json").write_text(json.dumps(text))
    return load_file(source / "model.safetensors")


@pytest.mark.parametrize("given", [0.03, 0.0, -1.0])
def test_the_scale_of_the_input_is_that_of_the_checkpoint(
    given: float,
    case: Callable[[str], Case],
    cuda: FakeCuda,
    hopper: tuple[FakeFlashInfer, FakeScaledMm],
    tmp_path: Path,
) -> None:
    source = case("fp8 one scale").folder
    tensors = changed_checkpoint(source, tmp_path, activation_scheme="static")
    tensors[f"{DOWN}.input_scale"] = torch.tensor(given)
    save_file(tensors, tmp_path / "model.safetensors")
    with cuda.loading():
        if given <= 0:
            with pytest.raises(ModelError, match=f"input of {DOWN}.weight is {given:g}"):
                linear_of(tmp_path)
            return
        linear = linear_of(tmp_path)
    assert isinstance(linear, Fp8RowLinear)
    _, scales = linear._round(torch.ones(2, 512))
    assert scales.flatten().tolist() == pytest.approx([given, given])


def test_weights_alone_in_fp8_stay_in_memory(
    case: Callable[[str], Case],
    cuda: FakeCuda,
    hopper: tuple[FakeFlashInfer, FakeScaledMm],
    tmp_path: Path,
) -> None:
    """Where the checkpoint says that inputs are not rounded, they are multiplied as numbers."""
    source = case("fp8 channel").folder
    weights = SCHEMES["fp8 channel"].config["config_groups"]["group_0"]["weights"]
    for inputs, kind in (({"dynamic": True}, Fp8RowLinear), (None, TritonCodedLinear)):
        folder = tmp_path / str(bool(inputs))
        folder.mkdir()
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        tensors = changed_checkpoint(source, folder, config_groups={"group_0": group})
        save_file(tensors, folder / "model.safetensors")
        with cuda.loading():
            linear = linear_of(folder)
        assert isinstance(linear, kind)


def test_a_code_that_is_nan_is_named(
    case: Callable[[str], Case],
    cuda: FakeCuda,
    hopper: tuple[FakeFlashInfer, FakeScaledMm],
    tmp_path: Path,
) -> None:
    source = case("fp8 blocks").folder
    tensors = changed_checkpoint(source, tmp_path)
    tensors[f"{DOWN}.weight"].view(-1)[5] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with cuda.loading(), pytest.raises(ModelError, match=rf"{DOWN}\.weight: a number is NaN"):
        linear_of(tmp_path)


def test_products_of_single_heads_are_dense_and_blocks_without_the_library_codes(
    case: Callable[[str], Case],
    cuda: FakeCuda,
    hopper: tuple[FakeFlashInfer, FakeScaledMm],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared = case("fp8 blocks").prepared
    source = WeightSource(read_index(prepared), spec_of(prepared), BF16, GPU)
    name, form = "layers.1.down.weight", GpuFormat(BF16)
    with cuda.loading():
        assert isinstance(form.read_product(source, Product((name,)))(), Fp8BlockLinear)
        one = Product((name,), is_one_head=True)
        assert isinstance(form.read_product(source, one)(), DenseLinear)
        monkeypatch.setattr(gpu_format, "usable_flashinfer", lambda: None)
        assert isinstance(form.read_product(source, Product((name,)))(), TritonCodedLinear)
    assert not form.dense_names
    assert issubclass(CodedLinearWithoutTriton, TritonCodedLinear)
