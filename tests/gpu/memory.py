"""Kernels under the memory checker in small steps; its findings are failures."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable

from tests.gpu.hardware import hardware, rehearsing
from tests.gpu.kernels import ATTENTION, ROOT
from tests.gpu.models import DTYPE
from tests.gpu.random_model import CONFIGS, random_decoder
from tests.gpu.report import Report, demand
from tests.gpu.serving import overlapped_steps
from tests.worker.attention.test_flashinfer_gpu import (
    test_a_replayed_graph_uses_the_latest_plan,
    test_output_equals_float64,
    test_plans_made_ahead_of_the_device_do_not_interfere,
)
from worker.models.registry import spec_from_config

TINY = CONFIGS["1B"] | {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 256,
}

# On the fake GPU only these run.
GRAPHS = (
    test_a_replayed_graph_uses_the_latest_plan,
    test_plans_made_ahead_of_the_device_do_not_interfere,
)


def mixed(report: Report) -> None:
    """Decodes and prefills in one step. Tensors have their own allocations, to find overruns."""
    checked(report, tests(test_output_equals_float64), PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def graphs(report: Report) -> None:
    """Graphs, and plans ahead of the device; graphs need torch's caching allocator."""
    checked(report, tests(*GRAPHS))


def overlapped(report: Report) -> None:
    """Steps of a small model with two in flight."""
    file = report.beside("steps.json")
    words = ["-m", "tests.gpu.one_phase", "memory:steps", str(file)]
    checked(report, words)
    found = Report.read(file)
    report.figure("steps under the checker", found["figures"])
    demand(not found["errors"], "; ".join(found["errors"]))


def steps(report: Report) -> None:
    """The program that `overlapped` runs under the checker."""
    gpu = hardware()
    config = gpu.sizes.configs["8B"] if rehearsing() else TINY
    decoder = random_decoder(spec_from_config(config), DTYPE, gpu.gpu)
    overlapped_steps(report, decoder, 4, 40, 16)


def tests(*functions: Callable[..., None]) -> list[str]:
    """Arguments of Python that run these tests of attention."""
    chosen = GRAPHS if rehearsing() else functions
    words = ["-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-m", hardware().pytest_marks]
    return [*words, *(f"{ATTENTION}::{function.__name__}" for function in chosen)]


def checked(report: Report, words: list[str], **variables: str) -> None:
    """Run Python under the checker with streamed output; raises Failed with its findings."""
    program, *options = hardware().sanitizer
    demand(shutil.which(program) is not None, f"{program} is not on PATH")
    command = [program, *options, sys.executable, "-u", *words]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ | variables,
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
    faults = [each for each in lines if each.startswith("=========") and "Invalid" in each]
    passed = [each for each in lines if each.startswith("PASSED")]
    if "pytest" in words:
        report.figure("tests passed", len(passed))
        demand(bool(passed), f"no test passed under the checker: {lines[-3:]}")
    summary = [each for each in lines if "ERROR SUMMARY" in each]
    if not rehearsing():
        demand(bool(summary), f"{program} gave no summary: {lines[-3:]}")
        report.figure("checker", summary[-1])
    demand(process.returncode == 0, f"status {process.returncode}: {faults[:3] or lines[-3:]}")
