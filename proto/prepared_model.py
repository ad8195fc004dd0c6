"""A prepared model: converted once, so that later starts need not parse or convert it.

`deploy` writes one folder per model. The worker reads the tensors; the front end reads tokenizer
and chat template. The folder contains

    manifest.json        this Struct as JSON, written last: its presence means complete
    config.json          Hugging Face style model configuration
    tokenizer.json       for the `tokenizers` library
    tokenizer_config.json
    chat_template.jinja, additional_chat_templates/tool_use.jinja
                         absent for a model without them
    tensors.msgpack      TensorIndex
    digest.msgpack       WeightsDigest; written by the first worker that needs it
    kernel_times.msgpack KernelTimes; written by the first worker on each kind of machine
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import msgspec

from proto.errors import ModelError, shown
from proto.pooling import Pooler

MANIFEST_VERSION = 5
FP8: Final = "F8_E4M3"
"""As safetensors names it."""

CHAT_TEMPLATES: Final = {
    "default": "chat_template.jinja",
    "tool_use": "additional_chat_templates/tool_use.jinja",
}
"""Name of a chat template → its file, as in folders of transformers. `tool_use` renders requests
with tools, `default` all others, and all of a model without the former."""
TEMPLATE_FILES: Final = "additional_chat_templates/*.jinja"
"""Files of a folder's templates other than the default one."""
ModelSetting = tuple[str, bool | int | float | str | None]
"""Key and value of a model's own settings of the sampling; see proto/generation_config.py."""

FileStamp = tuple[int, int, int, int]
"""Inode, bytes, and times (ns) of the last change of the data and of the inode; see file_stamp."""


class ModelFamily(NamedTuple):
    """A supported architecture.

    module: of `worker.models`. gguf: the name of the architecture in GGUF files; "" if these are
    not supported. models: those that have it, for people. is_encoder: it attends in both directions
    and only pools. wrapped_types: `model_type` of language models inside models for images that
    have this arithmetic for text, beside the `model_type` of the architecture itself.
    pooling_gguf: the name in GGUF files of models that only pool, where it is another one.
    """

    module: str
    gguf: str
    models: str
    is_encoder: bool = False
    wrapped_types: tuple[str, ...] = ()
    pooling_gguf: str = ""

    @property
    def gguf_names(self) -> tuple[str, ...]:
        """All names in GGUF files."""
        return tuple(filter(None, (self.gguf, self.pooling_gguf)))


