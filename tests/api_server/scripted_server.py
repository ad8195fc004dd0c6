"""The application over HTTP with a scripted engine behind it: `scripted_server.py PORT [KEY]`.

For tests of API clients without a model. Prints a line when it listens; SIGTERM ends it.
"""

import asyncio
import signal
import sys
import tempfile
from pathlib import Path

from proto.settings.config import FrontEndConfig
from tests.api_server.conftest import TEMPLATE, byte_level_tokenizer, prepared, serving

WORDS = "the quick brown fox"


async def serve(port: int, key: str | None) -> None:
    tokenizer = byte_level_tokenizer()
    ids = [*tokenizer.encode(WORDS).ids, 2]
    config = FrontEndConfig(
        api_key=key, enable_tokenizer_info_endpoint=True, disable_log_requests=True
    )
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    with tempfile.TemporaryDirectory(prefix="td-") as place:
        tokenizer.save(f"{place}/tokenizer.json")
        Path(place, "chat_template.jinja").write_text(TEMPLATE)
        model = prepared(Path(place), tokenizer.get_vocab_size(), has_chat_template=True)
        async with serving(
            place, model, lambda request, choice: ids, config=config, port=port
        ) as front_end:
            print(f"listening at {front_end.url}", flush=True)
            await ended.wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None))
