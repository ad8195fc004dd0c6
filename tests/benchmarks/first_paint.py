"""The first paint of the daemon's page, beside a page of one line, in the same Chromium.

Both are loaded over loopback, in turn, round by round; no request of the page's scripts is sent,
so that nothing but the document decides. Chromium itself paints the one line after some tens of
milliseconds, most of which are its wait for a frame: the ratio says what the page adds. Start a
daemon before: `tokend serve`.
"""

import json
import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from deploy.bench.options import BenchParser, at_least_one, writable, write
from proto.errors import ConfigError
from tests.benchmarks.command import run
from tests.e2e.visitor import CHROMIUM

_PAINT: Final = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
_NO_REQUESTS: Final = "window.fetch = () => new Promise(() => {});"
_ONE_LINE: Final = b"<!doctype html><title>one line</title><p>One line."


def main(words: Sequence[str]) -> None:
    """Measure, and print medians and their ratio; write them where --json says so."""
    parser = BenchParser(prog="python -m tests.benchmarks.first_paint", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the daemon")
    parser.add_argument("--rounds", type=at_least_one, default=25)
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args(words)
    if CHROMIUM is None:
        raise ConfigError("there is no chromium")
    with writable("--json", options.json) as files:
        with _one_line_server() as one_line:
            times = _measure([f"{options.url}/#chat", one_line], options.rounds)
        page, least = (statistics.median(each) for each in times)
        print(f"first contentful paint, medians of {options.rounds} loads")
        print(f"the page {page:.0f} ms, one line {least:.0f} ms: {page / least:.2f} times")
        figures = {"page_ms": times[0], "one_line_ms": times[1], "ratio": page / least}
        write(files, json.dumps(figures, indent=2) + "\n")


def _measure(urls: Sequence[str], rounds: int) -> list[list[float]]:
    """Return the milliseconds from navigation to first paint of each page, in each round."""
    from playwright.sync_api import sync_playwright

    times: list[list[float]] = [[] for _ in urls]
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        pages = [browser.new_page() for _ in urls]
        for page, url in zip(pages, urls, strict=True):
            page.add_init_script(_NO_REQUESTS)
            page.goto(url)
        for _ in range(rounds):
            for page, found in zip(pages, times, strict=True):
                page.bring_to_front()
                page.reload()
                page.wait_for_function(f"() => {_PAINT}")
                found.append(page.evaluate(_PAINT))
        browser.close()
    return times


class _OneLine(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(_ONE_LINE)))
        self.end_headers()
        self.wfile.write(_ONE_LINE)

    def log_message(self, *_: Any) -> None:
        """Print no line for a request."""


@contextmanager
def _one_line_server() -> Iterator[str]:
    """Serve the one line on a free port; yield its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _OneLine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


if __name__ == "__main__":
    raise SystemExit(run(main))
