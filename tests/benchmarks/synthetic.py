"""Models with random weights at the sizes that people run, for `sizes` and other benchmarks.

The tokenizer is that of a packaged model, which is downloaded if necessary. Weights are drawn as
they lie in the file, tensor by tensor and block by block, so no model is ever in memory:

    q4_k_m, q8_0   quantisation blocks of random bytes, whose scales are set afterwards
    bf16           random signs and mantissas; the exponents follow from the width

A file is written once, moved into place when it is complete, and used by later runs.
"""

import json
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, get_args

from deploy.display import open_display
from deploy.environment import HostEnvironment
from deploy.models import gguf_header
from deploy.models.lock_file import exclusive
from deploy.models.prepared_folder import check_space
from deploy.models.store import prepared_model
from proto.messages.prepared_model import TENSOR_TYPES

TOKENIZER_OF: Final = "smollm2-135m-instruct"
"""The packaged model whose tokenizer synthetic models have."""
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_CONTEXT: Final = 8192
_HYBRID_CONTEXT: Final = 131_072
_MAMBA_HEAD: Final = 64
"""Channels of a head of a Mamba-2 layer."""
_EPSILON: Final = 1e-5
_THETA: Final = 500_000.0

Form = Literal["q4_k_m", "q8_0", "bf16"]
FORMS: Final[tuple[Form, ...]] = get_args(Form)


@dataclass(frozen=True)
class Shape:
    """Sizes of a model of the Llama architecture, or of Qwen3-MoE's if it has experts.

    intermediate_size: of the MLP or of each expert. tied: embedding and head are one weight.
    top_k: experts of a token.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    num_experts: int = 0
    top_k: int = 0

    def weights(self, stacked: bool = True) -> Iterator["Weight"]:
        """Yield all weights, in the order of the file.

        stacked: the experts of a layer are one tensor, as in a GGUF file.
        """
        hidden = self.hidden_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        head_norms = (
            ("attn_q_norm", "self_attn.q_norm", (self.head_dim,)),
            ("attn_k_norm", "self_attn.k_norm", (self.head_dim,)),
        )
        yield Weight("token_embd", "model.embed_tokens", (self.vocab_size, hidden))
        for layer in range(self.num_layers):
            for gguf_name, name, shape in (
                ("attn_norm", "input_layernorm", (hidden,)),
                ("attn_q", "self_attn.q_proj", (queries, hidden)),
                ("attn_k", "self_attn.k_proj", (keys, hidden)),
                ("attn_v", "self_attn.v_proj", (keys, hidden)),
                *(head_norms if self.num_experts else ()),
                ("attn_output", "self_attn.o_proj", (hidden, queries)),
                ("ffn_norm", "post_attention_layernorm", (hidden,)),
                *self._mlp(stacked),
            ):
                yield Weight(f"blk.{layer}.{gguf_name}", f"model.layers.{layer}.{name}", shape)
        yield Weight("output_norm", "model.norm", (hidden,))
        if not self.tied:
            yield Weight("output", "lm_head", (self.vocab_size, hidden))

    def _mlp(self, stacked: bool) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yield names in a GGUF file, names in a folder and shapes of the weights of a MLP."""
        hidden, mlp, experts = self.hidden_size, self.intermediate_size, self.num_experts
        shapes = {"gate": (mlp, hidden), "up": (mlp, hidden), "down": (hidden, mlp)}
        if experts:
            yield "ffn_gate_inp", "mlp.gate", (experts, hidden)
        for part, shape in shapes.items():
            if not experts:
                yield f"ffn_{part}", f"mlp.{part}_proj", shape
            elif stacked:
                yield f"ffn_{part}_exps", f"mlp.experts.{part}_proj", (experts, *shape)
            else:
                for expert in range(experts):
                    yield f"ffn_{part}.{expert}", f"mlp.experts.{expert}.{part}_proj", shape

    def block_type(self, weight: "Weight", form: Form) -> str:
        """Return the type of a weight in a GGUF file, as llama.cpp's quantiser chooses it.

        Q4_K_M has Q6_K for the head, and for half of attn_v and ffn_down: the first and last
        eighth of the layers, and every third between them.
        """
        if weight.is_float32 or len(weight.shape) == 1 or weight.gguf.endswith("ffn_gate_inp"):
            return "F32"
        if form != "q4_k_m":
            return form.upper()
        if weight.gguf == ("token_embd" if self.tied else "output"):
            return "Q6_K"
        if weight.gguf.endswith(("attn_v", "ffn_down", "ffn_down_exps")):
            layer, eighth = int(weight.gguf.split(".")[1]), self.num_layers // 8
            in_ends = layer < eighth or layer >= 7 * self.num_layers // 8
            if in_ends or (layer - eighth) % 3 == 2:
                return "Q6_K"
        return "Q4_K"

    def bytes_of_a_token(self, form: Form) -> int:
        """Return the bytes of weights that a step of one token reads.

        Of an embedding that is not also the head it reads one row, of all experts `top_k`.
        """
        weights = (weight for weight in self.weights() if self.tied or weight.gguf != "token_embd")
        shapes = (
            (weight, (self.top_k, *weight.shape[1:]) if "_exps" in weight.gguf else weight.shape)
            for weight in weights
        )
        return sum(_num_bytes(self.block_type(weight, form), shape) for weight, shape in shapes)

    def config(self) -> dict[str, Any]:
        """Return config.json of a Hugging Face folder."""
        experts = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": self.intermediate_size,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": True,
        }
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": _CONTEXT,
            "rms_norm_eps": _EPSILON,
            "rope_theta": _THETA,
            "rope_parameters": {"rope_theta": _THETA, "rope_type": "default"},
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            **(experts if self.num_experts else {}),
        }

    def metadata(self) -> dict[str, Any]:
        """Return the metadata of a GGUF file, without that of the tokenizer."""
        architecture = "qwen3moe" if self.num_experts else "llama"
        experts = {
            "expert_count": self.num_experts,
            "expert_used_count": self.top_k,
            "expert_feed_forward_length": self.intermediate_size,
        }
        return self._of_architecture(architecture, experts if self.num_experts else {})

    def _of_architecture(self, architecture: str, others: Mapping[str, Any]) -> dict[str, Any]:
        sizes: dict[str, Any] = {
            "block_count": self.num_layers,
            "context_length": _CONTEXT,
            "embedding_length": self.hidden_size,
            "feed_forward_length": self.intermediate_size,
            "attention.head_count": self.num_heads,
            "attention.head_count_kv": self.num_kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": _EPSILON,
            "rope.dimension_count": self.head_dim,
            "rope.freq_base": _THETA,
            "vocab_size": self.vocab_size,
            **others,
        }
        return {
            "general.architecture": architecture,
            "general.alignment": _ALIGNMENT,
            **{f"{architecture}.{key}": size for key, size in sizes.items()},
        }


