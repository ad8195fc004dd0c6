"""A condensed trace as one self-contained HTML page.

    header (JSON) ‖ columns, one after the other, deflated, in base64 ──▶ <script type="text/plain">

Columns are little-endian: f8 for times (microseconds), i4 for the rest. The content security
policy allows only the script with this hash, so names from clients cannot run as code.
"""

import base64
import hashlib
import html
import sys
import zlib
from array import array
from collections.abc import Mapping, Sequence
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Final

from deploy.trace.condense import STEP_COLUMNS, Condensed, State
from proto.codec import to_compact_json

_SCRIPTS: Final = ("data.js", "view.js", "panels.js", "timeline.js", "input.js")
_LEVEL: Final = 6


def render(
    condensed: Condensed, name: str, job_labels: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return the page.

    name: of the trace file. job_labels: what to call agent sessions, by their names.
    """
    columns = _columns(condensed)
    places = {name: (kind, len(values)) for name, kind, values in columns}
    about = to_compact_json({**_about(condensed, name, job_labels), "columns": places})
    data = len(about).to_bytes(4, "little") + about
    data += b"".join(_little_endian(kind, values) for _, kind, values in columns)
    script = "\n".join(_asset(name) for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = _asset("page.html").format(
        title=html.escape(f"{name} - scheduler trace"),
        style=_asset("view.css"),
        body=_asset("view.html"),
        script=script,
        digest=digest,
        data=base64.b64encode(zlib.compress(data, _LEVEL)).decode(),
    )
    return f"{page}\n"


def _columns(condensed: Condensed) -> list[tuple[str, str, Sequence[float]]]:
    """Return name, kind ("d" for float64, "i" for int32) and values of all columns.

    Times are first, because float64 must be aligned.
    """
    arrivals, segments = condensed.arrivals, condensed.segments
    firsts, last = condensed.firsts, condensed.end
    finishes = [condensed.finishes.get(arrival.seq_id) for arrival in arrivals]
    return [
        ("step_time", "d", condensed.step_times),
        ("step_end", "d", condensed.step_ends),
        ("segment_from", "d", [segment[2] for segment in segments]),
        ("segment_to", "d", [segment[3] for segment in segments]),
        ("arrival", "d", [arrival.time_us for arrival in arrivals]),
        ("first", "d", [firsts.get(arrival.seq_id, -1) for arrival in arrivals]),
        ("end", "d", [finish.time_us if finish else last for finish in finishes]),
        *((name, "i", condensed.steps[name]) for name in STEP_COLUMNS),
        ("segment_row", "i", [segment[0] for segment in segments]),
        ("segment_state", "i", [segment[1] for segment in segments]),
        ("seq_id", "i", [arrival.seq_id for arrival in arrivals]),
        ("prompt", "i", [arrival.num_prompt_tokens for arrival in arrivals]),
        ("priority", "i", [arrival.priority for arrival in arrivals]),
        ("output", "i", [finish.num_output_tokens if finish else 0 for finish in finishes]),
        ("hit", "i", [finish.num_cached_tokens if finish else 0 for finish in finishes]),
        ("preemptions", "i", [finish.num_preemptions if finish else 0 for finish in finishes]),
    ]


def _little_endian(kind: str, values: Sequence[float]) -> bytes:
    column = array(kind, values)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _about(condensed: Condensed, name: str, job_labels: Mapping[str, str]) -> dict[str, Any]:
    header, arrivals = condensed.header, condensed.arrivals
    finishes = [condensed.finishes.get(arrival.seq_id) for arrival in arrivals]
    return {
        "name": name,
        "states": [state.name.lower() for state in State],
        "policy": header.scheduler.scheduling_policy,
        "device": header.device,
        "blocks": header.num_blocks - 1,
        "blockSize": header.block_size,
        "seats": header.scheduler.max_num_seqs,
        "budget": header.scheduler.token_budget,
        "end": condensed.end,
        "events": condensed.events,
        "limits": condensed.limits,
        "tierBlocks": sum(condensed.tiers.values()),
        "requests": [f"{arrival.request_id}/{arrival.choice}" for arrival in arrivals],
        "jobs": [job_labels.get(arrival.job, arrival.job) for arrival in arrivals],
        "tenants": [f"{arrival.tenant:x}" if arrival.tenant else "" for arrival in arrivals],
        "reasons": [finish.reason if finish else "" for finish in finishes],
    }


def _asset(name: str) -> str:
    return (files("deploy.trace") / "assets" / name).read_text("utf-8").strip()
