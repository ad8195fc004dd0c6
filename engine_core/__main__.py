"""`python -P -m engine_core --boot-fd N`: the engine process."""

from engine_core.core import main
from proto.process import run

run(main)
