"""Request fields by which a client marks the requests of one agent session.

agent_hint     {"job_id": "fix-1", "is_last_step": false, "ttl_ms": 5000, "tool": "pytest"}
session_id     only the session's id, if the hint has none; also as the header X-Session-ID
"""

import re
from typing import Annotated, Final

from pydantic import AfterValidator, Field, StringConstraints

from api_server.http.tenants import DEFAULT_TENANT
from api_server.protocol.fields import NestedFields, Strict
from proto.errors import InvalidRequestError
from proto.messages.engine_io import AgentHint, agent_session_name

MAX_SESSION_ID_CHARACTERS: Final = 256
MAX_TOOL_CHARACTERS: Final = 64
TOOL_NAME: Final = rf"^[A-Za-z0-9_.:/-]{{1,{MAX_TOOL_CHARACTERS}}}$"
MAX_TTL_MS: Final = 3_600_000.0
"""An hour. KV that must live longer belongs in offloaded storage, not in the KV pool."""


def printable(text: str) -> str:
    """Raise ValueError for a control character."""
    if not text.isprintable():
        raise ValueError("must hold no control characters")
    return text


AgentSessionId = Annotated[
    str,
    StringConstraints(min_length=1, max_length=MAX_SESSION_ID_CHARACTERS),
    AfterValidator(printable),
]


class AgentHintFields(NestedFields):
    """The field `agent_hint`: one turn of an agent session.

    job_id: id of the session. tool: the tool that it waits for after this turn; overrides the tool
    found in the answer.
    """

    where = "agent_hint."

    job_id: AgentSessionId | None = None
    is_last_step: bool = False
    ttl_ms: float | None = Field(default=None, gt=0, le=MAX_TTL_MS)
    tool: str | None = Field(default=None, pattern=TOOL_NAME)


class AgentFields(Strict):
    """Request fields about an agent session."""

    agent_hint: AgentHintFields | None = None
    """The agent session that this is a turn of: job_id (its id, 1 to 256 characters), is_last_step,
    ttl_ms (up to an hour: how long its KV is worth keeping after the answer), tool (what it waits
    for then)."""
    session_id: AgentSessionId | None = None
    """Id of the agent session where agent_hint has none; 1 to 256 characters, also as
    X-Session-ID."""

    @property
    def agent_session_id(self) -> str | None:
        """Id of the agent session that the request belongs to, if any."""
        hinted = self.agent_hint.job_id if self.agent_hint is not None else None
        return hinted or self.session_id

    @property
    def agent_session_field(self) -> str:
        """Name of the field that contains `agent_session_id`, for errors."""
        hint = self.agent_hint
        return "agent_hint" if hint is not None and hint.job_id else "session_id"


# Agent sessions and tools as the engine gets them; their names belong to one tenant.

_UNSAFE_CHARACTER: Final = re.compile(r"[^A-Za-z0-9_.:/-]")


def agent_hint(request: AgentFields, tenant: int) -> AgentHint | None:
    """Return the engine's hint about an agent's request; None for other requests.

    Raises InvalidRequestError for a hint without the id of a session.
    """
    hint, session_id = request.agent_hint, request.agent_session_id
    if session_id is None:
        if hint is not None:
            raise InvalidRequestError(
                "agent_hint.job_id is missing, and no session_id stands for it", "agent_hint"
            )
        return None
    if hint is None:
        return AgentHint(agent_session_name(session_id, tenant))
    return AgentHint(agent_session_name(session_id, tenant), hint.is_last_step, hint.ttl_ms)


def tool_name(tool: str, tenant: int) -> str:
    """Return the engine's name of a tool, different for each tenant; "" for no tool."""
    plain = _UNSAFE_CHARACTER.sub("_", tool[:MAX_TOOL_CHARACTERS])
    return f"{tenant:016x}/{plain}" if plain and tenant != DEFAULT_TENANT else plain
