"""A prepared model: converted once, so that later starts need not parse or convert it.

`deploy` writes one folder per model. The worker reads the tensors; the front end reads tokenizer
and chat template. The folder contains

    manifest.json        this Struct as JSON, written last: its presence means complete
    config.json          Hugging Face style model configuration
    tokenizer.json       for the `tokenizers` library
    tokenizer_config.json
    chat_template.jinja, additional_chat_templates/tool_use.jinja
                         absent for a model without them
    preprocessor_config.json, processor_config.json
                         of a model that reads images: settings of its image processor, and of what
                         joins images and text; the latter is absent if the source has none
    tensors.msgpack      TensorIndex
    digest.msgpack       WeightsDigest; written by the first worker that needs it
    kernel_times.msgpack KernelTimes; written by the first worker on each kind of machine
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from proto.errors import ModelError
from proto.messages.pooling import Pooler

MANIFEST_VERSION = 5
FP8: Final = "F8_E4M3"
"""As safetensors names it."""
TENSOR_TYPES: Final[Mapping[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
"""Number of a tensor type in a GGUF file → its name in ggml, numbers and bytes of a block.
Types that cannot be served are here too, so that the error about them has a name."""

CHAT_TEMPLATES: Final = {
    "default": "chat_template.jinja",
    "tool_use": "additional_chat_templates/tool_use.jinja",
}
"""Name of a chat template → its file, as in folders of transformers. `tool_use` renders requests
with tools, `default` all others, and all of a model without the former."""
VISION_PREFIX: Final = "vision."
"""How the names of the tensors of a vision part begin."""
TEMPLATE_FILES: Final = "additional_chat_templates/*.jinja"
"""Files of a folder's templates other than the default one."""
ModelSetting = tuple[str, bool | int | float | str | None]
"""Key and value of a model's own sampling settings; see proto/settings/generation_config.py."""

FileStamp = tuple[int, int, int, int]
"""Inode, bytes, and times (ns) of the last change of the data and of the inode; see file_stamp."""


TEXT_BODIES: Final = ("glm4v_text", "glm_ocr_text")
"""`model_type` of language models that transformers has without a head, for models for images.

With a head without a bias they give the logits of the whole model, which is tested; heads of others
scale them.
"""


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
    """Times of the kernels that can compute products and attention; see worker.cpu.kernel_choice.

    machines: by CPU, threads and kernels; by product or heads; by variant: nanoseconds.
    """

    machines: dict[str, dict[str, dict[str, tuple[float, ...]]]]


class PackedWeights(msgspec.Struct, frozen=True):
    """Where the packed weights of a rank lie in a file of memory; see worker.host.shared_weights.

    fingerprint: of all that the bytes depend on. num_bytes: of the file before this index.
    places: offset and bytes of each weight, by key.
    """

    fingerprint: bytes
    num_bytes: int
    places: dict[str, tuple[int, int]]


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


class VisionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What processes need to know of a model's vision part before they load it.

    Its settings are in the folder: `vision_config` and `vision_projector` in config.json, the image
    processor's in preprocessor_config.json, and its tensors are among the others, with names that
    begin with VISION_PREFIX.

    architecture: of the model with its vision part, e.g. "Idefics3ForConditionalGeneration".
    image_token_id: id of the token whose embedding is replaced by a row of encoder output.
    max_embeds: most rows of the encoder output of one image.
    is_bidirectional: whether the tokens of an image attend to each other in both directions.
    mrope_merge: where tokens of images have three positions (M-RoPE): patches of a side of the
        square that becomes a row of encoder output. 0: tokens have one position.
    """

    architecture: str
    image_token_id: int
    max_embeds: int
    is_bidirectional: bool = False
    mrope_merge: int = 0


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
    unloaded_parts: what the source has beside what is loaded, such as "audio".
    generation_settings: about sampling, of generation_config.json or the GGUF file.
    vision: of a model that reads images, too; None for any other.
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
    vision: VisionFacts | None = None

    def served_with(self, max_images: int, max_model_len: int | None) -> "PreparedModel":
        """Return the facts for prompts of at most that many images: with 0, no vision part.

        max_model_len: tokens of a request, None for the model's. Images of any size have no more.
        """
        if self.vision is None:
            return self
        if max_images:
            most = min(self.vision.max_embeds, max_model_len or self.max_position)
            if not self.vision.mrope_merge or most == self.vision.max_embeds:
                return self
            vision = msgspec.structs.replace(self.vision, max_embeds=most)
            return msgspec.structs.replace(self, vision=vision)
        parts = (*self.unloaded_parts, "vision")
        return msgspec.structs.replace(self, vision=None, unloaded_parts=parts)

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
