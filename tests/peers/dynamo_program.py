"""Dynamo's SelectionService, driven by lines of JSON: [method, argument] → the method's result."""

import asyncio
import json
import sys


async def main() -> None:
    from dynamo._core import SelectionService  # type: ignore[import-not-found]

    service = SelectionService()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        method, argument = json.loads(line)
        print(json.dumps(await getattr(service, method)(argument)), flush=True)
    service.shutdown()


asyncio.run(main())
