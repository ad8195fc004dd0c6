"""The real supervisor over fake processes: `fake_daemon.py RUN_PARENT ROLE=BEHAVIOUR…`.

The behaviours may include the settings `max_restarts=N`, `step_timeout=X`, `shutdown_timeout=X`,
`reload_strategy=S`, `api_server_count=N`, `data_parallel_size=N`, `standby_engines=N` and
`standby_workers=N`; `patience=X`, the seconds from
Shutdown to SIGKILL; and `model=broken`, a model that a reload fails to prepare, or `model=changed`,
one whose files a reload finds changed. Prints the ready line of `tokend serve` and ends like it.
"""

import os
import sys
import time
from pathlib import Path

from deploy.display import open_display
from deploy.environment import HostEnvironment
from deploy.notify import SystemdNotifier
from deploy.supervisor.launch import Launch, listen, url_of
from deploy.supervisor.shutdown import ON_REQUEST, ShutdownLimits
from deploy.supervisor.supervisor import Supervisor
from proto.codec import changed, to_json_line
from proto.messages.lifecycle import PhaseClock
from proto.messages.prepared_model import PreparedModel
from proto.settings.config import FrontEndConfig, ParallelConfig, ReliabilityConfig, ServeConfig

ROLES = ("worker", "engine_core", "api_server")
FAKE = str(Path(__file__).with_name("fake_process.py"))


def main(run_parent: str, choices: list[str]) -> int:
    behaviours = {**dict.fromkeys(ROLES, "good"), **dict(each.split("=") for each in choices)}
    reliability = ReliabilityConfig(
        max_restarts=int(behaviours.pop("max_restarts", 8)),
        step_timeout=float(behaviours.pop("step_timeout", 60)),
        shutdown_timeout=float(behaviours.pop("shutdown_timeout", 30)),
        standby_engines=int(behaviours.pop("standby_engines", 0)),
        standby_workers=int(behaviours.pop("standby_workers", 0)),
        reload_strategy=behaviours.pop("reload_strategy", "side-by-side"),  # type: ignore[arg-type]
    )
    seconds = float(behaviours.pop("patience", ON_REQUEST.until_kill))
    state = behaviours.pop("model", "")
    frontend = FrontEndConfig(api_server_count=int(behaviours.pop("api_server_count", 1)))
    parallel = ParallelConfig(data_parallel_size=int(behaviours.pop("data_parallel_size", 1)))
    config = ServeConfig(reliability=reliability, frontend=frontend, parallel=parallel)
    model = PreparedModel(
        folder="/nowhere",
        name="fake",
        source="/nowhere",
        architecture="FakeForCausalLM",
        vocab_size=256,
        max_position=128,
        weights_sample="0" * 64,
    )
    listener = listen("127.0.0.1", 0)

    environment = HostEnvironment.of(os.environ)
    notifier = SystemdNotifier(environment.service_manager)
    display = open_display(sys.stderr, "text", notifier)

    commands = {role: (sys.executable, "-P", FAKE, behaviours[role]) for role in ROLES}
    broken = state == "broken"
    script = "sys.exit('tokend: the model is broken')" if broken else "print(sys.argv[1])"
    found = changed(model, folder="/changed") if state == "changed" else model
    prepare = (sys.executable, "-c", f"import sys; {script}", to_json_line(found).decode())
    launch = Launch(
        config=config,
        model=model,
        listeners=(listener,),
        url=url_of(listener),
        variables=environment.variables,
        commands=commands,
        prepare_command=prepare,
        clock=PhaseClock(time.monotonic()),
    )
    limits = ShutdownLimits(seconds / 2, seconds)
    return Supervisor(launch, run_parent, display, notifier, limits).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
