"""Run a target for a time and collect its findings.

    seeds, corpus ─▶ mutation ─▶ target.run ─▶ an outcome that is new: the input joins the corpus
                                          └──▶ any exception: a finding, shrunk by hypothesis

Inputs have a time limit, and the process has a limit on additional memory: an input that exceeds
them is a finding and does not end the campaign.
"""

import hashlib
import math
import re
import resource
import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final, Protocol

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

CORPUS: Final = Path(__file__).with_name("corpus")
SECONDS_PER_INPUT: Final = 10.0
BYTES_BEYOND: Final = 3 << 30
MAX_KEPT_BYTES: Final = 4096
MAX_KEPT: Final = 60
_BATCH: Final = 200


class TooSlowError(BaseException):
    """An input exceeded the time limit; not an Exception, so that no handler catches it."""


class Target(Protocol):
    """Code under test that takes bytes."""

    name: str

    def seeds(self) -> list[bytes]:
        """Valid inputs."""
        ...

    def inputs(self, known: Sequence[bytes]) -> st.SearchStrategy[bytes]:
        """The strategy for new inputs, made from known ones."""
        ...

    def run(self, data: bytes) -> str:
        """Return the outcome in a few words; an unexpected outcome raises."""
        ...

    def close(self) -> None:
        """Release resources after the last input."""
        ...


@dataclass
class Campaign:
    """findings: input and traceback by the place of the exception."""

    target: Target
    num_inputs: int = 0
    findings: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    _known: list[bytes] = field(default_factory=list)
    _outcomes: set[str] = field(default_factory=set)
    _kept: list[bytes] = field(default_factory=list)
    _last: tuple[str, bytes, str] = ("", b"", "")

    def replay(self) -> None:
        """Run all known inputs unchanged."""
        for data in [*self.target.seeds(), *corpus_of(self.target.name)]:
            self._known.append(data)
            try:
                self._try(data)
            except BaseException as error:
                self._note(error)
        self._kept.clear()

    def run(self, seconds: float) -> None:
        """Try new inputs for `seconds`."""
        end = time.monotonic() + seconds
        batch = 0
        while time.monotonic() < end:
            batch += 1
            self.run_batch(time.time_ns() + batch, end)

    def keep(self) -> int:
        """Add inputs with new outcomes to the corpus on disk; returns the size of the corpus."""
        folder = CORPUS / self.target.name
        folder.mkdir(parents=True, exist_ok=True)
        room = MAX_KEPT - len(corpus_of(self.target.name))
        for data in sorted(self._kept, key=len)[: max(0, room)]:
            (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
        return len(corpus_of(self.target.name))

    def run_batch(self, number: int, end: float = math.inf) -> None:
        """Try about two hundred inputs of the seed `number`, and none after the time `end`."""

        @seed(number)
        @settings(
            max_examples=_BATCH,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(self.target.inputs(self._known))
        def attempt(data: bytes) -> None:
            if time.monotonic() < end:
                self._try(data)

        try:
            attempt()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._note(error)

    def _try(self, data: bytes) -> None:
        self.num_inputs += 1
        try:
            with time_limit(SECONDS_PER_INPUT):
                outcome = self.target.run(data)
        except BaseException as error:
            place = _place(error)
            if place in self.findings or isinstance(error, KeyboardInterrupt):
                return
            self._last = (place, data, traceback.format_exc())
            raise
        outcome = _in_general(outcome)
        if outcome not in self._outcomes:
            self._outcomes.add(outcome)
            if len(data) <= MAX_KEPT_BYTES:
                self._known.append(data)
                self._kept.append(data)

    def _note(self, error: BaseException) -> None:
        """Record a finding; the last input that hypothesis tries for it is the smallest."""
        place, data, trace = self._last
        if not place:
            raise error
        self.findings[place] = (data, trace)


def corpus_of(name: str) -> list[bytes]:
    """The corpus of earlier campaigns."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


def limit_memory() -> None:
    """Limit the address space to its present size and a margin."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + BYTES_BEYOND
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@contextmanager
def time_limit(seconds: float) -> Any:
    """Raise TooSlowError in the block after `seconds`."""

    def on_alarm(_number: int, _frame: FrameType | None) -> None:
        raise TooSlowError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _place(error: BaseException) -> str:
    """The type of an error and the last line of our code in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [each for each in frames if "/site-packages/" not in each.filename]
    last = ours[-1] if ours else frames[-1]
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"


def _in_general(outcome: str) -> str:
    return re.sub(r"[0-9]+|'[^']*'|\"[^\"]*\"|/\S+", "#", outcome)[:120]
