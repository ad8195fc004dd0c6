"""Compare the bits of logits between two commits: tiny models of every family, on this CPU.

    python -m tests.benchmarks.logit_digests --write FILE     in a tree of one commit
    python -m tests.benchmarks.logit_digests --compare FILE   in a tree of the other one

Each model runs a chunked prompt, a mixed step and decodes through the loader, the model runner and
the KV cache, with each form of its weights and each variant of the kernels that this CPU runs.

The repository holds no digests, because the same code has other bits elsewhere: torch makes the
random weights and the products of float32 weights by the instruction sets of the CPU, and the
kernels are compiled where they run. A file of digests names what they depend on, and is compared
only where all of it is the same. What holds on every machine, that bits depend neither on the
number of threads nor on what ran before, is tests/worker/models/test_logit_digests.py.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch
from gguf import GGMLQuantizationType
from transformers.utils.logging import disable_progress_bar

from deploy.models import gguf_file
from proto.messages.prepared_model import PreparedModel
from proto.settings.config import CpuWeights, ModelConfig
from tests.benchmarks import command
from tests.fakes.devices import CPU, host_device
from tests.fakes.gguf_files import write
from tests.fakes.prepared_models import gguf_index, prepare, prepare_checkpoint, spec_of
from tests.fakes.quantised_checkpoints import SCHEMES, quantise_folder
from tests.fakes.real_engine import runner_of
from tests.fakes.step_messages import StepMessages
from tests.fakes.tiny_checkpoints import CONFIGS, config_in_blocks, save_mxfp4, tiny_model
from tests.fakes.tiny_families import IN_GGUF_FILES, save_gguf
from tests.fakes.tiny_ggufs import SIZES, config_of, tiny
from worker.cpu import kernels
from worker.cpu.build_kernels import SOURCE_DIR, KernelVariant
from worker.cpu.formats import OwnFormat, choose_format
from worker.cpu.kernels import candidate_kernels, load_kernels, runnable_variants
from worker.host.device import HostDevice, cpu_model_name
from worker.loader.block_types import BLOCK_TYPES
from worker.loader.files import read_index
from worker.loader.weights import load_model
from worker.models.decoder import Decoder
from worker.models.families import FAMILIES


@dataclass(frozen=True)
class Form:
    """How a model computes. weights: the setting --cpu-weights. dtype: of its activations."""

    weights: CpuWeights
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.weights}-{str(self.dtype).removeprefix('torch.')}"


DENSE_FORMS: Final = (
    Form("f32", torch.float32),
    Form("bf16"),
    Form("int8"),
    Form("int8", torch.float32),
)
BLOCK_FORMS: Final = (
    Form("packed"),
    Form("packed", torch.float32),
    Form("packed+int8"),
)
"""Of models in blocks."""
_PACKED_SCHEME: Final = "awq 32"
_PROMPTS: Final = {
    seq_id: [(7 * place + 11 * seq_id) % 64 for place in range(length)]
    for seq_id, length in ((1, 20), (2, 6))
}
_NUM_DECODES: Final = 3
_PAGES: Final = 8


def make_folder(name: str, folder: Path) -> PreparedModel:
    """Save and prepare a model of CONFIGS."""
    tiny_model(config_in_blocks(name)).save_pretrained(folder)
    return prepare_checkpoint(folder, folder / "prepared")


def make_in_blocks(name: str, folder: Path) -> PreparedModel:
    """Save and prepare a model of CONFIGS with blocks of 4 bits."""
    model = tiny_model(config_in_blocks(name))
    if name.startswith("gptoss"):
        save_mxfp4(model, folder)
    else:
        model.save_pretrained(folder)
        quantise_folder(folder, SCHEMES["awq 32"])
    return prepare_checkpoint(folder, folder / "prepared")


def make_quantised(scheme: str, folder: Path) -> PreparedModel:
    """Save and prepare a Llama that is quantised in this way."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    config = CONFIGS["llama"]
    tiny_model(type(config)(**config.to_dict() | sizes)).save_pretrained(folder)
    quantise_folder(folder, SCHEMES[scheme])
    return prepare_checkpoint(folder, folder / "prepared")


def make_gguf_blocks(kind: str, folder: Path) -> PreparedModel:
    """Write and prepare a Llama in blocks of a GGUF type."""
    folder.mkdir()
    config = type(CONFIGS["llama"])(**SIZES)
    with torch.no_grad():
        _, tensors = tiny(kind, config, permuted=True)
    write(folder / "model.gguf", tensors)
    return prepare(folder / "prepared", config_of(config), gguf_index(folder / "model.gguf"))


def make_gguf(architecture: str, folder: Path) -> PreparedModel:
    """Write the GGUF file of a family, and prepare it by its metadata."""
    folder.mkdir()
    path, _ = save_gguf(architecture, folder)
    contents = gguf_file.read(str(path), lambda what: None)
    return prepare(folder / "prepared", dict(contents.config), contents.tensors)


class TinyModel(NamedTuple):
    """A model with the forms that it is loaded in. make: writes it to a folder that is new."""

    name: str
    forms: Sequence[Form]
    make: Callable[[Path], PreparedModel]