FAMILIES: Final = {
    "BertModel": ModelFamily(
        "bert", "bert", "BERT, MiniLM, BGE, E5, cross encoders of these", is_encoder=True
    ),
    "Cohere2ForCausalLM": ModelFamily("cohere2", "cohere2", "Command R7B, Command A"),
    "DeepseekV2ForCausalLM": ModelFamily(
        "deepseek2", "deepseek2", "DeepSeek-V2, V2.5, V2-Lite, Coder-V2"
    ),
    "DeepseekV3ForCausalLM": ModelFamily(
        "deepseek3", "deepseek2", "DeepSeek-V3, R1, V3.1, Kimi K2, K2.5"
    ),
    "Ernie4_5ForCausalLM": ModelFamily("ernie45", "ernie4_5", "ERNIE 4.5 0.3B"),
    "Exaone4ForCausalLM": ModelFamily("exaone4", "exaone4", "EXAONE 4"),
    "Gemma2ForCausalLM": ModelFamily("gemma2", "gemma2", "Gemma 2"),
    "Gemma3ForCausalLM": ModelFamily(
        "gemma3", "gemma3", "Gemma 3, EmbeddingGemma", pooling_gguf="gemma-embedding"
    ),
    "GlmForCausalLM": ModelFamily("glm", "chatglm", "GLM-4-9B in transformers' form"),
    "Glm4ForCausalLM": ModelFamily("glm4", "glm4", "GLM-4-0414"),
    "Glm4MoeForCausalLM": ModelFamily(
        "glm4moe",
        "glm4moe",
        "GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.5V, GLM-4.6V",
        wrapped_types=("glm4v_moe_text",),
    ),
    "Glm4MoeLiteForCausalLM": ModelFamily("glm4moelite", "deepseek2", "GLM-4.7-Flash"),
    "GptOssForCausalLM": ModelFamily("gptoss", "gpt-oss", "gpt-oss-20b, gpt-oss-120b"),
    "GraniteForCausalLM": ModelFamily("granite", "granite", "Granite 3"),
    "GraniteMoeForCausalLM": ModelFamily(
        "granitemoe", "granitemoe", "Granite 3 1B-A400M, 3B-A800M"
    ),
    "LlamaForCausalLM": ModelFamily(
        "llama", "llama", "Llama 1 to 3.3, SmolLM 2 and other models of that architecture"
    ),
    "MinistralForCausalLM": ModelFamily("ministral", "llama", "Ministral 8B with windows"),
    "Ministral3ForCausalLM": ModelFamily("ministral3", "mistral3", "Ministral 3"),
    "MistralForCausalLM": ModelFamily(
        "mistral", "llama", "Mistral 7B, Nemo, Small, Large, Ministral"
    ),
    "MixtralForCausalLM": ModelFamily("mixtral", "llama", "Mixtral"),
    "ModernBertModel": ModelFamily(
        "modernbert", "modern-bert", "ModernBERT and embeddings of it", is_encoder=True
    ),
    "Olmo2ForCausalLM": ModelFamily("olmo2", "olmo2", "OLMo 2"),
    "Olmo3ForCausalLM": ModelFamily("olmo3", "olmo2", "OLMo 3"),
    "OlmoeForCausalLM": ModelFamily("olmoe", "olmoe", "OLMoE-1B-7B"),
    "Phi3ForCausalLM": ModelFamily("phi3", "phi3", "Phi-3, Phi-3.5, Phi-4, Phi-4-mini"),
    "Qwen2ForCausalLM": ModelFamily(
        "qwen2",
        "qwen2",
        "Qwen2, Qwen2.5, QwQ, Qwen2-VL, Qwen2.5-VL",
        wrapped_types=("qwen2_vl_text", "qwen2_5_vl_text"),
    ),
    "Qwen2MoeForCausalLM": ModelFamily("qwen2moe", "qwen2moe", "Qwen1.5-MoE, Qwen2-57B-A14B"),
    "Qwen3ForCausalLM": ModelFamily(
        "qwen3", "qwen3", "Qwen3, Qwen3-VL", wrapped_types=("qwen3_vl_text",)
    ),
    "Qwen3MoeForCausalLM": ModelFamily(
        "qwen3moe",
        "qwen3moe",
        "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder, Qwen3-VL-30B-A3B",
        wrapped_types=("qwen3_vl_moe_text",),
    ),
    "Qwen3NextForCausalLM": ModelFamily("qwen3next", "", "Qwen3-Next-80B-A3B"),
    "Qwen3_5ForCausalLM": ModelFamily("qwen35", "qwen35", "Qwen 3.5"),
    "Qwen3_5MoeForCausalLM": ModelFamily("qwen35moe", "qwen35moe", "Qwen 3.5 with experts"),
    "RobertaModel": ModelFamily(
        "roberta", "", "RoBERTa, cross encoders of it", is_encoder=True, pooling_gguf="bert"
    ),
    "SeedOssForCausalLM": ModelFamily("seedoss", "seed_oss", "Seed-OSS"),
    "SmolLM3ForCausalLM": ModelFamily("smollm3", "smollm3", "SmolLM3"),
    "Starcoder2ForCausalLM": ModelFamily("starcoder2", "starcoder2", "StarCoder 2"),
    "XLMRobertaModel": ModelFamily(
        "roberta",
        "",
        "XLM-RoBERTa, BGE-M3 (dense), multilingual E5",
        is_encoder=True,
        pooling_gguf="bert",
    ),
}
"""The supported architectures of config.json."""


