"""`python -P -m worker`, started by the supervisor."""

from proto.runtime.process import run
from worker.worker import main

if __name__ == "__main__":
    run(main)
