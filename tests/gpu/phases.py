"""The phases of `make gpu-check`: names, time limits and requirements."""

from typing import Final, NamedTuple


class Phase(NamedTuple):
    """function: "module:function" of tests.gpu, which is given a Report.

    seconds: time limit of its processes; figures until then are kept.
    """

    name: str
    function: str
    seconds: float


PHASES: Final = (
    Phase("versions", "basics:versions", 30.0),
    Phase("ceilings", "basics:ceilings", 30.0),
    Phase("modules", "kernels:modules", 20.0),
    Phase("operators", "kernels:operators", 20.0),
    Phase("attention", "kernels:attention", 100.0),
    Phase("sampling", "kernels:sampling", 50.0),
    Phase("parity", "models:parity", 50.0),
    Phase("families", "models:families", 50.0),
    Phase("decode-1b", "models:decode_1b", 40.0),
    Phase("decode-8b", "models:decode_8b", 40.0),
    Phase("prefill-8b", "models:prefill_8b", 40.0),
    Phase("decode-latent", "models:decode_latent", 40.0),
    Phase("steps-8b", "serving:steps_8b", 40.0),
    Phase("probe", "probe:probe", 110.0),
    Phase("drafts-1b", "answers:drafts_1b", 120.0),
    Phase("daemon-8b", "server:daemon_8b", 90.0),
    Phase("answers-1b", "answers:answers_1b", 120.0),
    Phase("invariance-1b", "answers:invariance_1b", 100.0),
    Phase("quantised", "kernels:quantised", 60.0),
    Phase("memory-mixed", "memory:mixed", 60.0),
    Phase("memory-graphs", "memory:graphs", 60.0),
    Phase("memory-overlapped", "memory:overlapped", 50.0),
    Phase("transformers-8b", "serving:transformers_8b", 70.0),
    Phase("experts", "kernels:experts", 30.0),
)

FIRST_HOUR: Final = {
    "a": (
        "versions",
        "ceilings",
        "modules",
        "operators",
        "attention",
        "sampling",
        "parity",
        "families",
        "decode-1b",
    ),
    "b": ("decode-8b", "prefill-8b", "decode-latent", "steps-8b", "probe", "drafts-1b"),
    "c": ("daemon-8b", "answers-1b", "invariance-1b", "quantised"),
    "d": ("memory-mixed", "memory-graphs", "memory-overlapped", "transformers-8b", "experts"),
}
"""The commands of first_hour.sh, in the order of what they prove."""
