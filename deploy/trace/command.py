"""`tokend trace view`: makes a web page of a scheduler trace."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from deploy.bench.options import BenchParser, writable, write
from deploy.trace.condense import Condensed, condense
from deploy.trace.page import render
from proto.errors import ConfigError, ProtocolError
from proto.messages.engine_io import agent_session_name
from proto.messages.sched_trace import Arrival, TraceLine, read_line


def view(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status; raises ConfigError."""
    parser = BenchParser(
        prog="tokend trace view", description="Make a web page of a scheduler trace."
    )
    parser.add_argument("file", metavar="FILE", help="trace of tokend serve --sched-trace FILE")
    parser.add_argument(
        "-o", "--output", metavar="PAGE", help="file of the page; by default FILE with .html"
    )
    parser.add_argument(
        "--job-id",
        action="append",
        default=[],
        metavar="ID",
        help="show this agent session by the id that its client sends (agent_hint.job_id or "
        "session_id) instead of by its digest; may be repeated",
    )
    parser.add_argument(
        "--job-ids", metavar="FILE", help="the same for every line of a file; -: of standard input"
    )
    options = parser.parse_args(arguments)
    job_ids = [*options.job_id, *(_ids_in(options.job_ids) if options.job_ids else ())]
    path = Path(options.file)
    page = options.output or str(path.with_suffix(".html"))
    condensed = read_trace(path)
    labels = _job_labels(condensed.arrivals, job_ids)
    with writable("--output", page, is_private=True) as files:
        write(files, render(condensed, path.name, labels))
    print(page)
    return 0


def read_trace(path: Path) -> Condensed:
    """Return the condensed trace of a file; raises ConfigError if the file is not a trace."""
    try:
        return condense(lines_of(path))
    except (OSError, ProtocolError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: {reason}") from None


def _job_labels(arrivals: Sequence[Arrival], job_ids: Iterable[str]) -> dict[str, str]:
    """Return ids of agent sessions by their names in the trace; report unknown ids.

    A name is a digest of the id and the tenant, and the trace has the tenants.
    """
    names = {arrival.job for arrival in arrivals}
    tenants = {arrival.tenant for arrival in arrivals}
    labels: dict[str, str] = {}
    for job_id in job_ids:
        sessions = {agent_session_name(job_id, tenant): tenant for tenant in tenants}
        found = names & sessions.keys()
        if not found:
            print(f"no agent session of the trace has the id {job_id}", file=sys.stderr)
        for name in found:
            label = job_id if len(found) == 1 else f"{job_id} (tenant {sessions[name]:x})"
            labels[name] = label
    return labels


def _ids_in(name: str) -> list[str]:
    """Return the lines of a file that are not empty; raises ConfigError."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise ConfigError(f"--job-ids {name}: {reason}") from None
    return [line for line in text.splitlines() if line]


def lines_of(path: Path) -> Iterator[TraceLine]:
    """Yield the lines of a trace; an incomplete last line is ignored.

    Raises OSError or ProtocolError.
    """
    number, bad = 0, ""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if bad:
                raise ProtocolError(bad)
            try:
                yield read_line(text)
            except ProtocolError as error:
                bad = f"line {number}: {error}"
    if bad and number == 1:
        raise ProtocolError(bad)
