"""Images in a prompt: where they stand, what they are, and how much of one a step encodes.

    prompt       | text | <m> <i> <i> <i> <m> <i> <m> | text |   <i>: the image token, <m>: markers
    feature               |--------- length ---------|
    encoder rows               0   1   2       3           num_embeds = 4

The front end puts the pixels into shared memory once; the workers read them from there.
"""

import msgspec

from proto.messages.prepared_model import VisionFacts

MM_HASH_BYTES = 32
"""Length of `MultiModalFeature.mm_hash`."""


class SharedPixels(msgspec.Struct, array_like=True, frozen=True):
    """Pixels of an image as its model takes them, in shared memory.

    name: of a file in the folder for pixels, without a path. shape: of the float32 numbers, which
    are little-endian, in C order.
    """

    name: str
    shape: tuple[int, ...]


class MultiModalFeature(msgspec.Struct, array_like=True, frozen=True):
    """An image in a prompt.

    offset, length: the prompt tokens [offset, offset + length) belong to it, markers included.
    num_embeds: rows of its encoder output. As many tokens of the range are the image token; each
        takes a row in place of its embedding, in order.
    mm_hash: SHA-256 of the encoded image, of how it is processed, and of the tenant and the salt
        that may find it in a cache; in an engine also of an adapter that changes its encoding.
    grid: sizes that the encoder needs besides the shape of the pixels, as its model counts them;
        with M-RoPE frames, rows and columns of patches, whose pixels lie square by square.
    """

    offset: int
    length: int
    num_embeds: int
    mm_hash: bytes
    pixels: SharedPixels
    grid: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Position of the first token after the image."""
        return self.offset + self.length


class EncoderSlice(msgspec.Struct, array_like=True, frozen=True):
    """A part of the work of encoding an image, which a step does before its tokens.

    seq_id, index: of the sequence for which the image was begun, and of the image in its prompt.
        The workers may not know the sequence yet, or not any more.
    start, end: the share [start / num_embeds, end / num_embeds) of its work, in rows and parts of
        rows; a slice follows those of earlier steps. With end = num_embeds the output is complete,
        and the tokens of this step may take it.
    feature: the image; the engine gives it with every slice.
    lora_int_id, lora_scale: the adapter with which it is encoded, which the workers hold when the
        image is begun, and the factor of its effect; 0 for none.
    """

    seq_id: int
    index: int
    start: float
    end: float
    feature: MultiModalFeature | None = None
    lora_int_id: int = 0
    lora_scale: float = 1.0

    @property
    def is_last(self) -> bool:
        """Whether the output is complete after it."""
        return self.feature is not None and self.end == self.feature.num_embeds


class EncoderLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How the images of a model are encoded.

    cache_size: rows of encoder output that workers keep.
    max_input_tokens: rows of a step; None: what takes as long as decoding requests can wait.
    splits: whether an image may be encoded in slices, over several steps.
    """

    vision: VisionFacts
    cache_size: int
    max_input_tokens: int | None = None
    splits: bool = True
