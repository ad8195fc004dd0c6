"""Models with injected NaN logits."""

from unittest.mock import Mock

import torch

from proto.faults import Fault, FaultInjector
from worker.runner_builder import FaultyModel


def test_only_the_chosen_step_has_nan_logits() -> None:
    model = Mock(spec=["forward"])
    model.forward.return_value = torch.ones(2, 3)
    injector = FaultInjector([Fault("worker", 0, "nan", 2)])
    faulty = FaultyModel(model, injector)
    broken = []
    for _ in range(3):
        injector.begin_step()
        hidden = faulty.forward(torch.zeros(2), torch.zeros(2), Mock())
        broken.append(bool(hidden.isnan().all()))
    assert broken == [False, True, False]
