"""`python -P -m worker`, started by the supervisor."""

from proto.process import run
from worker.worker import main

if __name__ == "__main__":
    run(main)
