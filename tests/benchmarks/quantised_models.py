"""Quantise the packaged model as Hugging Face folders have it, to measure their quality.

`python -m tests.benchmarks.quantised_models FOLDER SCHEME …` writes FOLDER/SCHEME for each of these
schemes of tests/fakes/quantised_checkpoints.py, from the numbers of the packaged model;
`python -m tests.benchmarks.quality --model FOLDER/SCHEME` compares each with its own numbers in
float32. Groups of columns divide 576: "awq 64", "gptq rows", "w8a8", "nf4", "fp8 rows", ….
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch
from safetensors.torch import save_file

from deploy.display import open_display
from deploy.environment import HostEnvironment
from deploy.models.store import prepared_model
from proto.messages.prepared_model import PreparedModel
from tests.benchmarks.command import run
from tests.fakes.devices import CPU
from tests.fakes.quantised_checkpoints import SCHEMES, quantise_folder
from worker.loader.files import read_index
from worker.loader.source import WeightSource
from worker.models.registry import read_config, spec_from_config

_COPIED = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def write_plain(prepared: PreparedModel, folder: Path) -> None:
    """Write the model's numbers as a folder with weights of bfloat16."""
    folder.mkdir(parents=True)
    for name in _COPIED:
        if (Path(prepared.folder) / name).exists():
            shutil.copy(Path(prepared.folder) / name, folder)
    spec = spec_from_config(read_config(prepared))
    source = WeightSource(read_index(prepared), spec, torch.float32, CPU)
    tensors = {
        weight.name_in("safetensors"): source.read(name, dtype=torch.bfloat16)
        for name, weight in spec.weights().items()
    }
    save_file(tensors, folder / "model.safetensors")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.quantised_models")
    parser.add_argument("folder", type=Path)
    parser.add_argument("schemes", nargs="+", choices=SCHEMES, metavar="SCHEME")
    options = parser.parse_args(words)
    with closing(open_display(sys.stderr)) as display:
        around = HostEnvironment.of(os.environ)
        prepared = prepared_model("smollm2-135m-instruct", around, display)
    for name in options.schemes:
        write_plain(prepared, options.folder / name)
        quantise_folder(options.folder / name, SCHEMES[name])


if __name__ == "__main__":
    sys.exit(run(main))
