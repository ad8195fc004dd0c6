"""A condensed trace as one page that needs nothing else.

    header (JSON) ‖ columns, one after the other, deflated, in base64 ──▶ <script type="text/plain">

Columns are little-endian: f8 for times (microseconds), i4 for the rest. The page says which script
may run by its hash and loads nothing, so names that clients gave are only ever text.
"""

import base64
import hashlib
import html
import sys
import zlib
from array import array
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Final

from deploy.trace.condense import STEP_COLUMNS, Condensed, State
from proto.codec import to_compact_json

_SCRIPTS: Final = ("data.js", "view.js", "panels.js", "timeline.js", "input.js")
_LEVEL: Final = 6

_PAGE: Final = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
<script type="text/plain" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


class _Columns:
    """Columns in the order in which they are added, and where each is."""

    def __init__(self) -> None:
        self.places: dict[str, tuple[str, int]] = {}
        self._bytes: list[bytes] = []

    def add(self, name: str, kind: str, values: Sequence[float]) -> None:
        """kind: d for f8, i for i4."""
        column = values if isinstance(values, array) else array(kind, values)
        if sys.byteorder == "big":
            column = array(kind, column)
            column.byteswap()
        self.places[name] = (kind, len(column))
        self._bytes.append(column.tobytes())

    @property
    def content(self) -> bytes:
        return b"".join(self._bytes)


def render(condensed: Condensed, name: str) -> str:
    """The page. name: of the file."""
    columns = _columns(condensed)
    about = to_compact_json({**_about(condensed, name), "columns": columns.places})
    data = len(about).to_bytes(4, "little") + about + columns.content
    script = "\n".join(_asset(each) for each in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _PAGE.format(
        title=html.escape(f"{name} - scheduler trace"),
        style=_asset("view.css"),
        body=_asset("view.html"),
        script=script,
        digest=digest,
        data=base64.b64encode(zlib.compress(data, _LEVEL)).decode(),
    )


def _columns(condensed: Condensed) -> _Columns:
    """Times come first: their eight bytes have to be aligned."""
    columns = _Columns()
    arrivals, segments = condensed.arrivals, condensed.segments
    ends, firsts = condensed.finishes, condensed.firsts
    last = condensed.end
    columns.add("step_time", "d", condensed.step_times)
    columns.add("step_end", "d", condensed.step_ends)
    columns.add("segment_from", "d", [each[2] for each in segments])
    columns.add("segment_to", "d", [each[3] for each in segments])
    columns.add("arrival", "d", [each.time_us for each in arrivals])
    columns.add("first", "d", [firsts.get(each.seq_id, -1) for each in arrivals])
    finishes = [ends.get(each.seq_id) for each in arrivals]
    columns.add("end", "d", [each.time_us if each else last for each in finishes])
    for name in STEP_COLUMNS:
        columns.add(name, "i", condensed.steps[name])
    columns.add("segment_row", "i", [each[0] for each in segments])
    columns.add("segment_state", "i", [each[1] for each in segments])
    columns.add("seq_id", "i", [each.seq_id for each in arrivals])
    columns.add("prompt", "i", [each.num_prompt_tokens for each in arrivals])
    columns.add("priority", "i", [each.priority for each in arrivals])
    columns.add("output", "i", [each.num_output_tokens if each else 0 for each in finishes])
    columns.add("hit", "i", [each.num_cached_tokens if each else 0 for each in finishes])
    columns.add("preemptions", "i", [each.num_preemptions if each else 0 for each in finishes])
    return columns


def _about(condensed: Condensed, name: str) -> dict[str, Any]:
    header, arrivals = condensed.header, condensed.arrivals
    finishes = [condensed.finishes.get(each.seq_id) for each in arrivals]
    return {
        "name": name,
        "states": [each.name.lower() for each in State],
        "policy": header.scheduler.scheduling_policy,
        "device": header.device,
        "blocks": header.num_blocks - 1,
        "blockSize": header.block_size,
        "seats": header.scheduler.max_num_seqs,
        "budget": header.scheduler.step_tokens,
        "end": condensed.end,
        "events": condensed.events,
        "requests": [f"{each.request_id}/{each.choice}" for each in arrivals],
        "jobs": [each.job for each in arrivals],
        "tenants": [f"{each.tenant:x}" if each.tenant else "" for each in arrivals],
        "reasons": [each.reason if each else "" for each in finishes],
    }


def _asset(name: str) -> str:
    return (files("deploy.trace") / "assets" / name).read_text("utf-8").strip()
