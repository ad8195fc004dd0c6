"""The test suites: what each guards, its time limits and its settings. tests/run.py runs them."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Suite:
    """One pytest run.

    guards: what the suite covers, for the table of tests/README.md.
    seconds: time limit of the whole suite; seconds_per_test: of a single test.
    paths: where tests are collected. select: the suites whose tests it runs; its own name unless it
    runs tests of another suite with other settings.
    processes: how many pytest-xdist workers; 0 runs the tests in one process.
    environment: additional variables.
    in_test, in_all: `test` and `all` run it.
    """

    name: str
    guards: str
    seconds: float
    seconds_per_test: float
    paths: Sequence[str] = ("tests",)
    select: Sequence[str] = ()
    processes: int = 2
    environment: dict[str, str] = field(default_factory=dict)
    in_test: bool = False
    in_all: bool = True

    def command(self, junit: Path, options: Sequence[str]) -> list[str]:
        # The tests of a file share daemons, so they stay in one process
        workers = ["-n", str(self.processes), "--dist", "loadfile"] if self.processes else []
        return [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "--suite",
                ",".join(self.select or [self.name]),
            ),
            *("--timeout", str(self.seconds_per_test), "--junitxml", str(junit)),
            *workers,
            *options,
            *self.paths,
        ]


ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Two test processes on two cores: more threads of torch would wait for each other."""

SUITES = (
    Suite(
        "quick",
        "unit tests of all parts except the engine: no daemon, no real model",
        *(1200, 120),
        environment=ONE_THREAD,
        in_test=True,
    ),
    Suite(
        "engine",
        "scheduler, KV cache and engine, compiled as in an installation",
        *(240, 60),
        paths=("tests/engine_core",),
        environment=ONE_THREAD | {"TOKEND_TEST_COMPILED": "1"},
        in_test=True,
    ),
    Suite(
        "daemons",
        "the real daemon with the packaged model: tokens, APIs, start, end, killed processes",
        *(900, 240),
        in_test=True,
    ),
    Suite(
        "long",
        "unit tests that take long: images and their process, adapters in steps, heads of drafts",
        *(900, 120),
        environment=ONE_THREAD,
    ),
    Suite(
        "devices",
        "the code for GPUs on a fake GPU and in Triton's interpreter, and the reference device",
        *(480, 120),
        environment=ONE_THREAD,
    ),
    Suite(
        "transformers",
        "every architecture of transformers' registry on its code: the list in docs",
        *(600, 600),
    ),
    Suite("lives", "random request sequences of the scheduler, checked by invariants", 900, 600),
    Suite("rehearsal", "the commands for the first hour on a GPU, on the fake GPU", 2400, 300),
    Suite("browser", "the page at / and the page of a trace, in headless Chromium", 1200, 180),
    Suite(
        "settings",
        "the real daemon with other settings: beams, sessions, tenants, reload, drain, downloads",
        *(2400, 300),
    ),
    Suite("chaos", "killed, hung and overloaded processes: no request is lost", 2400, 300),
    Suite(
        "hostile",
        "small inputs that would stall, swell or end the daemon; another client measures",
        *(1200, 240),
        processes=0,
    ),
    Suite("media", "KV in host memory, on disk, in Redis and shared storage", 2400, 600),
    Suite("adapters", "LoRA adapters behind the real daemon, against merged weights", 900, 300),
    Suite(
        "images", "models that read images behind the real daemon, against transformers", 900, 300
    ),
    Suite(
        "models",
        "hybrid models, models on transformers' code, tensor parallelism, routed experts, gpt-oss",
        *(2400, 600),
    ),
    Suite(
        "families", "every family, from a folder and a GGUF file, against transformers", 2700, 300
    ),
    Suite("parity", "greedy tokens by priority, under preemption, in a full batch", 1200, 300),
    Suite(
        "overlapped",
        "parity, deaths and pressure with overlapped steps",
        *(2400, 300),
        paths=(
            "tests/e2e/test_parity.py",
            "tests/chaos/test_deaths.py",
            "tests/chaos/test_pressure.py",
        ),
        select=("daemons", "chaos", "parity"),
        environment={"TOKEND_TEST_FLAGS": "--async-scheduling"},
    ),
    Suite(
        "tiles",
        "kernels for Intel AMX, on a tile unit in software where the CPU has none",
        *(600, 300),
        paths=("tests/worker/layers", "tests/worker/attention"),
        select=("quick",),
        processes=0,
        environment=ONE_THREAD | {"TOKEND_TEST_SOFTWARE_TILES": "1"},
    ),
    Suite("bench", "benchmarks: their figures and the loads that they replay", 400, 120),
    Suite(
        "examples",
        "examples of README and docs with every kernel kind and weight format of this CPU",
        *(600, 120),
        paths=("tests/e2e/test_examples.py",),
        processes=0,
    ),
    Suite(
        "wheel",
        "`make wheel`: what it holds; it serves without a compiler (needs the network once)",
        *(900, 600),
        paths=("tests/deploy/test_wheel.py",),
        processes=0,
    ),
    Suite(
        "schemas",
        "JSON schemas of public packages: they compile, answers conform",
        *(300, 120),
        processes=0,
    ),
    Suite("fuzz", "mutated bodies, messages and model files: no crash, no hang", 600, 300),
    Suite(
        "peers",
        "programs and data of other projects: vocabularies, tool calls, server tests, routers",
        *(1800, 600),
        paths=("tests/peers",),
        in_all=False,
    ),
)