@dataclass(frozen=True)
class HybridShape(Shape):
    """Sizes of a Granite 4 hybrid without experts. It is written as a GGUF file only.

    attention_layers: the others are Mamba-2 layers. state_size: of their heads, which have 64
    channels each and are twice as wide together as the hidden size.
    """

    attention_layers: tuple[int, ...] = ()
    state_size: int = 128

    @property
    def inner(self) -> int:
        return 2 * self.hidden_size

    def weights(self, stacked: bool = True) -> Iterator["Weight"]:
        """Yield the weights of a hybrid, whose Mamba-2 layers replace the attention."""
        for weight in super().weights(stacked):
            _, _, rest = weight.gguf.partition("blk.")
            layer, _, part = rest.partition(".")
            if not rest or int(layer) in self.attention_layers or not part.startswith("attn_"):
                yield weight
            elif part == "attn_norm":
                yield weight
                yield from self._mixer(f"blk.{layer}.")

    def _mixer(self, prefix: str) -> Iterator["Weight"]:
        """Yield the weights of a Mamba-2 layer. A state forgets half of itself in 14 tokens."""
        inner, heads = self.inner, self.inner // _MAMBA_HEAD
        channels = inner + 2 * self.state_size
        yield Weight(f"{prefix}ssm_in", "", (inner + channels + heads, self.hidden_size))
        yield Weight(f"{prefix}ssm_conv1d", "", (channels, 4), is_float32=True)
        for name, suffix, shape, value in (
            ("ssm_conv1d", ".bias", (channels,), 0.0),
            ("ssm_dt", ".bias", (heads,), -3.0),
            ("ssm_a", "", (heads, 1), -1.0),
            ("ssm_d", "", (heads, 1), 1.0),
            ("ssm_norm", ".weight", (1, inner), 1.0),
        ):
            yield Weight(prefix + name, "", shape, suffix, is_float32=True, value=value)
        yield Weight(f"{prefix}ssm_out", "", (self.hidden_size, inner))

    def metadata(self) -> dict[str, Any]:
        layers = range(self.num_layers)
        kv_heads = [self.num_kv_heads * (layer in self.attention_layers) for layer in layers]
        return self._of_architecture(
            "granitehybrid",
            {
                "context_length": _HYBRID_CONTEXT,
                "expert_shared_feed_forward_length": self.intermediate_size,
                "attention.head_count_kv": kv_heads,
                "attention.scale": 1 / self.head_dim,
                "embedding_scale": 2.0,  # more, and a token is followed by itself
                "logit_scale": 1.0,
                "residual_scale": 0.22,
                "rope.scaling.finetuned": False,
                "ssm.conv_kernel": 4,
                "ssm.inner_size": self.inner,
                "ssm.state_size": self.state_size,
                "ssm.time_step_rank": self.inner // _MAMBA_HEAD,
                "ssm.group_count": 1,
            },
        )


