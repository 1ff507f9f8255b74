"""One step ahead: the next step is launched before the host has read the last step's tokens. Part 13.

With one step at a time, the GPU is idle while the host reads tokens, checks stops and schedules. Here the
tokens of a step stay on the device, the next step reads them there, and the host works while the device
computes. The engine promises the same tokens as with one step at a time. A request that ends by a stop token
or a stop string wastes one token: when the host reads the last token, the request is in the next step
already. A request that ends by its length wastes none.
"""

from engine.core.llm_engine import LLMEngine
from engine.decoding.outputs import RequestOutput
from engine.requests.request import State
from engine.requests.step import Step


class AheadEngine(LLMEngine):
    """An engine that launches a step before it lands the last one."""

    _in_flight: Step | None = None  # the step that is launched and has not landed

    def has_unfinished_requests(self) -> bool:
        """As in `LLMEngine`. A step in flight has to land, even if all of its requests have finished."""
        return self._in_flight is not None or super().has_unfinished_requests()

    def step(self) -> list[RequestOutput]:
        """Launch a step, land the step in flight, and return the outputs of the landed step.

        - If the step in flight must land first (`_must_land_first`), it lands, and no step is launched.
        - Otherwise, before the next step is scheduled, the step in flight is marked as `overlapped`, and each
          request that gets a token from it (`sampled_requests`) and has not finished gets a placeholder.
        - Only `land` waits for a step's result. If the landing step failed, `land` calls `_recover`, which
          rolls back the step in `_in_flight`. So `_in_flight` must be the next step before `land` is called.
        - If no step was in flight, the launched step lands in the next call, and the outputs are empty.
        - If no step is in flight and no step can be launched, the result is that of `_fail_if_stuck`.
        """
        landing = self._in_flight
        # 1. If the next step cannot be scheduled without this step's tokens, only land.
        if landing and self._must_land_first(landing):
            self._in_flight = None
            return self.land(landing)
        # 2. Launch the next step. A placeholder stands for each token that is still on the device.
        if landing:
            landing.overlapped = True
            for request in landing.sampled_requests():
                if request.state is not State.FINISHED:
                    request.add_placeholder()
        self._in_flight = launched = self.launch()
        # 3. Land the last step.
        if landing:
            return self.land(landing)
        return [] if launched else self._fail_if_stuck()

    def _must_land_first(self, step: Step) -> bool:
        """Whether `step`, which is in flight, must land before the next step is scheduled: its launch failed,
        a running request's logits are adjusted by its output so far (penalties, for example), which the host
        must know for that, or a capability needs the tokens of the step.
        """
        needs_output = any(request.sampling.is_adjusted for request in self.scheduler.running)
        if step.error or needs_output:
            return True
        return any(capability.must_land_first(step) for capability in self.capabilities)

    def _recover(self, step: Step, error: Exception) -> list[RequestOutput]:
        """Roll back the step in flight, which read the failed step's tokens, and then the failed step."""
        if self._in_flight:
            self.scheduler.rollback(self._in_flight)
            self._in_flight = None
        return super()._recover(step, error)
