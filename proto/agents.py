"""What the front end tells the engine of jobs: requests that are turns of one agent's work.

    turn 1 ends ── TurnEnded(job, tool) ── the tool runs ── turn 2 arrives, of the same job
    └──────── the engine may keep the turn's KV ────────────┘

Names of jobs and tools are made by the front end: a job's is of one tenant, never another's.
"""

from typing import Final

import msgspec

MAX_NAME_LENGTH: Final = 256
"""Characters of the name of a job or a tool."""


class AgentHint(msgspec.Struct, array_like=True, frozen=True):
    """Whose turn a request is.

    job: name of the agent's work; is_last_step: no turn follows this one.
    ttl_ms: milliseconds for which its KV is worth keeping when it ends, by the client's own
        account; None leaves it to the engine.
    """

    job: str
    is_last_step: bool = False
    ttl_ms: float | None = None


NO_AGENT: Final = AgentHint("")
"""Of a request that is nobody's turn."""


class TurnEnded(msgspec.Struct, array_like=True, tag=7, frozen=True):
    """The answer of a turn has been read: what the job does until its next one.

    request_id: of the turn. tool: the name of the tool that it waits for now; empty where it
    called none. A job that is over, or unknown, is passed over.
    """

    epoch: int
    request_id: int
    job: str
    tool: str = ""