@dataclass(frozen=True)
class Weight:
    """A weight. gguf, hugging_face: its names, without ".weight".

    shape: [out, in], [width] or [experts, out, in].
    suffix: the end of its name in a GGUF file. is_float32: in files of any form.
    value: all of its numbers; None for random ones, or for ones of a norm.
    """

    gguf: str
    hugging_face: str
    shape: tuple[int, ...]
    suffix: str = ".weight"
    is_float32: bool = False
    value: float | None = None


SHAPES: Final[Mapping[str, Shape]] = {
    "1b": Shape(2048, 16, 32, 8, 64, 8192, 49_152, tied=True),
    "3b": Shape(3072, 28, 24, 8, 128, 8192, 49_152, tied=True),
    "8b": Shape(4096, 32, 32, 8, 128, 14_336, 49_152, tied=False),
    "wide": Shape(1536, 10, 12, 4, 128, 12_288, 151_936, tied=False),
    "7b-a1b": Shape(2048, 16, 16, 16, 128, 1024, 49_152, tied=False, num_experts=64, top_k=8),
    "1b-hybrid": HybridShape(
        1536, 22, 24, 6, 64, 6144, 49_152, tied=True, attention_layers=(5, 15)
    ),
    "0.2b-hybrid": HybridShape(
        768, 12, 12, 3, 64, 3072, 49_152, tied=True, attention_layers=(3, 8)
    ),
}
"""3b and 8b: Llama 3.2 3B and Llama 3.1 8B with a smaller vocabulary. wide: 1.1 billion parameters
in other proportions. 7b-a1b: the sizes of OLMoE-1B-7B, a mixture of experts, as a Qwen3-MoE.
1b-hybrid, 0.2b-hybrid: the ratios of Granite 4 micro, of which every tenth layer has attention."""


def synthetic_file(
    name: str,
    form: Form,
    kind: Literal["gguf", "folder"],
    environment: HostEnvironment,
    shapes: Mapping[str, Shape] = SHAPES,
) -> str:
    """Return the path of a GGUF file, or of a bfloat16 folder, written now if it does not exist.

    Raises ModelError if the disk has too little space, or the tokenizer cannot be downloaded.
    """
    shape = shapes[name]
    root = os.path.join(environment.cache, "synthetic")
    path = os.path.join(root, f"{name}-bf16" if kind == "folder" else f"{name}-{form}.gguf")
    with exclusive(path + ".lock"), closing(open_display(sys.stderr)) as display:
        if os.path.exists(path):
            return path
        tokenizer = prepared_model(TOKENIZER_OF, environment, display)
        types = [
            "BF16" if kind == "folder" else shape.block_type(weight, form)
            for weight in shape.weights(kind == "gguf")
        ]
        sizes = map(_num_bytes, types, (weight.shape for weight in shape.weights(kind == "gguf")))
        check_space(root, sum(sizes))
        display.notice(f"writing {path}")
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=root) as workspace:
            target = Path(workspace, "model")
            if kind == "folder":
                _write_folder(target, shape, Path(tokenizer.folder))
            else:
                _write_gguf(target, shape, types, tokenizer.source)
            os.replace(target, path)
    return path


# ---- Files ----


def _write_folder(target: Path, shape: Shape, tokenizer: Path) -> None:
    target.mkdir()
    for name in _TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copyfile(tokenizer / name, target / name)
    _pad_tokenizer(target / "tokenizer.json", shape.vocab_size)
    (target / "config.json").write_text(json.dumps(shape.config(), indent=2))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in shape.weights(stacked=False):
        begin, end = end, end + _num_bytes("BF16", weight.shape)
        header[f"{weight.hugging_face}.weight"] = {
            "dtype": "BF16",
            "shape": weight.shape,
            "data_offsets": (begin, end),
        }
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % 8)
    with open(target / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(packed)) + packed)
        for number, weight in enumerate(shape.weights(stacked=False)):
            _write_weight(file, "BF16", weight, number)


