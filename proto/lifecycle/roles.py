"""What the processes are called."""

from typing import Final, Literal

Role = Literal["api_server", "engine_core", "worker"]


_TITLES: Final[dict[Role, str]] = {
    "api_server": "api",
    "engine_core": "engine",
    "worker": "worker",
}


def process_title(role: Role) -> str:
    """What users call the processes of a role: "api", "engine", "worker"."""
    return _TITLES[role]


def process_name(role: Role, index: int) -> str:
    """What users see of a process: its title, its log lines, its obituary."""
    return f"{_TITLES[role]} {index}"