def every_model() -> Iterator[TinyModel]:
    for name in CONFIGS:
        yield TinyModel(name, DENSE_FORMS, partial(make_folder, name))
        yield TinyModel(name, BLOCK_FORMS, partial(make_in_blocks, name))
    for architecture in IN_GGUF_FILES:
        family, dash, variation = architecture.partition("-")
        name = f"{FAMILIES[family].module}{dash}{variation}.gguf"
        yield TinyModel(name, DENSE_FORMS[1:2], partial(make_gguf, architecture))
    for scheme in SCHEMES:
        yield TinyModel(f"llama ({scheme})", BLOCK_FORMS[:2], partial(make_quantised, scheme))
    for kind in sorted(BLOCK_TYPES & GGMLQuantizationType.__members__.keys()):
        yield TinyModel(f"llama ({kind})", BLOCK_FORMS[:2], partial(make_gguf_blocks, kind))


@contextmanager
def only(variant: KernelVariant) -> Iterator[None]:
    """Let everything run on this variant of the kernels."""
    with patch.object(kernels, "runnable_variants", lambda folder=SOURCE_DIR: [variant]):
        candidate_kernels.cache_clear()
        try:
            yield
        finally:
            candidate_kernels.cache_clear()


def load(prepared: PreparedModel, form: Form, device: HostDevice = CPU) -> Decoder:
    """Load a model on a device of this host; weights have the kernels that load_kernels finds."""
    config = ModelConfig(cpu_weights=form.weights, dtype="bfloat16")
    weight_format = choose_format(config, form.dtype, read_index(prepared), load_kernels())
    spec = spec_of(prepared)
    model = load_model(prepared, spec, form.dtype, device, lambda fraction: None, weight_format)
    weights = weight_format.kernel_weights if isinstance(weight_format, OwnFormat) else []
    used = {weight.multiplied_by.variant for weight in weights}
    assert used <= {load_kernels().variant}
    return model


def digest_of(prepared: PreparedModel, form: Form) -> str:
    """Return a digest of the logits of all sampled positions, and of K and V."""
    device = host_device()
    decoder = load(prepared, form, device)
    digest = hashlib.sha256()
    compute, num_rows = decoder.logits, 0

    def recorded(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal num_rows
        logits = compute(hidden)
        assert logits.isfinite().all()
        digest.update(logits.float().contiguous().numpy().tobytes())
        num_rows += len(logits)
        return logits

    most_groups, num_seqs = 8, len(_PROMPTS)
    runner = runner_of(
        decoder, 1 + num_seqs * most_groups * _PAGES, 1 + num_seqs * _PAGES, form.dtype, device
    )
    num_groups = runner.kv_cache.layout.num_block_groups
    assert num_groups <= most_groups
    steps = StepMessages(num_groups, _PAGES, bool(decoder.spec.state_layers))
    with patch.object(decoder, "logits", recorded):
        runner.execute(steps.next_step({1: _PROMPTS[1]}, {1: 9}))
        runner.execute(steps.next_step({2: _PROMPTS[2]}, {1: len(_PROMPTS[1]) - 9}))
        for _ in range(_NUM_DECODES):
            runner.execute(steps.next_step())
    used = runner.kv_cache.buffer[1 : 1 + num_groups * num_seqs * _PAGES]
    digest.update(used.nan_to_num().contiguous().view(torch.uint8).numpy().tobytes())
    assert num_rows >= num_seqs * (1 + _NUM_DECODES)
    return digest.hexdigest()[:16]


def digests(
    models: Iterable[TinyModel], variants: Sequence[KernelVariant]
) -> Iterator[tuple[str, str]]:
    """Yield what was computed, as "model form variant", and its digest."""
    for model in models:
        with tempfile.TemporaryDirectory(prefix="tokend-digests-") as folder:
            prepared = model.make(Path(folder, "model"))
            for form, variant in product(model.forms, variants):
                with only(variant):
                    yield f"{model.name} {form} {variant.name}", digest_of(prepared, form)


def machine() -> dict[str, str]:
    """Return what the bits depend on besides the code."""
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=False)
    return {
        "cpu": cpu_model_name(),
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "compiler": compiler.stdout.partition("\n")[0],
    }


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.logit_digests", description=(__doc__ or "").split("\n")[0]
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", metavar="FILE", help="write the digests of this tree")
    mode.add_argument("--compare", metavar="FILE", help="compare with the digests of another tree")
    parser.add_argument("--only", default="", metavar="TEXT", help="models whose names begin so")
    arguments = parser.parse_args(words)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    models = (each for each in every_model() if each.name.startswith(arguments.only))
    found: dict[str, Any] = {"machine": machine(), "digests": {}}
    for name, digest in digests(models, runnable_variants()):
        found["digests"][name] = digest
        if sys.stderr.isatty():
            print(f"\r{len(found['digests'])} {name:60.60}", end="", file=sys.stderr, flush=True)
    if arguments.write:
        Path(arguments.write).write_text(json.dumps(found, indent=1) + os.linesep)
        print(f"{len(found['digests'])} digests written to {arguments.write}")
        return 0
    return compare(json.loads(Path(arguments.compare).read_text()), found, arguments.only)


def compare(expected: dict[str, Any], found: dict[str, Any], only: str = "") -> int:
    """Print the differences; return 0 for none, 1 for some, 2 if the machines differ."""
    if expected["machine"] != found["machine"]:
        print(f"not comparable: {expected['machine']} and {found['machine']}")
        return 2
    wanted = {key: each for key, each in expected["digests"].items() if key.startswith(only)}
    status = 0
    for name in sorted(wanted.keys() | found["digests"].keys()):
        here, there = found["digests"].get(name), wanted.get(name)
        if here != there:
            what = "is missing" if not here else "is new" if not there else "has other bits"
            print(f"{name} {what}")
            status = 1
    print(f"{len(found['digests'])} digests: {'they differ' if status else 'all are equal'}")
    return status


if __name__ == "__main__":
    sys.exit(command.run(main))
