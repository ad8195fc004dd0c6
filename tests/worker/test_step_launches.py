"""Each kind of step on a GPU launches what step_launches.json says, name by name and as often."""

import json

import pytest

from tests.worker import step_launches


@pytest.mark.suite("rehearsal")
def test_launches_are_those_on_record() -> None:
    found = step_launches.all_launches()
    stored = json.loads(step_launches.FILE.read_text())
    assert {model: list(steps) for model, steps in found.items()} == {
        model: list(steps) for model, steps in stored.items()
    }
    differences = [
        f"{model}, {step}: {name} {there.get(name, 0)} times on record, now {here.get(name, 0)}"
        for model, steps in found.items()
        for step, here in steps.items()
        for there in [stored[model][step]]
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]
    assert not differences, "\n".join(differences)
    assert found["llama"]["decode"]["graph"] == 1
    assert "graph" not in found["llama"]["two prompts"]
