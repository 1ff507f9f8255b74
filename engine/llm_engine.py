"""The engine: requests in, one step at a time, outputs out. Part 6.

Promises that every request added ends: finished, aborted, or failed with a reason; that an exception inside a
step fails the requests it must and no others; that memory is free once a request has ended. Knows no HTTP and
no threads.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.batch import Batch
from engine.config import ModelConfig
from engine.decoding.outputs import CompletionOutput, FinishReason, RequestOutput
from engine.decoding.params import ParameterError, SamplingParams, refuse_unknown_tokens, refuse_unsupported
from engine.decoding.prompts import Prompt, prompt_token_ids
from engine.decoding.sampling import SUPPORTS, Row, new_seed
from engine.decoding.stopping import GrowingOutput
from engine.executor import Executor, StepResult
from engine.listeners import Listeners, StepRecord
from engine.scheduling.request import Request, State
from engine.scheduling.scheduler import Scheduler
from engine.tokenizer import Tokenizer

MAX_PRIORITY = 2**31
Recover = Callable[[Batch, Exception], list[Request]]  # who fails when a step does (Part 15 spares more)


def fail_all(batch: Batch, error: Exception) -> list[Request]:
    """Everyone who was in the step."""
    return list(batch.requests)


class LLMEngine:
    """Composes a scheduler, an executor and a tokenizer; `step` is the whole engine."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: ModelConfig,
        scheduler: Scheduler,
        executor: Executor,
        listeners: Listeners | None = None,
        recover: Recover = fail_all,
        supports: frozenset[str] = SUPPORTS,
        max_model_len: int | None = None,
    ) -> None:
        """`max_model_len` bounds prompt plus output; default: what the model sees. Raises ValueError: no
        room.
        """
        self.max_model_len = max_model_len or config.max_positions
        if self.max_model_len > config.max_positions or not scheduler.cache.fits(self.max_model_len):
            raise ValueError(
                f"max_model_len={self.max_model_len}: the model sees {config.max_positions} tokens, and the "
                f"cache must hold one sequence of that length; it has {scheduler.cache.usage().tokens_total}"
            )
        self.tokenizer, self.config = tokenizer, replace(config, max_positions=self.max_model_len)
        self.scheduler, self.executor, self.recover = scheduler, executor, recover
        self.listeners = listeners or Listeners()
        self.supports = supports
        self._samples: dict[str, list[Request]] = {}  # request id -> its n samples
        self._prompts: dict[str, str | None] = {}
        self._steps = 0

    def make_requests(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        adapter: str | None = None,
        cache_salt: str | None = None,
    ) -> list[Request]:
        """The n samples of one request, checked but not queued; safe to call from any thread.

        Raises ParameterError for a field or a prompt that is refused.
        """
        params = params or SamplingParams()
        refuse_unsupported(params, self.supports)
        refuse_unknown_tokens(params, self.config.vocab_size)
        for name, value in {"priority": priority, "adapter": adapter, "cache_salt": cache_salt}.items():
            if value and name not in self.supports:
                raise ParameterError(name, f"{name}={value!r} is not supported by this engine")
        if abs(priority) > MAX_PRIORITY:
            raise ParameterError(
                "priority", f"priority={priority}: accepted are -{MAX_PRIORITY} to {MAX_PRIORITY}"
            )
        token_ids = prompt_token_ids(prompt, self.tokenizer, self.config)
        seed, samples = new_seed(params), []
        for index in range(params.n):
            output = GrowingOutput(
                self.tokenizer, params, len(token_ids), self.max_model_len, self.config.eos_token_ids
            )
            stop_ids = (*output.eos_token_ids, *params.stop_token_ids)
            samples.append(
                Request(
                    id=f"{request_id}/{index}",
                    request_id=request_id,
                    token_ids=list(token_ids),
                    num_prompt_tokens=len(token_ids),
                    params=params,
                    output=output,
                    row=Row(params, token_ids, output.token_ids, seed + index, stop_ids),
                    priority=priority,
                    adapter=adapter,
                    cache_salt=cache_salt,
                    parent=samples[0] if samples else None,
                )
            )
        return samples

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, **options
    ) -> None:
        """Queue a request; `options` as in `make_requests`. Raises ParameterError: nothing was queued."""
        try:
            samples = self.make_requests(request_id, prompt, params, **options)
            self.add(request_id, samples, prompt)
        except ParameterError as error:
            self.listeners.tell("on_reject", request_id, error)
            raise

    def add(self, request_id: str, samples: list[Request], prompt: Prompt) -> None:
        """Queue what `make_requests` made."""
        if request_id in self._samples:
            raise ParameterError(
                "request_id", f"request_id={request_id!r} is in use by an unfinished request"
            )
        self._samples[request_id] = samples
        self._prompts[request_id] = prompt if isinstance(prompt, str) else None
        for request in samples:
            self.listeners.tell("on_arrival", request)
            self.scheduler.add(request)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Stop a request, waiting or running; its last output. None: it is not here, perhaps finished."""
        samples = self._samples.get(request_id)
        if samples is None:
            return None
        for request in samples:
            if request.state is not State.FINISHED:
                self._end(request, None if request.output.finish_reason else "abort")
        return self._output(request_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self._samples)

    def unfinished_request_ids(self) -> list[str]:
        return list(self._samples)

    def step(self) -> list[RequestOutput]:
        """One forward pass for whoever is scheduled; an output for each of their requests."""
        start = time.perf_counter()
        batch = self.scheduler.schedule()
        if batch is None:
            return []
        scheduled = time.perf_counter()
        self.listeners.tell("on_schedule", batch)
        # 1. The forward pass and the sampler. If they fail, the step is taken back.
        try:
            result = self.executor.submit(batch).result()
        except Exception as error:
            return self._recover(batch, error)
        executed = time.perf_counter()
        # 2. Confirmed tokens are appended, with stop checks: nothing after the last token counts.
        finished = [request for s, request in enumerate(batch.requests) if _append(request, s, result)]
        # 3. The scheduler learns what was confirmed; the finished leave, and their memory is free.
        self.scheduler.update(batch, result.drafts)
        for request in finished:
            self._end(request)
        outputs = self._outputs(batch.requests)
        self._record(batch, start, scheduled, executed)
        return outputs

    def _recover(self, batch: Batch, error: Exception) -> list[RequestOutput]:
        self.scheduler.rollback(batch)
        failed = self.recover(batch, error)
        for request in failed:
            request.error = f"{type(error).__name__}: {error}"
            self._end(request, "error")
        return self._outputs([*batch.requests, *failed])

    def _end(self, request: Request, reason: FinishReason | None = None) -> None:
        if reason:
            request.output.finish_reason = reason
        self.scheduler.finish(request)
        self.listeners.tell("on_finish", request)

    def _outputs(self, requests: Sequence[Request]) -> list[RequestOutput]:
        return [self._output(request_id) for request_id in dict.fromkeys(r.request_id for r in requests)]

    def _output(self, request_id: str) -> RequestOutput:
        """Where the request stands. One that has finished is forgotten."""
        samples = self._samples[request_id]
        completions = []
        for index, request in enumerate(samples):
            grown = request.output
            completions.append(
                CompletionOutput(
                    index,
                    grown.visible,
                    grown.token_ids.copy(),
                    grown.finish_reason,
                    grown.stop_reason,
                    logprobs=request.logprobs.copy() or None,
                )
            )
        first = samples[0]
        output = RequestOutput(
            request_id,
            self._prompts[request_id],
            first.row.prompt_ids,
            completions,
            finished=all(completion.finish_reason for completion in completions),
            prompt_logprobs=first.prompt_logprobs or None,
            num_cached_tokens=first.num_cached_tokens,
            stats=first.stats,
            error=next((request.error for request in samples if request.error), None),
        )
        if output.finished:
            del self._samples[request_id], self._prompts[request_id]
        return output

    def _record(self, batch: Batch, start: float, scheduled: float, executed: float) -> None:
        self._steps += 1
        self.listeners.tell(
            "on_step",
            StepRecord(
                number=self._steps,
                start=start,
                end=time.perf_counter(),
                schedule_seconds=scheduled - start,
                execute_seconds=executed - scheduled,
                request_ids=tuple(request.id for request in batch.requests),
                tokens_computed=tuple(map(batch.num_new_tokens, range(len(batch.requests)))),
                tokens_cached=tuple(request.num_cached_tokens for request in batch.requests),
                tokens_held=batch.context_lens,
                num_running=len(self.scheduler.running),
                num_waiting=len(self.scheduler.waiting),
            ),
        )


def _append(request: Request, s: int, result: StepResult) -> bool:
    """Give sequence s of the step its confirmed tokens; True when one of them finishes it."""
    if result.prompt_logprobs:
        request.prompt_logprobs += result.prompt_logprobs[s]
    for i, token_id in enumerate(result.tokens[s]):
        if result.logprobs:
            request.logprobs.append(result.logprobs[s][i])
        if request.append(token_id):
            return True
    return False
