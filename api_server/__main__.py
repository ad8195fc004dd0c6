"""A front-end process: `python -P -m api_server`, started by the supervisor."""

from api_server.server import main
from proto.runtime import process

if __name__ == "__main__":
    process.run(lambda boot, supervisor: main)