def _pad_tokenizer(path: Path, vocab_size: int) -> None:
    """Give every token of the model a text: a server may decode any of them."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    added = {token["id"] for token in tokenizer["added_tokens"]}
    known = max(added.union(vocabulary.values())) + 1
    if known < vocab_size:
        vocabulary |= {_unused(token): token for token in range(known, vocab_size)}
        path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def _unused(token: int) -> str:
    return f"unused{token}"


_ALIGNMENT: Final = 32
_TYPE_NUMBERS: Final = {name: number for number, (name, _, _) in TENSOR_TYPES.items()}


def _write_gguf(target: Path, shape: Shape, types: Sequence[str], source: str) -> None:
    """source: GGUF file whose tokenizer is copied."""
    values = _metadata(shape, gguf_header.read(source).values)
    weights = list(shape.weights())
    head = struct.pack("<4sIQQ", gguf_header.MAGIC, 3, len(weights), len(values))
    head += b"".join(_text(key) + _packed(value) for key, value in values.items())
    offset = 0
    for weight, kind in zip(weights, types, strict=True):
        dimensions = struct.pack(f"<{len(weight.shape)}Q", *reversed(weight.shape))
        head += (
            _text(weight.gguf + weight.suffix) + struct.pack("<I", len(weight.shape)) + dimensions
        )
        head += struct.pack("<IQ", _TYPE_NUMBERS[kind], offset)
        offset += _aligned(_num_bytes(kind, weight.shape))
    with open(target, "wb") as file:
        file.write(head.ljust(_aligned(len(head)), b"\0"))
        for number, (weight, kind) in enumerate(zip(weights, types, strict=True)):
            _write_weight(file, kind, weight, number)
            file.write(bytes(-file.tell() % _ALIGNMENT))


def _metadata(shape: Shape, source: Mapping[str, Any]) -> dict[str, Any]:
    values = shape.metadata()
    values |= {key: value for key, value in source.items() if key.startswith("tokenizer.")}
    tokens = values["tokenizer.ggml.tokens"]
    unused = range(len(tokens), shape.vocab_size)
    values["tokenizer.ggml.tokens"] = [*tokens, *map(_unused, unused)]  # as in _pad_tokenizer
    values["tokenizer.ggml.token_type"] = [
        *values["tokenizer.ggml.token_type"],
        *(1 for _ in unused),
    ]
    return values


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _packed(value: Any) -> bytes:
    """Return type and value of a metadata field, with the types that llama.cpp expects."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    code, packed = ("i", 5) if isinstance(value[0], int) else ("f", 6)
    return struct.pack(f"<IIQ{len(value)}{code}", 9, packed, len(value), *value)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _num_bytes(kind: str, shape: Sequence[int]) -> int:
    _, numbers, num_bytes = TENSOR_TYPES[_TYPE_NUMBERS[kind]]
    return prod(shape) // numbers * num_bytes


# ---- Weights ----

_CHUNK_BLOCKS: Final = 1 << 16
_SCALES: Final[Mapping[str, Mapping[int, float]]] = {
    "Q8_0": {0: 1 / 73.9},
    "Q4_K": {0: 1 / 258, 2: 7.5 / 258},
    "Q6_K": {208: 1 / 1366},
}
"""Offset of each float16 scale in a block, and its value for weights with standard deviation 1 if
all other bytes are random. Q4_K is d · scale · q - dmin · minimum, where q is 7.5 on average."""


def _write_weight(file: BinaryIO, kind: str, weight: Weight, seed: int) -> None:
    """Write random numbers with standard deviation 1 / sqrt(columns), or ones for a norm."""
    shape = weight.shape
    if len(shape) == 1 or weight.value is not None:
        value = 1.0 if weight.value is None else weight.value
        # The upper half of a float32 is a bfloat16.
        file.write(struct.pack("<f", value)[0 if kind == "F32" else 2 :] * prod(shape))
        return
    import numpy as np

    random = np.random.SFC64(seed)
    deviation = 1 / sqrt(shape[-1])
    if kind == "F32":
        drawn = np.random.default_rng(seed).standard_normal(shape, np.float32)
        file.write((drawn * np.float32(deviation)).tobytes())
        return
    _, numbers, num_bytes = TENSOR_TYPES[_TYPE_NUMBERS[kind]]
    left = prod(shape) // numbers
    while left:
        count = min(left, _CHUNK_BLOCKS * 32 // numbers)
        raw = random.random_raw(-(-count * num_bytes // 8)).view(np.uint8)
        blocks = raw[: count * num_bytes].reshape(count, num_bytes)
        if kind == "BF16":
            # 16 random bits as an integer of standard deviation 18,918, cut to its upper half
            values = blocks.view(np.int16) * np.float32(deviation / 18_918)
            blocks = (values.view(np.uint32) >> 16).astype(np.uint16)
        for offset, scale in _SCALES.get(kind, {}).items():
            packed = struct.pack("<e", scale * deviation)
            blocks[:, offset : offset + 2] = np.frombuffer(packed, np.uint8)
        file.write(blocks.tobytes())
        left -= count
