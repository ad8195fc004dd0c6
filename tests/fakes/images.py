"""Images in tests: pictures by number, prompts with them, and the workers' side of encoder work."""

from collections.abc import Sequence

from proto.messages.multimodal import EncoderLimits, MultiModalFeature, SharedPixels
from proto.messages.prepared_model import VisionFacts
from proto.messages.scheduler_output import SchedulerOutput

IMAGE_TOKEN = 901
BEGIN, END = 902, 903
"""Markers around the tokens of an image."""


def picture(number: int, num_embeds: int, offset: int = 0) -> MultiModalFeature:
    """Return an image whose content is its number, with markers around its tokens."""
    name = f"{number}.pixels"
    return MultiModalFeature(
        offset,
        num_embeds + 2,
        num_embeds,
        number.to_bytes(32, "big"),
        SharedPixels(name, (3, 2, 2)),
    )


def with_pictures(
    parts: Sequence[list[int] | tuple[int, int]],
) -> tuple[list[int], list[MultiModalFeature]]:
    """Return the prompt of text and images in order, and the images.

    parts: token ids of a text, or (number, rows) of a picture.
    """
    prompt: list[int] = []
    features = []
    for part in parts:
        if isinstance(part, tuple):
            feature = picture(*part, offset=len(prompt))
            features.append(feature)
            prompt += [BEGIN, *[IMAGE_TOKEN] * feature.num_embeds, END]
        else:
            prompt += part
    return prompt, features


def encoder_limits(
    *,
    max_embeds: int = 64,
    is_bidirectional: bool = False,
    cache_size: int = 1000,
    **limits: int | bool | None,
) -> EncoderLimits:
    vision = VisionFacts(
        architecture="TestForConditionalGeneration",
        image_token_id=IMAGE_TOKEN,
        max_embeds=max_embeds,
        is_bidirectional=is_bidirectional,
    )
    return EncoderLimits(vision=vision, cache_size=cache_size, **limits)  # type: ignore[arg-type]


class FakeEncoder:
    """Encoder outputs of a worker: checks that a step only relies on what is there.

    rows: done, by image. broken: images that cannot be encoded. lost_files: names of files without
    pixels. failed: images that were tried and failed, until they are freed. row_seconds: time of a
    row.
    """

    def __init__(self, limits: EncoderLimits) -> None:
        self.limits = limits
        self.rows: dict[bytes, float] = {}
        self.num_embeds: dict[bytes, int] = {}
        self.broken: set[bytes] = set()
        self.lost_files: set[str] = set()
        self.failed: set[bytes] = set()
        self.row_seconds = 0.0
        self.num_encoded = 0

    def replacement(self) -> "FakeEncoder":
        """Return the encoder of a new worker."""
        new = FakeEncoder(self.limits)
        new.broken, new.lost_files = self.broken, self.lost_files
        new.row_seconds = self.row_seconds
        return new

    def execute(self, output: SchedulerOutput) -> list[bytes]:
        """Encode what a step asks for; return the images that failed."""
        for mm_hash in output.free_encoder_mm_hashes:
            del self.rows[mm_hash], self.num_embeds[mm_hash]
            self.failed.discard(mm_hash)
        failed = []
        total = 0.0
        for piece in output.scheduled_encoder_inputs:
            feature = piece.feature
            assert feature is not None
            assert self.rows.get(feature.mm_hash, 0.0) == piece.start < piece.end
            assert piece.end <= feature.num_embeds
            self.rows[feature.mm_hash] = piece.end
            self.num_embeds[feature.mm_hash] = feature.num_embeds
            self.num_encoded += piece.is_last
            total += piece.end - piece.start
            if feature.mm_hash in self.broken or feature.pixels.name in self.lost_files:
                failed.append(feature.mm_hash)
                self.failed.add(feature.mm_hash)
        limit = self.limits.max_input_tokens
        assert limit is None or total <= limit, "more is encoded than a step may"
        assert sum(self.num_embeds.values()) <= self.limits.cache_size
        partial = [each for each, done in self.rows.items() if done < self.num_embeds[each]]
        assert len(partial) <= self.limits.splits, "several images are encoded in part"
        return failed

    def seconds(self, output: SchedulerOutput) -> float:
        """Return the time of the encoder work of a step; hardly any for images that failed."""
        return sum(
            self.row_seconds * (piece.end - piece.start) * (0.001 if failed else 1.0)
            for piece in output.scheduled_encoder_inputs
            if piece.feature is not None
            for failed in [piece.feature.mm_hash in self.failed]
        )

    def fails(self, features: Sequence[MultiModalFeature], start: int, end: int) -> bool:
        """Return whether an image of the tokens [start, end) of a sequence has no output."""
        return any(
            each.offset < end and start < each.end and each.mm_hash in self.failed
            for each in features
        )

    def check_chunk(
        self, features: Sequence[MultiModalFeature], token_ids: list[int], start: int, end: int
    ) -> None:
        """Check that the tokens [start, end) of a sequence may be computed."""
        for feature in features:
            if feature.offset < end and start < feature.end:
                done = self.rows.get(feature.mm_hash)
                assert done == feature.num_embeds, "an image without encoder output is computed"
            if self.limits.vision.is_bidirectional and feature.offset < end < feature.end:
                pair = token_ids[end - 1 : end + 1]
                assert pair != [IMAGE_TOKEN] * 2, "an image is cut"


def image_at(features: Sequence[MultiModalFeature], position: int) -> bytes:
    """Return the hash of the image to which a position belongs; empty for text."""
    for feature in features:
        if feature.offset <= position < feature.end:
            return feature.mm_hash
    return b""
