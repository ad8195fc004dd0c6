"""The adapters (LoRA) that a front end serves: names, who may use them, and where they are found.

The engine has the names; a front end keeps the last list that it sent. A name that is not in it may
have been loaded through another front end a moment ago: a round trip to the engine brings the list
up to date. After that, with --lora-dir, the folder of this name is loaded.

Folders are looked up by name, never listed, by threads of their own, because a disk may be slow.
"""

import asyncio
import os
import stat
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, TypeVar

from api_server.engine.engine_client import EngineClient
from api_server.protocol.common import LoRAScale
from proto.codec import changed
from proto.errors import (
    InternalRequestError,
    InvalidRequestError,
    OverloadedError,
    RequestError,
    UnknownModelError,
    shown,
)
from proto.messages.lora import AdapterCall, AdapterCard, LoRARequest
from proto.settings.config import LoRAConfig
from proto.settings.lora_modules import LoRAAccess, check_lora_name

LOOKUP_SECONDS: Final = 5.0
"""Time that the disk may take to say whether there is an adapter of a name."""
_CONFIG: Final = "adapter_config.json"
_GGUF: Final = ".gguf"

Found = TypeVar("Found")


class InvalidAdapterError(InvalidRequestError):
    """A call about adapters is refused; the type is vLLM's."""

    type = "InvalidUserInput"


class ChosenAdapter(NamedTuple):
    """The adapter of a request. is_named: by the request, which is answered under its name."""

    lora: LoRARequest
    is_named: bool


