"""What the server needs of an engine, and the simplest engine that gives it: one request at a time. Part 4.

The server knows this Protocol and nothing behind it. Part 6's engine in its own thread keeps the same promise
for many requests at once, and admission control (Part 15) wraps either.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Protocol

from engine.config import ModelConfig
from engine.decoding.greedy import SUPPORTS, Choose, Forward, Step, argmax, decode_steps
from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.decoding.params import ParameterError, SamplingParams
from engine.decoding.prompts import Prompt, prompt_token_ids
from engine.tokenizer import Tokenizer


class Backend(Protocol):
    """An engine, as the server sees it."""

    supports: frozenset[str]  # fields of later parts that have their effect here

    def models(self) -> list[str]:
        """Names that requests may ask for."""

    def health(self) -> bool:
        """Whether requests can be served."""

    def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, **options
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they grow, each with everything so far; the last one is finished.

        Raises ParameterError at once, before anything is queued. Closing the iterator aborts the request.
        `options`: priority, adapter, cache_salt.
        """

    async def abort(self, request_id: str) -> None:
        """Stop a request."""


class LockedBackend:
    """Parts 2 and 3's loop behind a lock: a second request waits until the first is done."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        config: ModelConfig,
        make_forward: Callable[[], Forward],
        make_choose: Callable[[SamplingParams, list[int], int], Choose] = lambda params, prompt_ids, index: (
            argmax
        ),
        supports: frozenset[str] = SUPPORTS,
    ) -> None:
        """`make_forward` gives each request its own cache; `make_choose` its own sampler (Part 5)."""
        self.name, self.tokenizer, self.config = name, tokenizer, config
        self.make_forward, self.make_choose, self.supports = make_forward, make_choose, supports
        self._lock = asyncio.Lock()
        self._aborted: set[str] = set()
        self._live: set[str] = set()

    def models(self) -> list[str]:
        return [self.name]

    def health(self) -> bool:
        return True

    def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, **options
    ) -> AsyncIterator[RequestOutput]:
        for name, value in options.items():
            if value and name not in self.supports:
                raise ParameterError(name, f"{name}={value!r} is not supported by this engine")
        token_ids = prompt_token_ids(prompt, self.tokenizer, self.config)
        loops = [self._steps(token_ids, params, index) for index in range(params.n)]
        text = prompt if isinstance(prompt, str) else None
        return self._run(RequestOutput(request_id, text, token_ids, [], finished=False), loops)

    async def abort(self, request_id: str) -> None:
        if request_id in self._live:
            self._aborted.add(request_id)

    def _steps(self, token_ids: list[int], params: SamplingParams, index: int) -> Iterator[Step]:
        choose = self.make_choose(params, token_ids, index)
        return decode_steps(
            self.make_forward(), self.tokenizer, self.config, token_ids, params, choose, self.supports
        )

    async def _run(self, output: RequestOutput, loops: list[Iterator[Step]]) -> AsyncIterator[RequestOutput]:
        self._live.add(output.request_id)
        try:
            async with self._lock:
                for index, steps in enumerate(loops):
                    output.outputs.append(CompletionOutput(index, "", []))
                    # The model runs in a thread, so that the event loop can answer others meanwhile.
                    while (step := await asyncio.to_thread(next, steps, None)) is not None:
                        reason = step.finish_reason
                        if reason is None and output.request_id in self._aborted:
                            reason = "abort"
                        output.outputs[index] = CompletionOutput(
                            index,
                            step.output.visible,
                            list(step.output.token_ids),
                            reason,
                            step.output.stop_reason,
                        )
                        output.finished = reason == "abort" or (
                            reason is not None and index == len(loops) - 1
                        )
                        # A record of its own each time: a slow reader still holds the one before.
                        yield replace(output, outputs=list(output.outputs))
                        if reason == "abort":
                            return
        finally:
            self._live.discard(output.request_id)
            self._aborted.discard(output.request_id)
