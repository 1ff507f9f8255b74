"""One step ahead: the next step is launched before the last one's tokens have been read. Part 13.

A GPU that waits while the host reads tokens, checks stops and schedules is idle for as long. Here the tokens
of a step stay where they were chosen, the next step finds them there, and the host works while the device
does. Promises the tokens of one step at a time. A request that ends by a stop token is in one more step
before the host reads that token: one wasted token. One that ends by its length costs none.
"""

from engine.core.llm_engine import LLMEngine
from engine.decoding.outputs import RequestOutput
from engine.requests.request import State
from engine.requests.step import Step


class AheadEngine(LLMEngine):
    """An engine that launches a step before it lands the last one."""

    _in_flight: Step | None = None  # launched, and not landed

    def has_unfinished_requests(self) -> bool:
        return self._in_flight is not None or super().has_unfinished_requests()

    def step(self) -> list[RequestOutput]:
        """Launch a step, and land the one before it, if any: an output for each request that was in that one.

        If the step in flight must land first (`_must_land_first`), it lands, and none is launched. Else it is
        marked as `overlapped`, and each request that gets a token from it (`sampled_requests`) and has not
        finished meanwhile gets a placeholder, before the next step is scheduled. `land` alone asks for a
        step's result. If that step failed, `_recover` rolls back the one in `_in_flight`: so the next step
        must be there by then. With no step in flight and none to launch: `_stuck`.
        """
        landing = self._in_flight
        # 1. A step whose tokens are needed before the next can be launched.
        if landing and self._must_land_first(landing):
            self._in_flight = None
            return self.land(landing)
        # 2. The next step, in which a placeholder stands for each token that is still on the device.
        if landing:
            landing.overlapped = True
            for request in landing.sampled_requests():
                if request.state is not State.FINISHED:
                    request.add_placeholder()
        self._in_flight = launched = self.launch()
        # 3. The result of the last one.
        if landing:
            return self.land(landing)
        return [] if launched else self._stuck()

    def _must_land_first(self, step: Step) -> bool:
        """Whether the step failed at its launch, a running request's penalties count tokens on the host, or a
        capability needs the step's tokens.
        """
        if step.error or any(request.sampling.is_adjusted for request in self.scheduler.running):
            return True
        return any(capability.must_land_first(step) for capability in self.capabilities)

    def _recover(self, step: Step, error: Exception) -> list[RequestOutput]:
        """Roll back the step that was launched on top of the failed one first: it read that one's tokens."""
        if self._in_flight:
            self.scheduler.rollback(self._in_flight)
            self._in_flight = None
        return super()._recover(step, error)
