"""What the engine hears of a job and its tools: names that belong to one tenant.

A job is known by a digest of its tenant and the client's id, so that equal ids of two tenants
never meet, and no id of a client's stands in a trace or a log. A tool's name stays readable,
with the tenant before it where there is one: what one tenant's tools take says nothing to
another's, and nobody can spoil it for them. Every front end makes the same of the same names.
"""

import re
from hashlib import blake2b
from typing import Final

from api_server.protocol.agents import MAX_TOOL_CHARACTERS, AgentFields
from api_server.tenants import NOBODY
from proto.agents import AgentHint
from proto.errors import InvalidRequestError

_DIGEST_BYTES: Final = 16
_ODD: Final = re.compile(r"[^A-Za-z0-9_.:/-]")


def agent_hint(request: AgentFields, tenant: int) -> AgentHint | None:
    """Whose turn a request is; None for nobody's.

    Raises InvalidRequestError for a hint without a job.
    """
    hint, job = request.agent_hint, request.job_id
    if job is None:
        if hint is not None:
            raise InvalidRequestError(
                "agent_hint.job_id is missing, and no session_id stands for it", "agent_hint"
            )
        return None
    if hint is None:
        return AgentHint(job_name(job, tenant))
    return AgentHint(job_name(job, tenant), hint.is_last_step, hint.ttl_ms)


def job_name(job_id: str, tenant: int) -> str:
    """Of a tenant's job: 32 digits after a letter."""
    key = tenant.to_bytes(8, "little")
    return "j" + blake2b(job_id.encode(), key=key, digest_size=_DIGEST_BYTES).hexdigest()


def tool_name(tool: str, tenant: int) -> str:
    """Of a tenant's tool, as a model may have written it; empty for none."""
    plain = _ODD.sub("_", tool[:MAX_TOOL_CHARACTERS])
    return f"{tenant:016x}/{plain}" if plain and tenant != NOBODY else plain
