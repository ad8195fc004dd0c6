"""The setting --limit-mm-per-prompt: most images of a prompt, in vLLM's JSON."""

from typing import Final

from proto.settings.json_flag import flag_error, parse_json_flag

DEFAULT_IMAGES: Final = 64
_FIELD: Final = "limit_mm_per_prompt"
_KINDS: Final = ("image", "video", "audio")


def parse_limit_mm(text: str | None) -> int:
    """Return the most images; raises ConfigError naming the flag, and the key at fault.

    A limit is a number, or an object with it as `count`, as in vLLM, whose other keys are sizes to
    plan memory for. Limits of videos and audio are taken, since a prompt has none.
    """
    if text is None:
        return DEFAULT_IMAGES
    limits = {}
    for kind, value in parse_json_flag(_FIELD, text, '{"image": 4}').items():
        if kind not in _KINDS:
            raise flag_error(_FIELD, f" has no {kind}; it has {', '.join(_KINDS)}")
        count = value.get("count", DEFAULT_IMAGES) if isinstance(value, dict) else value
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise flag_error(_FIELD, f": {kind} must be a number, 0 or more")
        limits[kind] = count
    return limits.get("image", DEFAULT_IMAGES)
