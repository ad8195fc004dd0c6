"""`tokend trace view`: a trace as a page."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from deploy.bench.options import BenchParser, writable, write
from deploy.trace.condense import condense
from deploy.trace.page import render
from proto.errors import ConfigError, ProtocolError
from proto.sched_trace import TraceLine, read_line


def main(words: Sequence[str]) -> int:
    """Write the page and say where it is."""
    parser = BenchParser(
        prog="tokend trace view", description="Make a page of a scheduler's trace."
    )
    parser.add_argument("file", metavar="FILE", help="of tokend serve --sched-trace FILE")
    parser.add_argument("-o", "--output", metavar="PAGE", help="by default FILE with .html")
    options = parser.parse_args(words)
    path = Path(options.file)
    page = options.output or str(path.with_suffix(".html"))
    with writable("--output", page) as files:
        write(files, page_of(path))
    print(page)
    return 0


def page_of(path: Path) -> str:
    """Raises ConfigError for a file that is no trace."""
    try:
        return render(condense(lines_of(path)), path.name)
    except (OSError, ProtocolError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: {reason}") from None


def lines_of(path: Path) -> Iterator[TraceLine]:
    """A last line that was cut off is passed over. Raises OSError, ProtocolError."""
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
