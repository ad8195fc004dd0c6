"""`python -P -m engine_core --boot-fd N`: the engine process."""

from engine_core.compiled import use_compiled
from proto.messages.lifecycle import ProcessBoot
from proto.runtime.process import run
from proto.runtime.sockets import Link


def main(boot: ProcessBoot, supervisor: Link) -> None:
    """Run the engine, with compiled modules if there are any; import it after that choice."""
    use_compiled()
    from engine_core.core import main as run_engine

    run_engine(boot, supervisor)


run(main)
