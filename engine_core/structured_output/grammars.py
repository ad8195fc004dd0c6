"""Structured output as the engine sees it: take requests in, mask their steps.

    InputProcessor   admit ─▶ compiler ─▶ (event) ─▶ take_compiled ─▶ the gate unblocks, or a 400
    BusyLoop         order_masks(oldest step) ─▶ masker ─▶ (event) ─▶ take_masks ─▶ GrammarOutput
                     violations(result): a token that its mask forbids ends the request

A step is masked when it is the oldest in flight, because only then all tokens before it are
known: with one step in flight as soon as it is sent, with two when the one before it is back.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from engine_core.request import Request
from engine_core.scheduler.hooks import TokenConstraints
from engine_core.structured_output.base import GrammarBackend, GrammarError, MaskRow
from engine_core.structured_output.cache import GrammarCache
from engine_core.structured_output.compiler import GrammarCompiler
from engine_core.structured_output.gate import GrammarGate
from engine_core.structured_output.llguidance_backend import LLGuidanceBackend
from engine_core.structured_output.masker import Masker, StepMasks
from engine_core.structured_output.trial import TRIAL_SECONDS, ProcessTrial
from engine_core.structured_output.trial_process import TrialSetup
from proto.engine_io import EngineCoreRequest
from proto.errors import ErrorInfo, ProtocolError
from proto.grammar import FREE_TEXT, GrammarSource
from proto.host_resources import usable_cores
from proto.lifecycle import ProcessBoot
from proto.model_runner_output import ModelRunnerOutput
from proto.scheduler_output import GrammarOutput, SchedulerOutput
from proto.sockets import NO_DESCRIPTOR, EventFd

MOST_THREADS: Final = 8
"""That masks of a step are shared by."""
FIELD: Final = "structured_outputs"
CONTRADICTION: Final = "no token satisfies both the grammar and the other parameters of the request"
BROKEN: Final = "the grammar cannot be used"


class EarlyAnswerError(ProtocolError):
    """No worker that waits for its masks answers so."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A request that waited for its grammar. error: None where that is there now."""

    client: int
    request_id: int
    error: GrammarError | None


class Grammars(Protocol):
    """What intake, service and stepper ask."""

    @property
    def constraints(self) -> TokenConstraints | None:
        """For the scheduler."""
        ...

    @property
    def descriptor(self) -> int:
        """Readable when there is something to take; NO_DESCRIPTOR where there never is."""
        ...

    def silence(self) -> None:
        """The descriptor was readable."""
        ...

    def admit(self, client: int, message: EngineCoreRequest) -> bool:
        """Whether a request may hear now that it is taken in; `take_compiled` answers the rest.

        Raises GrammarError for one whose grammar is known to be of no use.
        """
        ...

    def enter(self, request: Request, message: EngineCoreRequest) -> None:
        """A choice of such a request is in the queue of the scheduler."""
        ...

    def take_compiled(self) -> list[Answer]:
        """Requests that need not wait any more; those with a grammar may begin."""
        ...

    def order_masks(self, output: SchedulerOutput) -> None:
        """This step is the oldest in flight; nothing happens when that is said again."""
        ...

    def take_masks(self) -> list[GrammarOutput]:
        """For the workers of its epoch."""
        ...

    def violations(
        self, output: SchedulerOutput, result: ModelRunnerOutput
    ) -> dict[int, ErrorInfo]:
        """Sequences of the oldest step in flight that cannot go on, by seq_id, and why.

        Raises EarlyAnswerError for a result that came before the masks were made.
        """
        ...

    def close(self) -> None:
        """End the threads."""
        ...


class NoGrammars:
    """An engine without structured output."""

    constraints: TokenConstraints | None = None
    descriptor = NO_DESCRIPTOR

    def silence(self) -> None:
        """Nobody rings."""

    def admit(self, client: int, message: EngineCoreRequest) -> bool:
        if _source_of(message) is not None:
            raise GrammarError("structured output is not available")
        return True

    def enter(self, request: Request, message: EngineCoreRequest) -> None:
        """Nothing to be held to."""

    def take_compiled(self) -> list[Answer]:
        return []

    def order_masks(self, output: SchedulerOutput) -> None:
        """There are none."""

    def take_masks(self) -> list[GrammarOutput]:
        return []

    def violations(
        self, output: SchedulerOutput, result: ModelRunnerOutput
    ) -> dict[int, ErrorInfo]:
        return {}

    def close(self) -> None:
        """There is nothing to end."""


NO_GRAMMARS: Final = NoGrammars()