TEXT_BODIES: Final = ("glm4v_text", "glm_ocr_text")
"""`model_type` of language models that transformers has without a head, for models for images.

With a head without a bias they give the logits of the whole model, which is tested; heads of others
scale them.
"""


def family_of(architecture: str) -> ModelFamily:
    """Return the family of an architecture; raises ModelError for one that is not supported."""
    family = FAMILIES.get(architecture)
    if family is None:
        raise ModelError(
            f"{shown(architecture)} is not supported; supported: {', '.join(FAMILIES)}"
        )
    return family


def supported_models() -> list[str]:
    """Return the table of supported architectures in Markdown, and what it omits, a line each."""
    head = ("Models", "Architecture in config.json", "In GGUF files")
    rows = [
        (family.models, architecture, ", ".join(family.gguf_names) or "–")
        for architecture, family in FAMILIES.items()
    ]
    rows.sort(key=lambda row: row[0].lower())
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = (head, tuple("-" * width for width in widths), *rows)
    table = [f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines]
    return [*table, "", *_WRAPPED.splitlines()]


_WRAPPED: Final = """\
A folder in which one of these stands beside a vision or an audio part loads as the language model
alone, for text (`...ForConditionalGeneration` with a `text_config`: Gemma 3 from 4B, Mistral
Small 3.1, Ministral 3, LLaVA, Idefics 3, InternVL, Qwen2-VL to Qwen3-VL with and without experts,
GLM-4.5V, Qwen 3.5, Kimi K2.5 and others)."""
"""Below the table."""


class TensorPart(msgspec.Struct, array_like=True, frozen=True):
    """One of the tensors of a safetensors file that a quantised weight consists of, as it is there.

    Fields as in TensorEntry.
    """

    type: str
    shape: tuple[int, ...]
    file: int
    offset: int
    num_bytes: int