class ServedAdapters:
    """Finds the adapters of requests, and has the engine load and unload some.

    base_names: of the model; a reload may replace them.
    """

    def __init__(self, client: EngineClient, config: LoRAConfig, base_names: Sequence[str]) -> None:
        self.base_names: Collection[str] = base_names
        self._client = client
        self._folder = None if config.lora_dir is None else os.path.realpath(config.lora_dir)
        self._allowed = [os.path.realpath(folder) for folder in config.lora_allowed_dirs]
        self._access = LoRAAccess(config.lora_access)
        self._lookups = ThreadPoolExecutor(2, "adapters")
        self._found: dict[str, asyncio.Task[None]] = {}

    # Requests

    def cards(self, key_name: str) -> list[AdapterCard]:
        """Return the adapters that clients with this key may use. key_name: empty for none."""
        return [
            card
            for name, card in self._client.adapters.by_name.items()
            if self._access.allows(name, key_name)
        ]

    def all_cards(self) -> list[AdapterCard]:
        """Return all adapters, for operators."""
        return list(self._client.adapters.by_name.values())

    def find(self, model: str | None, key_name: str) -> AdapterCard | None:
        """Return the adapter that a client may use under a name: NAME or BASE:NAME."""
        if model is None or model in self.base_names:
            return None
        name = self._adapter_name(model)
        card = self._client.adapters.by_name.get(name)
        return card if card is not None and self._access.allows(name, key_name) else None

    def choose(
        self, model: str | None, scales: Sequence[LoRAScale] | None, key_name: str
    ) -> ChosenAdapter | None:
        """Return the adapter of a request; None for the model alone, or an unknown name.

        scales: llama.cpp's field `lora`, None if it is not given. Raises InvalidRequestError.
        """
        card, scale, is_named = self.find(model, key_name), 1.0, True
        if scales is not None:
            used = [entry for entry in scales if entry.scale != 0.0]
            if len(used) > 1:
                raise InvalidRequestError("lora: a request has one adapter at most", "lora")
            if card is not None and used:
                raise InvalidRequestError("lora cannot be combined with an adapter's name", "lora")
            if card is None and used:
                card = self._numbered(used[0].id, key_name, "lora")
                scale, is_named = used[0].scale, False
        elif card is None and (model is None or model in self.base_names):
            card = self._client.adapters.default
            if card is not None and not self._access.allows(card.lora.lora_name, key_name):
                card = None
            scale, is_named = 1.0 if card is None else card.default_scale, False
        if card is None:
            return None
        lora = card.lora
        if scale != 1.0:
            lora = changed(lora, scale=scale)
        return ChosenAdapter(lora, is_named)

    async def prepare(self, model: object, key_name: str) -> None:
        """Make the adapter of a name known that this front end does not know yet, if there is one.

        Raises InvalidRequestError for an adapter of --lora-dir that cannot be loaded, and
        OverloadedError if its disk does not answer.
        """
        if not isinstance(model, str) or model in self.base_names:
            return
        name = self._adapter_name(model)
        if name in self._client.adapters.by_name or not self._access.allows(name, key_name):
            return
        try:
            check_lora_name(name)
        except ValueError:
            return
        await self._client.wait_for_lists()
        known = self._client.adapters.by_name
        if name in known or self._folder is None or not _is_plain(name):
            return
        task = self._found.get(name)
        if task is None:
            task = self._found[name] = asyncio.create_task(self._load_from_folder(name))
            task.add_done_callback(lambda _: self._found.pop(name, None))
        await asyncio.shield(task)

    # Calls of operators

    async def load(self, name: str, path: str, *, in_place: bool) -> str:
        """Load an adapter under a name; return the engine's text. Raises RequestError."""
        if name in self.base_names:
            raise InvalidAdapterError(
                f"The lora adapter name '{name}' conflicts with a served base model.", "lora_name"
            )
        try:
            check_lora_name(name)
        except ValueError as error:
            raise InvalidAdapterError(f"lora_name {error}", "lora_name") from None
        path = os.path.abspath(path)
        await self._look_up(self._check_path, path)
        is_taken = name in self._client.adapters.by_name and not in_place
        call = AdapterCall(0, 0, "load", name, path, load_inplace=in_place)
        return await self._call(call, "lora_name" if is_taken else "lora_path")

    async def unload(self, name: str) -> str:
        """Forget the name of an adapter; return the engine's text. Raises UnknownModelError."""
        return await self._call(AdapterCall(0, 0, "unload", name), "lora_name")

    async def set_default(self, scales: Sequence[LoRAScale]) -> None:
        """Apply an adapter to requests that name none, or no adapter. Raises RequestError."""
        used = [entry for entry in scales if entry.scale != 0.0]
        if len(used) > 1:
            raise InvalidRequestError("one adapter at most applies to a request", "scale")
        cards = self._client.adapters.by_number
        for entry in scales:
            if entry.id not in cards:
                raise InvalidRequestError(f"there is no adapter with the id {entry.id}", "id")
        name, scale = "", 0.0
        if used:
            name, scale = cards[used[0].id].lora.lora_name, used[0].scale
        await self._call(AdapterCall(0, 0, "default", name, scale=scale), "id")

    # Internals

    def _adapter_name(self, model: str) -> str:
        base, _, name = model.partition(":")
        return name if name and base in self.base_names else model

    def _numbered(self, number: int, key_name: str, field: str) -> AdapterCard:
        card = self._client.adapters.by_number.get(number)
        if card is not None and self._access.allows(card.lora.lora_name, key_name):
            return card
        raise InvalidRequestError(f"{field}: there is no adapter with the id {number}", field)

    async def _call(self, call: AdapterCall, field: str) -> str:
        reply = await self._client.call_adapters(call)
        if reply.status == 200:
            return reply.message
        if reply.status == 404:
            raise UnknownModelError(reply.message, field)
        if reply.status == 400:
            raise InvalidAdapterError(reply.message, field)
        raise InternalRequestError(reply.message, field)

    async def _load_from_folder(self, name: str) -> None:
        """Load the adapter of this name in --lora-dir, if there is one."""
        assert self._folder is not None
        path = await self._look_up(_find_in, self._folder, name)
        if path is None:
            return
        try:
            await self._call(AdapterCall(0, 0, "load", name, path), "model")
        except RequestError as error:
            if (
                name not in self._client.adapters.by_name
            ):  # otherwise another front end has loaded it
                raise InvalidRequestError(
                    f"the adapter {shown(name)} cannot be loaded: {error.message}", "model"
                ) from None

    async def _look_up(self, function: Callable[..., Found], *arguments: str) -> Found:
        """Return what a function finds on the disk. Raises OverloadedError if that does not answer.

        Two lookups run at once; if their disk has vanished, others wait for them, and no request
        that needs no lookup.
        """
        looking = asyncio.get_running_loop().run_in_executor(self._lookups, function, *arguments)
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                return await looking
        except TimeoutError:
            raise OverloadedError("the folder of adapters does not answer") from None

    def _check_path(self, path: str) -> None:
        """Raise UnknownModelError or InvalidAdapterError unless an adapter may be loaded."""
        try:
            is_allowed = not self._allowed or all(map(self._is_allowed, _with_files(path)))
        except OSError as error:  # files that cannot be listed may be links to anywhere
            text = f"lora_path cannot be listed: {error.strerror}"
            raise InvalidAdapterError(text, "lora_path") from None
        if not is_allowed:
            raise InvalidAdapterError(
                "lora_path, or a file in it, is outside the folders of --lora-allowed-dirs",
                "lora_path",
            )
        is_file = os.path.isfile(path) and path.endswith(_GGUF)
        if not is_file and not os.path.isfile(os.path.join(path, _CONFIG)):
            raise UnknownModelError(f"No adapter found for {path}", "lora_path")

    def _is_allowed(self, path: str) -> bool:
        """Return whether a path lies in a folder of --lora-allowed-dirs, links resolved."""
        real = os.path.realpath(path)
        return any(
            os.path.commonpath([folder, real]) == folder and real != folder
            for folder in self._allowed
        )


def _with_files(path: str) -> list[str]:
    """Return a path and, of a folder, the paths of its files, which may be links."""
    try:
        return [path, *(os.path.join(path, name) for name in os.listdir(path))]
    except (FileNotFoundError, NotADirectoryError):
        return [path]


def _is_plain(name: str) -> bool:
    """Return whether a name is one part of a path, and no hidden one."""
    return not name.startswith(".") and not any(sign in name for sign in "/\\\0")


def _find_in(folder: str, name: str) -> str | None:
    """Return the path of an adapter in a folder: a folder, or a GGUF file; None if there is none.

    Neither it nor its files may be links: they could lead out of the folder.
    """
    path = os.path.join(folder, name)
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            with os.scandir(path) as entries:
                files = {entry.name: entry.is_symlink() for entry in entries}
            return path if _CONFIG in files and not any(files.values()) else None
    except OSError:
        pass
    try:
        return path + _GGUF if stat.S_ISREG(os.lstat(path + _GGUF).st_mode) else None
    except OSError:
        return None
