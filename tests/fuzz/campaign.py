"""Runs a target for a time, and remembers what it found.

    seeds, corpus ─▶ mutation ─▶ target.run ─▶ an outcome that is new: the input joins the corpus
                                          └──▶ anything raised: a finding, shrunk by hypothesis

Each input has a limit in time, and the process one in memory beyond what it has: an input
that takes more is a finding, not the end of the campaign.
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
    """An input took longer than any may; no Exception, so that nobody on the way catches it."""


class Target(Protocol):
    """What is fed with bytes."""

    name: str

    def seeds(self) -> list[bytes]:
        """Inputs that are taken."""
        ...

    def inputs(self, known: Sequence[bytes]) -> st.SearchStrategy[bytes]:
        """What to try, made of what is known."""
        ...

    def run(self, data: bytes) -> str:
        """The outcome in a few words; raises whatever is not one that should be."""
        ...

    def close(self) -> None:
        """Nothing follows."""
        ...


@dataclass
class Campaign:
    """findings: by the place where it was raised, the input and the traceback."""

    target: Target
    num_inputs: int = 0
    findings: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    _known: list[bytes] = field(default_factory=list)
    _outcomes: set[str] = field(default_factory=set)
    _kept: list[bytes] = field(default_factory=list)
    _last: tuple[str, bytes, str] = ("", b"", "")

    def replay(self) -> None:
        """All that is known, as it is."""
        for data in [*self.target.seeds(), *corpus_of(self.target.name)]:
            self._known.append(data)
            try:
                self._try(data)
            except BaseException as error:
                self._note(error)
        self._kept.clear()

    def run(self, seconds: float) -> None:
        """Try new inputs for so long."""
        end = time.monotonic() + seconds
        batch = 0
        while time.monotonic() < end:
            batch += 1
            self.run_batch(time.time_ns() + batch, end)

    def keep(self) -> int:
        """Add the interesting ones to the corpus on disk; returns how many there are then."""
        folder = CORPUS / self.target.name
        folder.mkdir(parents=True, exist_ok=True)
        room = MAX_KEPT - len(corpus_of(self.target.name))
        for data in sorted(self._kept, key=len)[: max(0, room)]:
            (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
        return len(corpus_of(self.target.name))

    def run_batch(self, number: int, end: float = math.inf) -> None:
        """Try some two hundred inputs, which `number` decides; none begins after `end`."""

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
        """hypothesis ends with the smallest input of those that fail alike."""
        place, data, trace = self._last
        if not place:
            raise error
        self.findings[place] = (data, trace)


def corpus_of(name: str) -> list[bytes]:
    """What earlier campaigns have kept."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


def limit_memory() -> None:
    """From now on no more address space than some beyond what there is."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + BYTES_BEYOND
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@contextmanager
def time_limit(seconds: float) -> Any:
    """Raises TooSlowError inside when the time is over."""

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise TooSlowError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _place(error: BaseException) -> str:
    """Kind of error and the last line of ours that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [each for each in frames if "/site-packages/" not in each.filename]
    last = ours[-1] if ours else frames[-1]
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"


def _in_general(outcome: str) -> str:
    return re.sub(r"[0-9]+|'[^']*'|\"[^\"]*\"|/\S+", "#", outcome)[:120]
