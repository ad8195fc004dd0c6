"""Settings of a model's images, from the files of its prepared folder."""

import json
from pathlib import Path
from typing import Any

from proto.errors import ModelError
from proto.messages.prepared_model import read_model_file


def read_settings(folder: str, name: str) -> dict[str, Any]:
    """Return the object in a file of a folder, empty without the file; raises ModelError."""
    try:
        content = json.loads(read_model_file(Path(folder, name)))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{name}: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{name}: an object is needed")
    return content


def processor_settings(folder: str) -> dict[str, Any]:
    """Return the settings of the image processor in a folder; raises ModelError.

    transformers 5 writes them into processor_config.json.
    """
    settings = read_settings(folder, "preprocessor_config.json")
    return settings or inner(read_settings(folder, "processor_config.json"), "image_processor")


def inner(settings: dict[str, Any], key: str) -> dict[str, Any]:
    """Return an object within settings, an empty one if there is none."""
    value = settings.get(key)
    return value if isinstance(value, dict) else {}
