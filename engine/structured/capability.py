"""Structured output as a capability of the engine: masks for requests whose output must fit. Extension B.

A mask is a field of a row's `Draw`, and Part 5 applies it when the row's token is chosen. So drafts,
adapters, several ranks and other requests of the batch need no code for masks. A step that gives such a
request a token lands before the next step is scheduled, since its token decides the next mask. How far an
output has come is kept in its request's `Constraint`, which reads the output alone. So nothing is to be done
when a request is preempted or a step fails.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from engine.decoding.params import ParameterError, SamplingParams
from engine.decoding.structured import StructuredOutputsParams
from engine.requests.batch import Batch
from engine.requests.request import Request
from engine.requests.step import Step, StepResult
from engine.requests.work import SlowWork
from engine.speculation.capability import drafts_of
from engine.structured.compiler import Compiler
from engine.structured.constraint import OutputConstraint, intersection


class StructuredOutput:
    """A `Capability` of the engine, and its `Preparation`."""

    def __init__(self, compiler: Compiler, eos_ids: Sequence[int]) -> None:
        """`eos_ids` are the tokens that end an output."""
        self.compiler, self._eos_ids = compiler, tuple(eos_ids)

    def slow_work(self, params: SamplingParams) -> SlowWork | None:
        """The work that compiles a request's constraint; None if it has none, or if that is compiled."""
        constraint = params.structured_outputs
        if not isinstance(constraint, StructuredOutputsParams):  # none, or not one: then `clone` will raise
            return None
        return self.work_to_compile(constraint)

    def work_to_compile(self, params: StructuredOutputsParams) -> SlowWork | None:
        """The work that compiles a constraint; None if it is compiled already."""
        key = self.compiler.key(params)
        if self.compiler.knows(key):
            return None
        return SlowWork(key, partial(self.compiler.compile, params))

    def prepare(self, samples: list[Request]) -> None:
        """Give each of the n samples of one prompt its `Constraint`, if its parameters have one. Any thread
        may call this. Raises ParameterError if the constraint is refused.
        """
        params = samples[0].params.structured_outputs  # the same for all samples
        if params is None:
            return
        if not self._eos_ids:
            message = "structured_outputs needs a token that ends an output, and this model has none"
            raise ParameterError("structured_outputs", message)
        structure = self.compiler.compile(params)
        for request in samples:
            request.constraint = OutputConstraint(structure, self._eos_ids, request.output.token_ids)

    def before_submit(self, step: Step) -> Batch:
        """The record with a mask in each row of a request that has a constraint, and the other rows as they
        are.
        """
        batch = step.batch
        if not any(request.constraint for request in step.requests):
            return batch
        rows = list(batch.draws.rows)
        first_row = 0  # the index of the request's first row
        counts = batch.rows.chosen_counts
        for request, num_rows, drafts in zip(step.requests, counts, drafts_of(batch), strict=True):
            if request.constraint and num_rows:
                # There may be fewer masks than rows: the rows behind them do not count.
                for i, mask in enumerate(request.constraint.masks(drafts), start=first_row):
                    rows[i] = replace(rows[i], mask=intersection(mask, rows[i].mask), is_adjusted=True)
            first_row += num_rows
        return replace(batch, draws=replace(batch.draws, rows=tuple(rows)))

    def must_land_first(self, step: Step) -> bool:
        """Whether the step gives a token to a request that has a constraint."""
        return any(
            request.constraint and num_rows
            for request, num_rows in zip(step.requests, step.batch.rows.chosen_counts, strict=True)
        )

    def after_result(self, step: Step, result: StepResult) -> StepResult:
        """`result` as it is."""
        return result
