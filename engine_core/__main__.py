"""`python -P -m engine_core --boot-fd N`: the engine process."""

from engine_core.compiled import use_compiled
from proto.messages.lifecycle import ProcessBoot
from proto.runtime.process import Main, run
from proto.runtime.sockets import Link


def prepare(boot: ProcessBoot, supervisor: Link) -> Main:
    """Import the engine, with compiled modules if there are any, after that choice."""
    use_compiled()
    from engine_core.core import main

    return main


run(prepare)
