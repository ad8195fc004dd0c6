"""An image takes the tokens in a prompt that transformers' processors give it."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from api_server.media.image_processors import ImageProcessor
from api_server.media.placeholders import read_placeholders
from proto.errors import ModelError
from tests.fakes.media import token_text, vision_folder
from tests.fakes.tiny_vision import IMAGE_ID, VISION_MODELS, random_image, reference_inputs

SIZES = {"square": (30, 30), "wide": (90, 40), "high": (20, 90), "a pixel": (1, 1)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", VISION_MODELS)
def test_prompts_have_the_tokens_of_the_processors_of_transformers(name, size, tmp_path) -> None:
    model = vision_folder(name, tmp_path / "m")
    image, second = random_image(1, *SIZES[size]), random_image(2, 24, 24)
    placeholders = read_placeholders(model, token_text(model.folder))
    processor = ImageProcessor.load(model.folder, model.vision.architecture)
    expansions = [
        placeholders.expand(pixels.shape, grid)
        for pixels, grid in (processor.process(each, "auto") for each in (image, second))
    ]
    mark = VISION_MODELS[name].placeholder
    assert placeholders.placeholder == mark
    text = f"ab{mark}cd{mark}"
    tokenizer = Tokenizer.from_file(f"{model.folder}/tokenizer.json")
    expanded = f"ab{expansions[0].text}cd{expansions[1].text}"
    reference = reference_inputs(name, [image, second], text)["input_ids"][0].tolist()
    assert tokenizer.encode(expanded).ids == reference
    assert reference.count(IMAGE_ID) == sum(each.num_embeds for each in expansions)


@pytest.mark.parametrize("strategy", ["default", "full"])
@pytest.mark.parametrize("tower", ["clip_vision_model", "siglip_vision_model"])
def test_llava_counts_the_rows_that_its_strategy_selects(tower, strategy, tmp_path) -> None:
    model = vision_folder("llava", tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    config["vision_feature_select_strategy"] = strategy
    config["vision_config"]["model_type"] = tower
    path.write_text(json.dumps(config))
    placeholders = read_placeholders(model, token_text(model.folder))
    rows = 36 + (tower == "clip_vision_model") - (strategy == "default")
    assert placeholders.expand((1, 3, 24, 24), ()) == ("<image>" * rows, rows)


def test_smolvlm_takes_the_markers_of_its_tokenizer(tmp_path) -> None:
    model = vision_folder("smolvlm", tmp_path / "m")
    path = tmp_path / "m" / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"fake_image_token": "<f>", "global_image_token": "<g>"}))
    placeholders = read_placeholders(model, token_text(model.folder))
    assert placeholders.expand((1, 3, 8, 8), (0, 0)) == ("<f><g><image><f>", 1)
    assert placeholders.expand((3, 3, 8, 8), (1, 2)) == (
        "<f><row_1_col_1><image><f><row_1_col_2><image>\n\n<f><g><image><f>",
        3,
    )


def test_lines_of_pixtral_end_with_markers(tmp_path) -> None:
    """Those that processor_config.json names, else the published ones."""
    model = vision_folder("mistral3", tmp_path / "m")
    path = tmp_path / "m" / "processor_config.json"
    path.write_text("{}")
    shape = (1, 3, 16, 24)
    expansion = read_placeholders(model, token_text(model.folder)).expand(shape, ())
    line = "<image>" * 3
    assert expansion == (f"{line}[IMG_BREAK]{line}[IMG_END]", 6)
    path.write_text(json.dumps({"image_break_token": "<b>", "image_end_token": "<e>"}))
    expansion = read_placeholders(model, token_text(model.folder)).expand(shape, ())
    assert expansion == (f"{line}<b>{line}<e>", 6)


@pytest.mark.parametrize("value", [0, -1, "2", 1 << 20])
def test_sizes_of_a_configuration_have_bounds(value, tmp_path) -> None:
    model = vision_folder("idefics3", tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scale_factor": value}))
    with pytest.raises(ModelError, match="scale_factor"):
        read_placeholders(model, token_text(model.folder))


def test_low_detail_leaves_an_image_whole(tmp_path) -> None:
    model = vision_folder("smolvlm", tmp_path / "m")
    processor = ImageProcessor.load(model.folder, model.vision.architecture)
    image = random_image(3, 90, 40)
    whole, grid = processor.process(image, "low")
    assert (whole.shape, grid) == ((1, 3, 24, 24), (0, 0))
    tiles, grid = processor.process(image, "high")
    assert (tiles.shape, grid) == ((3, 3, 24, 24), (1, 2))
    own = VISION_MODELS["smolvlm"].image_processor
    reference = own([[image]], do_image_splitting=False, return_tensors="np")["pixel_values"][0]
    assert np.array_equal(whole, reference)
