"""The logits of tiny models have the same bits with any number of threads, and when loaded again.

One model of every family, with each kernel variant and each form of weights whose products are
those of our kernels. `python -m tests.benchmarks.logit_digests` says why no digests are recorded
here, and compares the bits of two commits on one machine.
"""

import pytest

from tests.benchmarks.logit_digests import BLOCK_FORMS, DENSE_FORMS, compare, digests, every_model
from tests.worker.kernel_variants import LOADABLE, SOFTWARE_TILES, threads_of_torch
from worker.models.families import FAMILIES

OWN_FORMS = tuple(form for form in (*DENSE_FORMS, *BLOCK_FORMS) if "float32" not in str(form))
NAMES = sorted({family.module for family in FAMILIES.values() if not family.is_encoder})


@pytest.mark.suite("models")
@pytest.mark.skipif(not LOADABLE or SOFTWARE_TILES, reason="no compiled kernels on this machine")
@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_depend_on_threads(name: str) -> None:
    found: list[dict[str, str]] = []
    for count in (1, 3):
        models = [
            model._replace(forms=[form for form in model.forms if form in OWN_FORMS])
            for model in every_model()
            if model.name == name
        ]
        with threads_of_torch(count):
            found.append(dict(digests(models, LOADABLE)))
    assert len(found[0]) == len(LOADABLE) * len(OWN_FORMS)
    assert found[0] == found[1]


def test_differences_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    here = {"machine": {"cpu": "A"}, "digests": {"llama f32": "1", "glm f32": "2"}}
    there = {"machine": {"cpu": "A"}, "digests": {"llama f32": "1", "glm f32": "3", "bert": "4"}}
    assert compare(here, here) == 0
    assert compare(there, here) == 1
    text = capsys.readouterr().out
    assert "bert is missing" in text
    assert "glm f32 has other bits" in text
    assert compare({"machine": {"cpu": "B"}, "digests": {}}, here) == 2
