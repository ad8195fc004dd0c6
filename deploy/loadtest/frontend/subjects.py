"""The servers that are measured: the daemon and vLLM, both without a model.

Owns how they are started with the same limits and the same time for a step, and what CPU time
their processes have taken, front end and engine apart.
"""

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from deploy.loadtest.daemon import MeasuredDaemon
from deploy.loadtest.processes import SUPERVISOR, usage_by_title
from deploy.loadtest.servers import PORT, ServerSpec, StartedServer

API: Final = "API server"
ENGINE: Final = "engine"
BLOCK_SIZE: Final = 16
_PEERS: Final = Path(__file__).parents[1] / "peers"
_EXECUTOR: Final = "vllm_null_executor.NullExecutor"
_TITLES: Final = "VLLM::"
_CORE: Final = "VLLM::EngineCore"


@dataclass(frozen=True)
class Limits:
    """What both are started with. step_seconds: that the missing model takes, asleep."""

    num_streams: int
    tokens_each: int
    step_seconds: float

    def flags(self) -> list[str]:
        """Those that tokend and vLLM share."""
        blocks_each = -(-self.tokens_each // BLOCK_SIZE) + 1
        return [
            *("--block-size", str(BLOCK_SIZE)),
            *("--num-gpu-blocks-override", str(self.num_streams * blocks_each + 1)),
            *("--max-num-seqs", str(self.num_streams)),
            *("--max-num-batched-tokens", str(max(2048, 2 * self.num_streams))),
        ]


class Subject(Protocol):
    """A server that runs."""

    name: str
    url: str

    def cpu_seconds(self) -> dict[str, float]:
        """Since the start, by process; API and ENGINE are among them."""
        ...


class Ours:
    """The daemon with a worker that computes nothing, which is a process of its own."""

    name = "tokend"

    def __init__(self, stack: ExitStack, limits: Limits, flags: Sequence[str]) -> None:
        pace = ("--step-ms", str(1e3 * limits.step_seconds))
        command = ("bench", "null", *pace)
        words = [*limits.flags(), "--max-num-queued-reqs", "0", *flags]
        self._daemon = stack.enter_context(MeasuredDaemon(words, command))
        self.url = self._daemon.url

    def cpu_seconds(self) -> dict[str, float]:
        used = {
            title.removeprefix("tokend: "): each.cpu_seconds
            for title, each in usage_by_title(self._daemon.pid).items()
        }
        return used | {
            API: _sum_of(used, "api "),
            ENGINE: _sum_of(used, "engine "),
        }


class VLLM:
    """`vllm serve` whose executor computes nothing, inside EngineCore.

    python: of an environment that has vLLM. model: folder with a config and a tokenizer.
    """

    name = "vLLM"

    def __init__(self, stack: ExitStack, limits: Limits, python: str, model: str) -> None:
        self._null_cpu = Path(stack.enter_context(tempfile.TemporaryDirectory()), "cpu_seconds")
        self._null_cpu.write_text("0")
        variables = {
            "PYTHONPATH": str(_PEERS),
            "TOKEND_BENCH_STEP_SECONDS": str(limits.step_seconds),
            "TOKEND_BENCH_NULL_CPU": str(self._null_cpu),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        command = [
            *("env", *(f"{name}={value}" for name, value in variables.items())),
            *(python, "-P", "-m", "vllm.entrypoints.cli.main", "serve", model, "--port", PORT),
            *("--distributed-executor-backend", _EXECUTOR, "--disable-uvicorn-access-log"),
            *limits.flags(),
        ]
        spec = ServerSpec(self.name, command=tuple(command))
        self._server = stack.enter_context(StartedServer(spec))
        self.url = self._server.url

    def cpu_seconds(self) -> dict[str, float]:
        """The front end is the process that was started; the answers of nobody's model count as
        nobody's work."""
        used = {
            title: each.cpu_seconds
            for title, each in usage_by_title(self._server.pid, _TITLES).items()
        }
        null = float(self._null_cpu.read_text())
        return {API: used[SUPERVISOR], ENGINE: _sum_of(used, _CORE) - null, "null model": null}


def _sum_of(used: Mapping[str, float], prefix: str) -> float:
    return sum(seconds for title, seconds in used.items() if title.startswith(prefix))
