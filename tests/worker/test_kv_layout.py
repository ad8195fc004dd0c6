"""Layers are distributed to KV cache groups of equal size."""

import pytest

from worker.attention.kv_cache import LayerSlot, Window, kv_layout

W = 512


def groups_of(windows: list[Window]) -> list[list[int]]:
    """The layers of each group, in the order of their slots."""
    layout = kv_layout(windows)
    groups: list[list[int]] = [[] for _ in layout.windows]
    for layer in sorted(range(len(windows)), key=lambda each: layout.layer_slots[each].slot):
        groups[layout.layer_slots[layer].group].append(layer)
    assert max(map(len, groups)) == layout.num_slots
    for group, layers in enumerate(groups):
        assert {windows[layer] for layer in layers} == {layout.windows[group]}
        assert [layout.layer_slots[layer] for layer in layers] == [
            LayerSlot(group, slot) for slot in range(len(layers))
        ]
    return groups


@pytest.mark.parametrize("window", [None, W])
def test_layers_of_one_kind_form_one_group(window: Window) -> None:
    assert groups_of([window] * 4) == [[0, 1, 2, 3]]
    assert kv_layout([window] * 4).windows == (window,)


def test_gemma3_270m_has_six_groups_of_three() -> None:
    windows = [None if layer % 6 == 5 else W for layer in range(18)]
    groups = groups_of(windows)
    assert groups[0] == [5, 11, 17]
    assert [len(layers) for layers in groups] == [3] * 6
    assert kv_layout(windows).windows == (None, W, W, W, W, W)


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([None] * 2 + [W] * 4, [[0, 1], [2, 4], [3, 5]]),
        ([None] * 3 + [W] * 7, [[0, 1, 2], [3, 6, 9], [4, 7], [5, 8]]),
        ([None] * 6 + [W] * 5, [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]),
        ([None] * 5 + [W] * 6, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10]]),
        ([W, None, W], [[1], [0], [2]]),
    ],
)
def test_kinds_with_different_layer_counts(
    windows: list[Window], expected: list[list[int]]
) -> None:
    assert groups_of(windows) == expected


def test_every_window_size_is_a_kind() -> None:
    assert groups_of([128, 1024, None, 128]) == [[2], [1], [0], [3]]
    assert kv_layout([128, 1024, None, 128]).windows == (None, 1024, 128, 128)
