"""`tokend trace view`: makes a web page of a scheduler trace."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from deploy.bench.options import BenchParser, writable, write
from deploy.trace.condense import condense
from deploy.trace.page import render
from proto.errors import ConfigError, ProtocolError
from proto.sched_trace import TraceLine, read_line

USAGE: Final = """\
usage: tokend trace view FILE [flags]; flags: tokend trace view --help

Make a web page of a scheduler trace (tokend serve --sched-trace FILE).
"""


def main(arguments: Sequence[str]) -> int:
    if list(arguments) in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    if not arguments or arguments[0] != "view":
        raise ConfigError(USAGE.rstrip())
    return _view(arguments[1:])


def _view(arguments: Sequence[str]) -> int:
    parser = BenchParser(
        prog="tokend trace view", description="Make a web page of a scheduler trace."
    )
    parser.add_argument("file", metavar="FILE", help="trace of tokend serve --sched-trace FILE")
    parser.add_argument(
        "-o", "--output", metavar="PAGE", help="file of the page; by default FILE with .html"
    )
    options = parser.parse_args(arguments)
    path = Path(options.file)
    page = options.output or str(path.with_suffix(".html"))
    with writable("--output", page) as files:
        write(files, page_of(path))
    print(page)
    return 0


def page_of(path: Path) -> str:
    """Return the page of a trace; raises ConfigError if the file is not a trace."""
    try:
        return render(condense(lines_of(path)), path.name)
    except (OSError, ProtocolError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: {reason}") from None


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
