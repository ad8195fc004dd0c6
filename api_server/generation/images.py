"""Images of a request: from parts of its messages to features of the prompt.

    messages     "compare" (image) "and" (image)
    rendered     compare <p> and <p>                       <p>: the placeholder of the template
    expanded     compare <i> <i> <i> and <m> <i> <i> <m>   <i>: the image token, <m>: markers
    features             |---------|         |-----|       of each image, in token ids

The k-th placeholder is that of the k-th image, so a client may not write one beside images.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, Final

from api_server.media.reader import ImageSource, LoadedImage, MediaReader
from api_server.protocol.chat import ConversationFields, Message
from api_server.text.tokenizer import ModelTokenizer
from proto.errors import InvalidRequestError, shown
from proto.messages.lifecycle import ProcessBoot
from proto.messages.multimodal import MultiModalFeature
from proto.messages.prepared_model import PreparedModel

_OTHER_TEXTS: Final = {"tools", "documents", "chat_template_kwargs"}
"""Fields beside the messages whose texts may be part of the prompt."""


@dataclass(frozen=True, slots=True)
class ImageInput:
    """How a model reads images.

    image_token_id: of the reader's image token. max_images: of a request.
    """

    reader: MediaReader
    image_token_id: int
    max_images: int

    @property
    def placeholder(self) -> str:
        return self.reader.placeholder

    def find_sources(self, request: ConversationFields) -> list[ImageSource]:
        """Return the images of the messages, in their order.

        Raises InvalidRequestError for too many, and for a text beside images that would be read as
        one.
        """
        sources = [
            ImageSource(
                part.url, part.uuid, part.detail, f"messages[{index}].content[{number}].image_url"
            )
            for index, message in enumerate(request.messages)
            for number, part in enumerate(message.parts)
            if part.is_image
        ]
        if len(sources) > self.max_images:
            raise InvalidRequestError(
                f"messages: at most {self.max_images} images per request, got {len(sources)} "
                "(--limit-mm-per-prompt)",
                "messages",
            )
        if sources:
            self._check_texts(request)
        return sources

    def _check_texts(self, request: ConversationFields) -> None:
        """Raise InvalidRequestError for a text that contains the placeholder or the image token."""
        texts: Iterator[tuple[str, str]] = chain(
            (
                (f"messages[{index}]", text)
                for index, message in enumerate(request.messages)
                for text in _strings([message.model_dump(exclude={"content"}), *message.texts])
            ),
            (
                (name, text)
                for name, value in request.model_dump(include=_OTHER_TEXTS).items()
                for text in _strings(value)
            ),
        )
        for where, text in texts:
            for mark in (self.placeholder, self.reader.image_token):
                if mark in text:
                    raise InvalidRequestError(
                        f"{where}: a text beside images must not contain {shown(mark)}, which "
                        "stands for an image",
                        where.partition("[")[0],
                    )

    def is_rendered(self, text: str, sources: Sequence[ImageSource]) -> bool:
        """Return whether a rendered prompt has a placeholder for each image."""
        return text.count(self.placeholder) == len(sources)

    def not_rendered(
        self, messages: Sequence[Message], text: str, sources: Sequence[ImageSource]
    ) -> InvalidRequestError:
        """Return the error for a prompt without a placeholder for each image."""
        for index, message in enumerate(messages):
            if message.has_images and message.role != "user":
                return InvalidRequestError(
                    f"messages[{index}]: the model's chat template renders no images in messages "
                    f"of the role {message.role}",
                    "messages",
                )
        number = text.count(self.placeholder)
        return InvalidRequestError(
            f"messages: the model's chat template renders {number} of {len(sources)} images",
            "messages",
        )

    async def load(
        self, sources: Sequence[ImageSource], tenant: int, salt: str | None, leases: ExitStack
    ) -> list[LoadedImage]:
        """Return the images, whose leases `leases` releases when it is closed.

        Raises InvalidRequestError that names an image that cannot be read.
        """
        images = await self.reader.read(sources, tenant, salt)
        for image in images:
            leases.callback(image.lease.release)
        return images

    def expand(self, text: str, images: Sequence[LoadedImage]) -> str:
        """Return a rendered prompt with the tokens of the images in place of the placeholders."""
        expansions = [image.expansion for image in images]
        pieces = zip_longest(text.split(self.placeholder), expansions, fillvalue="")
        return "".join(chain.from_iterable(pieces))

    def features(
        self, token_ids: list[int], images: Sequence[LoadedImage]
    ) -> list[MultiModalFeature]:
        """Return where the images are among the token ids of an expanded prompt.

        Raises InvalidRequestError if they do not have as many image tokens as the images have rows.
        """
        number, wanted = token_ids.count(self.image_token_id), sum(i.num_embeds for i in images)
        if number != wanted:
            raise InvalidRequestError(
                f"messages: the prompt has {number} image tokens, and its images have {wanted}",
                "messages",
            )
        features, position = [], 0
        for image in images:
            offset = end = token_ids.index(self.image_token_id, position)
            for _ in range(image.num_embeds):
                end = token_ids.index(self.image_token_id, end) + 1
            features.append(
                MultiModalFeature(
                    offset=offset,
                    length=end - offset,
                    num_embeds=image.num_embeds,
                    mm_hash=image.mm_hash,
                    pixels=image.pixels,
                    grid=image.grid,
                )
            )
            position = end
        return features


def make_image_input(
    boot: ProcessBoot,
    model: PreparedModel,
    tokenizer: ModelTokenizer,
    reader: MediaReader | None = None,
) -> ImageInput | None:
    """Return how a front end reads images for a model; None for text only.

    reader: in place of one for the model. Raises ModelError.
    """
    config = boot.config.media
    if model.vision is None:
        return None
    if reader is None:
        owner = f"{boot.index}.{boot.incarnation}"

        def token_text(token_id: int) -> str:
            return tokenizer.token_names([token_id])[0] or ""

        reader = MediaReader.create(model, config, boot.run_dir, owner, token_text)
    return ImageInput(reader, model.vision.image_token_id, config.max_images)


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, names of members among them."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, Mapping):
            pending += [*part, *part.values()]
        elif isinstance(part, list | tuple):
            pending += part
