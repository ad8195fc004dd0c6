"""The phases of `make gpu-check` and of hour.sh: names, time limits, and what has run on a GPU.

A feature registers a phase by a line here: a function of a module of this folder that is given a
Report. It proves one thing within 40 seconds, writes figures as they come, and a hang of it costs
its own limit. What has never run on a GPU comes first; `has_run` is set when its figures are in
docs/benchmarks/gpu.md.
"""

from typing import Final, NamedTuple

MAX_SECONDS: Final = 40.0
"""Limit of a phase of the hour."""
HOUR_SECONDS: Final = 900.0
"""Limit of all of them together."""
COMMAND_SECONDS: Final = 550.0
"""Time of one command of hour.sh, after which the next one continues."""


class Phase(NamedTuple):
    """function: "module:function" of tests.gpu, which is given a Report.

    seconds: time limit of its processes; figures until then are kept. has_run: on a GPU.
    in_hour: whether hour.sh runs it; all others are for `make gpu-check` alone.
    """

    name: str
    function: str
    seconds: float
    has_run: bool = True
    in_hour: bool = True


PHASES: Final = (
    Phase("versions", "basics:versions", 20.0),
    # Never run on a GPU
    Phase("adapters", "kernels:adapters", 30.0, has_run=False),
    Phase("states", "states:states", 30.0, has_run=False),
    Phase("filters", "kernels:filters", 40.0, has_run=False),
    Phase("splits", "probe:splits", 40.0, has_run=False),
    Phase("plain-1b", "answers:plain_1b", 40.0, has_run=False),
    Phase("draft-model", "answers:draft_model", 40.0, has_run=False),
    Phase("draft-head", "answers:draft_head", 40.0, has_run=False),
    Phase("offload", "offload:copies", 30.0, has_run=False),
    Phase("swap", "answers:swap", 40.0, has_run=False),
    Phase("experts", "kernels:experts", 30.0, has_run=False),
    Phase("fp8-bias", "kernels:fp8_bias", 20.0, has_run=False),
    Phase("layers", "models:layers", 20.0, has_run=False),
    # The rest of the hour, in the order of what it proves
    Phase("ceilings", "basics:ceilings", 20.0),
    Phase("modules", "kernels:modules", 20.0),
    Phase("operators", "kernels:operators", 20.0),
    Phase("attention", "kernels:attention", 40.0),
    Phase("kernels", "kernels:others", 40.0),
    Phase("sampling", "kernels:sampling", 40.0),
    Phase("parity", "models:parity", 40.0),
    Phase("families", "models:families", 40.0),
    Phase("decode-1b", "models:decode_1b", 40.0),
    Phase("decode-8b", "models:decode_8b", 40.0),
    Phase("prefill-8b", "models:prefill_8b", 40.0),
    Phase("steps-8b", "serving:steps_8b", 40.0),
    Phase("answers-1b", "answers:answers_1b", 40.0),
    # Too long for the hour
    Phase("eager-1b", "answers:eager_1b", 60.0, in_hour=False),
    Phase("probe", "probe:probe", 90.0, in_hour=False),
    Phase("daemon-8b", "server:daemon_8b", 90.0, in_hour=False),
    Phase("invariance-1b", "answers:invariance_1b", 100.0, in_hour=False),
    Phase("quantised", "kernels:quantised", 60.0, in_hour=False),
    Phase("memory-mixed", "memory:mixed", 60.0, in_hour=False),
    Phase("memory-graphs", "memory:graphs", 60.0, in_hour=False),
    Phase("memory-overlapped", "memory:overlapped", 50.0, in_hour=False),
    Phase("decode-latent", "models:decode_latent", 40.0, in_hour=False),
    Phase("transformers-8b", "serving:transformers_8b", 70.0, in_hour=False),
)
"""In the order in which they run."""
