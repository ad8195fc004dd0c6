"""The fake server as a separate process: `openai_program.py PORT [refuse]`."""

import asyncio
import signal
import socket
import sys

from tests.fakes.openai_server import FakeOpenAI


async def main(port: int) -> None:
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    listener = socket.create_server(("127.0.0.1", port))
    await FakeOpenAI().serve(listener, over)


if __name__ == "__main__":
    print("fake 0: loading weights …", flush=True)
    if "refuse" in sys.argv:
        sys.exit("there is no model")
    print("start: imports 0.25 s, weights 1.5 s", flush=True)
    asyncio.run(main(int(sys.argv[1])))
