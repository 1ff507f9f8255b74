"""One step ahead: the next step is on the device before the last one's tokens have been read. Part 13.

A GPU that waits while the host reads tokens, checks stops and schedules is idle for as long. Here the tokens
of a step stay where they were chosen, the next step finds them there, and the host works while the device
does. Promises the tokens of one step at a time. A request that ends by a stop token is found out one step
late, and costs one wasted token; one that ends by its length costs none.
"""

from engine.core.llm_engine import LLMEngine
from engine.decoding.outputs import RequestOutput
from engine.requests.request import State
from engine.requests.step import Step


class AheadEngine(LLMEngine):
    """An engine that launches a step before it lands the last one."""

    _flying: Step | None = None

    def has_unfinished_requests(self) -> bool:
        return self._flying is not None or super().has_unfinished_requests()

    def step(self) -> list[RequestOutput]:
        """Launch a step, and land the one before it, if any: an output for each request that was in that one.

        If the step in flight must land first (`_lands_first`), it lands, and none is launched. Else it is
        `overtaken`, and whoever gets a token from it (`choosing`), and has not finished meanwhile, has to
        `expect` it before the next is scheduled. `land` alone asks for a step's result. If that step failed,
        `_recover` takes back what is in `_flying`: the next step must be there by then. With nothing in
        flight and nobody to launch: `_stuck`.
        """
        landing = self._flying
        # 1. A step whose tokens are needed before the next can be launched.
        if landing and self._lands_first(landing):
            self._flying = None
            return self.land(landing)
        # 2. The next step, in which a placeholder stands for each token that is still on the device.
        if landing:
            landing.overtaken = True
            for request in landing.choosing():
                if request.state is not State.FINISHED:
                    request.expect()
        self._flying = ahead = self.launch()
        # 3. What the last one found.
        if landing:
            return self.land(landing)
        return [] if ahead else self._stuck()

    def _lands_first(self, step: Step) -> bool:
        """A step that has failed already; one whose tokens the host has to count (penalties); and whatever a
        capability says.
        """
        if step.error or any(request.sampling.is_adjusted for request in self.scheduler.running):
            return True
        return any(capability.lands_first(step) for capability in self.capabilities)

    def _recover(self, step: Step, error: Exception) -> list[RequestOutput]:
        """What was launched on top of a step that failed is worth nothing. It is taken back first."""
        if self._flying:
            self.scheduler.rollback(self._flying)
            self._flying = None
        return super()._recover(step, error)
