"""Speculation and one step ahead, by turns: steps run ahead while nothing is proposed. Part 16.

Proposals are made from a step's tokens, so nothing can be launched before these are read. But mostly it is
known beforehand whether any will be made: `Lengths` is asked when the next step could be launched, with one
still in flight. If the answer is no, the next one goes on top, as in Part 13. Else the step lands, proposals
follow, and the step that verifies them is alone on the device.

Promises the tokens of one step at a time, and that a plain step costs `Lengths` what it costs where steps run
ahead: drafts have to be worth what they keep from being overlapped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.ahead import AheadEngine, AheadExecutor, choosing
from engine.batch import Batch
from engine.decoding.outputs import RequestOutput
from engine.executor import Pending, StepResult
from engine.llm_engine import Failed, Flight
from engine.scheduling.request import Request, State
from engine.scoring import ScoringExecutor
from engine.speculation.executor import SpeculativeExecutor
from engine.speculation.verify import has_drafts


class RememberingExecutor(AheadExecutor):
    """Remembers what plain steps chose. Nobody asks for what a verifying step did: nothing goes on top of it,
    its tokens are on the host, and it may have more rows than there is room for.
    """

    def submit(self, batch: Batch) -> Pending:
        if has_drafts(batch):
            return ScoringExecutor.submit(self, batch)
        return super().submit(batch)


@dataclass
class AheadPending:
    """A step under way, of which it may be settled already that nothing is proposed behind it."""

    executor: "AheadSpeculativeExecutor"
    batch: Batch
    pending: Pending
    start: float
    launching: float  # seconds that `submit` took
    landings: int  # of steps before this one was launched
    wanted: list[int] | None = None  # [S]: how many tokens to propose, once that is settled

    def choosing(self) -> list[Request]:
        """Who gets a token from it; with drafts, perhaps several."""
        return choosing(self.pending.batch)

    def proposes(self) -> bool:
        """Whether it must land before the next one is launched. Settles it: `Lengths` is asked once."""
        if self.wanted is None:
            self.wanted = self.executor.settle(self)
        return any(self.wanted)

    def result(self) -> StepResult:
        return self.executor.land(self, self.pending.result())


class AheadSpeculativeExecutor(SpeculativeExecutor):
    """Its steps may be launched before the last one has landed, if that one proposes nothing."""

    _landings = 0
    _landed: float | None = None  # when the last step had landed, proposals included

    def submit(self, batch: Batch) -> AheadPending:
        start = self.clock()
        pending = self.inner.submit(batch)
        return AheadPending(self, batch, pending, start, self.clock() - start, self._landings)

    def settle(self, step: AheadPending) -> list[int]:
        """[S]: how many tokens to propose for each request of a plain step that has not landed: of its tokens
        it is known that there is one of each.
        """
        batch, people = step.batch, len(step.choosing())
        self._introduce(step)
        if self.lengths.ahead and self.lengths.on_top and people == batch.num_tokens:
            self.lengths.checks()
        if not self.lengths.asks(people):
            return [0] * len(batch.requests)
        coming = zip(batch.requests, step.pending.batch.logit_rows, strict=True)
        return self.choose(batch, [self.cap(request, len(rows)) for request, rows in coming])

    def land(self, step: AheadPending, result: StepResult) -> StepResult:
        """A step costs the time since the landing before it: all that the host did meanwhile is in it, as far
        as the device had to wait. Where launching alone took longer (a CPU computes there), it costs that.
        """
        self._introduce(step)
        since = step.start if self._landed is None else self._landed
        seconds = max(self.clock() - since, step.launching)
        found = self.landed(step.batch, result, seconds, step.wanted)
        self._landings += 1
        self._landed = self.clock()
        return found

    def _introduce(self, step: AheadPending) -> None:
        """Tell `lengths` which step is talked of. Penalties wait for the last token in any case."""
        self.lengths.ahead = not _adjusted(step.batch.requests)
        self.lengths.on_top = self._landings > step.landings


class AheadSpeculativeEngine(AheadEngine):
    """An engine that launches a step before it lands the last one, unless there are drafts between them."""

    def step(self) -> list[RequestOutput]:
        """Launch a step on top of the one in flight, and land that; or land that one alone. An output for
        each request that was in it.
        """
        landing = self._flight
        if landing and self._lands_first(landing):
            self._flight = None
            return self.land(landing)
        if landing:
            for request in landing.pending.choosing():
                if request.state is not State.FINISHED:  # aborted meanwhile
                    request.expect()
        self._flight = ahead = self.launch()
        if landing:
            return self.land(landing)
        return [] if ahead else self._stuck()

    def _lands_first(self, flight: Flight) -> bool:
        """Whether its result is needed before the next step can be launched."""
        if isinstance(flight.pending, Failed) or has_drafts(flight.batch):
            return True
        return _adjusted(self.scheduler.running) or flight.pending.proposes()


def _adjusted(requests: Sequence[Request]) -> bool:
    return any(request.sampling.is_adjusted for request in requests)
