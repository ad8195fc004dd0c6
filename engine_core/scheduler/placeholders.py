"""Placeholders: outputs that are being sampled while the next step is planned.

Owns `Request.num_output_placeholders`. A request whose step is in flight has tokens
that nobody here knows yet, but the worker will, before it comes to the next step:

    all_token_ids     |--- prompt ---|-- outputs --|
    placeholders                                   | ? |
    next step computes                             |-1-|   and samples another

Ids are needed for hashing a block, for stop tokens and for computing a request anew;
these wait until the result is here. Counting is all that a next step needs.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Protocol

from engine_core.request import Request
from engine_core.scheduler.step_plan import StepPlan
from proto.model_runner_output import ModelRunnerOutput


class Placeholders(Protocol):
    """What a scheduler assumes of steps whose results are not here yet."""

    def reserve(self, plan: StepPlan) -> None:
        """A step is on its way; its tokens count as computed already."""
        ...

    def fill(
        self,
        requests: Mapping[int, Request],
        result: ModelRunnerOutput,
        void_until: Mapping[int, int],
    ) -> None:
        """A result was taken in. requests: by handle, those that are not over.

        void_until: by handle, the last step that does not count for a request.
        """
        ...


class NoPlaceholders:
    """Nothing: a request is planned again when its result is here."""

    def reserve(self, plan: StepPlan) -> None:
        """Nobody plans on it."""

    def fill(
        self,
        requests: Mapping[int, Request],
        result: ModelRunnerOutput,
        void_until: Mapping[int, int],
    ) -> None:
        """Nothing was reserved."""


class OutputPlaceholders:
    """One for each token that a step in flight samples; results come in the order of steps."""

    def reserve(self, plan: StepPlan) -> None:
        for request in chain(plan.continued, plan.admitted):
            num_tokens = len(request.all_token_ids) + request.num_output_placeholders
            if request.num_computed_tokens >= num_tokens:
                request.num_output_placeholders += 1

    def fill(
        self,
        requests: Mapping[int, Request],
        result: ModelRunnerOutput,
        void_until: Mapping[int, int],
    ) -> None:
        for handle, token_ids in zip(result.handles, result.sampled_token_ids, strict=True):
            request = requests.get(handle)
            if token_ids and request is not None and void_until.get(handle, 0) < result.step:
                request.num_output_placeholders -= 1
