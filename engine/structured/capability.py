"""Structured output as a capability of the engine: masks for requests that must fit. Extension B.

A mask is one field of a row's `Draw`, and Part 5 applies it. So the record stays whole, whatever computes it:
drafts, adapters, ranks and other requests of the batch need nothing of this. A step whose tokens decide the
next masks lands first. What was matched is kept with the request, follows its output alone, and needs nothing
when a request is preempted or a step fails.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.decoding.params import ParameterError
from engine.decoding.structured import StructuredOutputsParams
from engine.requests.batch import Batch
from engine.requests.request import Request
from engine.requests.step import Step, StepResult
from engine.speculation.capability import drafts_of
from engine.structured.constraint import Constraint, both
from engine.structured.matcher import Structure


class Structured:
    """A `Capability` of the engine. Its `prepare` belongs into the engine's `prepare`."""

    def __init__(
        self, compile: Callable[[StructuredOutputsParams], Structure], eos_ids: Sequence[int]
    ) -> None:
        """`compile` may be called in any thread, and raises ParameterError. `eos_ids` are the tokens that end
        an output.
        """
        self.compile, self._eos_ids = compile, tuple(eos_ids)

    def prepare(self, samples: list[Request]) -> None:
        """Give the samples of one request their constraints. Raises ParameterError if it is refused."""
        params = samples[0].params.structured_outputs
        if params is None:
            return
        if not self._eos_ids:
            message = "structured_outputs needs a token that ends an output, and this model has none"
            raise ParameterError("structured_outputs", message)
        structure = self.compile(params)
        for request in samples:
            request.constraint = Constraint(structure, self._eos_ids, request.output.token_ids)

    def before_submit(self, step: Step) -> Batch:
        """The record with a mask in each row of a request that must fit, and the other rows as they are."""
        batch = step.batch
        if not any(request.constraint for request in step.requests):
            return batch
        rows = list(batch.draws.rows)
        row = 0
        for request, count, drafts in zip(step.requests, batch.rows.counts, drafts_of(batch), strict=True):
            if request.constraint and count:
                for i, mask in enumerate(request.constraint.masks(drafts), start=row):
                    rows[i] = replace(rows[i], mask=both(mask, rows[i].mask), is_adjusted=True)
            row += count
        return replace(batch, draws=replace(batch.draws, rows=tuple(rows)))

    def must_land_first(self, step: Step) -> bool:
        """Whether a request that must fit gets a token in the step: it decides the next mask."""
        return any(
            request.constraint and count
            for request, count in zip(step.requests, step.batch.rows.counts, strict=True)
        )

    def after_result(self, step: Step, result: StepResult) -> StepResult:
        return result