class TensorEntry(msgspec.Struct, array_like=True, frozen=True):
    """Location of one tensor, or of some of its rows.

    name: as in the file (GGUF or safetensors name).
    type: GGUF type name ("Q4_1", "F32"), safetensors dtype ("BF16"), or that of a weight of several
        parts ("INT4_128").
    shape: as in torch, rows first; in numbers.
    file: index into TensorIndex.files.
    offset, num_bytes: byte range in that file; with parts, of the first and of all together.
    packing: how a weight of several parts is stored, which worker.loader.quantised reads; "" for a
        tensor by itself.
    parts: these parts, whole. options: numbers that the packing needs.
    first_row: row of the parts with which the tensor begins.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    file: int
    offset: int
    num_bytes: int
    packing: str = ""
    parts: dict[str, TensorPart] = {}
    options: dict[str, float] = {}
    first_row: int = 0

    @property
    def byte_ranges(self) -> list[tuple[int, int, int]]:
        """File, offset and number of bytes of the tensor, or of the whole parts of its weight."""
        ranges = self.parts.values() or (self,)
        return [(each.file, each.offset, each.num_bytes) for each in ranges]

    def with_shape(self, shape: tuple[int, ...]) -> "TensorEntry":
        """Return the same numbers in another shape, with rows as long as before."""
        return msgspec.structs.replace(self, shape=shape)

    def with_rows(self, first: int, end: int) -> "TensorEntry":
        """Return these rows with all columns."""
        shape = (end - first, *self.shape[1:])
        if self.parts:
            return msgspec.structs.replace(self, shape=shape, first_row=self.first_row + first)
        row_bytes = self.num_bytes // self.shape[0]
        return msgspec.structs.replace(
            self,
            shape=shape,
            offset=self.offset + first * row_bytes,
            num_bytes=(end - first) * row_bytes,
        )


class TensorIndex(msgspec.Struct, frozen=True):
    """All tensors of a model. `format` is "gguf" or "safetensors"; `files` are absolute paths."""

    format: str
    files: tuple[str, ...]
    tensors: tuple[TensorEntry, ...]


class WeightsDigest(msgspec.Struct, frozen=True):
    """SHA-256 of all weights, and the state of their files when it was computed.

    stamps: one for each of TensorIndex.files. sha256: hex; see worker.loader.digest.
    """

    stamps: tuple[FileStamp, ...]
    sha256: str


class KernelTimes(msgspec.Struct, frozen=True):
    """Times of the kernels that can compute products and attention; see worker.kernel_choice.

    machines: by CPU, threads and kernels; by product or heads; by variant: nanoseconds.
    """

    machines: dict[str, dict[str, dict[str, tuple[float, ...]]]]


MAX_TEMPLATE_BYTES: Final = 1 << 20
"""Largest file of a chat template."""
MAX_TEXT_BYTES: Final = 256 << 20
"""Largest file of a model that is read as a whole: JSON, or a vocabulary."""
_KINDS: Final = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def require_regular(path: str | Path, mode: int) -> None:
    """Raise ModelError unless a file of this st_mode is a regular one."""
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise ModelError(f"{path} is {kind}, not a regular file")


def open_model_file(path: str | Path) -> BinaryIO:
    """Open a file of a model that is not trusted. Raises OSError, or ModelError naming the file.

    Opening a FIFO would wait for its writer for ever, reading a device might never end, and what
    the path means may change between a check and the opening.
    """
    require_regular(path, os.stat(path).st_mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        require_regular(path, os.fstat(descriptor).st_mode)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_model_file(path: str | Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of a file of a model that is not trusted, which is at most that large.

    Raises OSError, or ModelError naming the file.
    """
    with open_model_file(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ModelError(f"{path} is larger than {max_bytes} bytes")
    return content


def file_stamp(path: str) -> FileStamp:
    """Return what differs after any change of a file.

    The time of the last change of the inode moves whenever the file is written, and no system call
    sets it back, unlike the time of the last change of the data. Raises OSError.
    """
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class PreparedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest: facts that processes need before they load the model.

    folder: absolute path of the prepared folder.
    name: as given by the user, or the last component of the path.
    source: absolute path of the GGUF file or Hugging Face folder.
    architecture: the family, e.g. "LlamaForCausalLM".
    vocab_size: rows of the output head; token ids are below it.
    max_position: maximum number of positions of the model.
    eos_token_ids: tokens at which generation ends by default. end_reasons: of each, the
        text, and in brackets which files say so.
    pooler: how the model pools, if its folder says so; None for a model that only generates.
    generates: whether it has a language head. hidden_size: numbers of a hidden state.
    unloaded_parts: what the source has beside this language model, such as "vision".
    generation_settings: about sampling, of generation_config.json or the GGUF file.
    weights_sample: hex digest of names, types, shapes and some bytes of all tensors. It tells
        models apart, but not two states of an edited one; part of the fingerprint of KV that ends
        with the process.
    """

    version: int = MANIFEST_VERSION
    folder: str
    name: str
    source: str
    architecture: str
    vocab_size: int
    max_position: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    end_reasons: tuple[str, ...] = ()
    weights_sample: str
    has_chat_template: bool = False
    pooler: Pooler | None = None
    generates: bool = True
    hidden_size: int = 0
    unloaded_parts: tuple[str, ...] = ()
    generation_settings: tuple[ModelSetting, ...] = ()

    @property
    def ends_notice(self) -> str:
        """Which tokens end an answer, and why, in words."""
        ends = ", ".join(map("{} {}".format, self.eos_token_ids, self.end_reasons))
        return ends or "none, so answers go on to their limit"

    @property
    def text_only_notice(self) -> str:
        """What the source has and nothing reads, in words; "" for a language model alone."""
        if not self.unloaded_parts:
            return ""
        parts = " and ".join(self.unloaded_parts)
        are = "parts are" if len(self.unloaded_parts) > 1 else "part is"
        return f"the {parts} {are} not loaded: text only"
