"""The suite that makes docs/transformers-models.md: all language models of transformers."""

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from deploy.models import hf_folder, wrapped_model
from proto.errors import ModelError
from tests.fakes.prepared_models import prepare
from tests.fakes.tiny_transformers import MODEL_TYPES
from tests.fakes.tiny_wrapped import WRAPPING_TYPES, default_json, save_wrapped
from tests.worker.models.test_families import prove_on_one_rank
from tests.worker.models.test_transformers_model import (
    assert_agrees,
    assert_same_tokens,
    config_json,
    load_index,
)
from worker.models.families import FAMILIES
from worker.models.transformers_model import spec_of_transformers

LIST = Path(__file__).parents[3] / "docs" / "transformers-models.md"


class Wrapped(NamedTuple):
    """What the list says of a model type that wraps a language model."""

    language_model: str
    result: str


@pytest.mark.suite("transformers")
def test_the_list_of_all_architectures_is_true(tmp_path: Path) -> None:
    """Run every architecture of transformers' registry, and compare with the list in docs."""
    names = [name for name in MODEL_TYPES if name not in WRAPPING_TYPES]
    results = {name: result_of(name, tmp_path / name) for name in names}
    assert not [name for name, result in results.items() if result == "differs"]
    wrapped = {name: result_of_wrapped(name, tmp_path / f"in {name}") for name in WRAPPING_TYPES}
    assert not [name for name, each in wrapped.items() if each.result == "differs"]
    made = as_document(results, wrapped)
    known = LIST.read_text() if LIST.exists() else ""
    LIST.write_text(made)
    assert known == made, f"{LIST.name} was not true; it is now"


def result_of(model_type: str, folder: Path) -> str:
    """Return what the list says of a model type."""
    try:
        spec_of_transformers(config_json(model_type))
        assert_agrees(model_type, folder)
    except ModelError as error:
        return reason_of(error)
    except AssertionError:
        return "differs"
    except Exception as error:
        return f"not tested: {type(error).__name__}"
    return "agrees"


def result_of_wrapped(model_type: str, folder: Path) -> Wrapped:
    """Return what the list says of a model type that wraps a language model."""
    try:
        found = wrapped_model.find(default_json(model_type))
    except ModelError as error:
        return Wrapped("–", reason_of(error))
    if found is None:
        return Wrapped("–", "its language model is the decoder of another model")
    architecture = found.config["architectures"][0]
    is_native = architecture in FAMILIES
    try:
        model = save_wrapped(model_type, folder)
    except Exception:
        return Wrapped(architecture, "found; transformers makes no tiny model of it here")
    try:
        contents = hf_folder.read(str(folder), lambda what: None)
        prepared = folder / "prepared", dict(contents.config), contents.tensors
        decoder = None if is_native else load_index(*prepared)
    except ModelError as error:
        return Wrapped(architecture, reason_of(error))
    try:
        with torch.inference_mode():
            model(input_ids=torch.tensor([[3, 4, 5]]))
    except Exception:
        return Wrapped(architecture, "found; its class in transformers does not compute text alone")
    try:
        if decoder is None:
            prove_on_one_rank(prepare(*prepared), model)
        else:
            assert_same_tokens(model, decoder)
    except AssertionError:
        return Wrapped(architecture, "differs")
    return Wrapped(architecture, "agrees, on tokend's own code" if is_native else "agrees")


def reason_of(error: ModelError) -> str:
    """Return the reason without the architecture that it begins with."""
    text = " ".join(str(error).split("transformers: ", 1)[-1].split())
    return re.sub(r"^\w+ForConditionalGeneration: ", "", text)


def as_document(results: dict[str, str], wrapped: dict[str, Wrapped]) -> str:
    agreeing = [name for name, result in results.items() if result == "agrees"]
    of_families = {name for family in FAMILIES.values() for name in family.model_types}
    refused = {name: reason for name, reason in results.items() if reason != "agrees"}
    own = [name for name in refused if name in of_families]
    rows = [f"| {name} | {reason} |" for name, reason in refused.items() if name not in own]
    wrapping = [f"| {name} | {' | '.join(each)} |" for name, each in wrapped.items()]
    head = HEAD.format(len(agreeing))
    return "\n".join(
        [head, *fill(agreeing), OWN, *fill(own), TABLE, *rows, WRAPPED_TABLE, *wrapping, ""]
    )


def fill(names: list[str]) -> list[str]:
    return textwrap.wrap(", ".join(names), 98, break_on_hyphens=False)


HEAD = """# Models on transformers' code

What the suite `transformers` finds for each model type of transformers' registry of causal
language models. It makes a tiny random model and computes two sequences in one batch, a prompt in
chunks; greedy tokens in float32 must equal those of transformers alone. What cannot run is
refused by name before a weight is read.

Attention, KV pages, sliding windows, soft caps and sinks are tokend's, and so are the linear
layers that a step calls: bfloat16 weights on a CPU are multiplied by tokend's kernels, float32
weights by oneDNN, weights on a GPU by torch. Experts, norms, embeddings, rotations and
activations are transformers'. A router that the model keeps in float32 stays transformers'.

## The {} model types that agree
"""
OWN = """
## Those that run on tokend's own code alone

Families of tokend's own, which transformers' code cannot run over KV pages: most keep the state of
recurrent layers.
"""
TABLE = """
## The others

| model type | refused because |
|---|---|"""
WRAPPED_TABLE = """
## Models that wrap a language model

A folder for images or audio, in which a language model stands beside other parts, is served as its
language model, for text; the README lists those that read images, too. transformers' class of the
whole model makes a tiny folder and computes the same prompts; the tokens are compared as above.

| model type | language model | result |
|---|---|---|"""