class CompiledGrammars:
    """Structured output; `compiler` and `masker` ring `event_fd`."""

    def __init__(self, compiler: GrammarCompiler, masker: Masker, event_fd: EventFd) -> None:
        self._compiler = compiler
        self._masker = masker
        self._event_fd = event_fd
        self._gate = GrammarGate()
        self._pending: dict[GrammarSource, list[tuple[int, int]]] = {}
        self._ordered = 0  # the last step that was
        self._masks: dict[int, StepMasks] = {}  # of steps in flight, by step

    @property
    def constraints(self) -> TokenConstraints | None:
        return self._gate

    @property
    def descriptor(self) -> int:
        return self._event_fd.descriptor

    def silence(self) -> None:
        self._event_fd.clear()

    def admit(self, client: int, message: EngineCoreRequest) -> bool:
        source = _source_of(message)
        if source is None:
            return True
        compiled = self._compiler.order(source)
        if isinstance(compiled, GrammarError):
            raise compiled
        if compiled is None:
            self._pending.setdefault(source, []).append((client, message.request_id))
        return compiled is not None

    def enter(self, request: Request, message: EngineCoreRequest) -> None:
        source = _source_of(message)
        if source is None:
            return
        self._gate.enter(request, message.thinking)
        compiled = self._compiler.order(source)
        if compiled is not None and not isinstance(compiled, GrammarError):
            self._gate.open(request.request_id, compiled, self._compiler.backend)

    def take_compiled(self) -> list[Answer]:
        answers = []
        for source, compiled in self._compiler.take():
            error = compiled if isinstance(compiled, GrammarError) else None
            for client, request_id in self._pending.pop(source, []):
                answers.append(Answer(client, request_id, error))
                if not isinstance(compiled, GrammarError):
                    self._gate.open(request_id, compiled, self._compiler.backend)
        return answers

    def order_masks(self, output: SchedulerOutput) -> None:
        if output.constrained_seq_ids and output.step > self._ordered:
            self._ordered = output.step
            self._masks.clear()  # of steps that were lost with their workers
            self._masker.order(self._gate.job(output, self._compiler.backend))

    def take_masks(self) -> list[GrammarOutput]:
        made = self._masker.take()
        for masks in made:
            self._masks[masks.output.step] = masks
        return [masks.output for masks in made]

    def violations(
        self, output: SchedulerOutput, result: ModelRunnerOutput
    ) -> dict[int, ErrorInfo]:
        if not output.constrained_seq_ids:
            return {}
        masks = self._masks.pop(output.step, None)
        if masks is None:
            raise EarlyAnswerError(f"step {output.step} was answered before its masks were made")
        found = {}
        for seq_id, token_ids in zip(result.seq_ids, result.sampled_token_ids, strict=False):
            error = masks.errors.get(seq_id)
            if (
                error is None
                and seq_id in masks.rows
                and not _allows(masks.rows[seq_id], token_ids)
            ):
                error = CONTRADICTION
            if error is not None:
                found[seq_id] = ErrorInfo("invalid_request", error or BROKEN, FIELD)
        return found

    def close(self) -> None:
        self._compiler.close()
        self._masker.close()
        self._event_fd.close()


def start_grammars(boot: ProcessBoot) -> Grammars:
    """Structured output of an engine that is born; see `GrammarCompiler` for when it begins."""
    config, model = boot.config, boot.model
    folder = config.model.tokenizer or model.folder
    vocab_size, eos_token_ids = model.vocab_size, model.eos_token_ids
    path = Path(folder, "tokenizer.json")
    num_threads = min(MOST_THREADS, max(1, usable_cores() // 2))

    def make_backend() -> GrammarBackend:
        return LLGuidanceBackend(path, vocab_size, eos_token_ids, num_threads)

    event_fd = EventFd()
    setup = TrialSetup(str(path), vocab_size, eos_token_ids, TRIAL_SECONDS)
    cache = GrammarCache(config.grammars.grammar_cache_entries, config.grammars.grammar_cache_bytes)
    compiler = GrammarCompiler(
        make_backend, ProcessTrial(setup), cache, event_fd.notify, eager=boot.incarnation == 0
    )
    return CompiledGrammars(compiler, Masker(event_fd.notify), event_fd)


def _source_of(message: EngineCoreRequest) -> GrammarSource | None:
    """What its text has to be; thoughts that have a rule are followed by anything."""
    return FREE_TEXT if message.grammar is None and message.thinking else message.grammar


def _allows(mask: MaskRow, token_ids: list[int]) -> bool:
    """Ids that are none are for others to find."""
    for token_id in token_ids:
        if 0 <= token_id < 32 * len(mask) and not int(mask[token_id >> 5]) >> (token_id & 31) & 1:
            return False
    return True
