"""`python -P -m worker`, started by the supervisor."""

from proto.messages.lifecycle import ProcessBoot
from proto.runtime.process import Main, run
from proto.runtime.sockets import Link


def prepare(boot: ProcessBoot, supervisor: Link) -> Main:
    """Import torch and load the weights."""
    from worker.worker import prepare as load

    return load(boot, supervisor)


if __name__ == "__main__":
    run(prepare)
