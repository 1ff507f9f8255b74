"""The engine: requests in, one step at a time, outputs out. Part 6.

Promises that every request added ends: finished, aborted, or failed with a reason; that an exception inside a
step fails the requests it must and no others; that memory is free once a request has ended. Knows no HTTP and
no threads.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from engine.core.mailbox import error_text
from engine.decoding.outputs import CompletionOutput, FinishReason, Logprobs, RequestOutput, Snapshot
from engine.decoding.params import ParameterError, SamplingParams, refuse_unknown_tokens, refuse_unsupported
from engine.decoding.prompts import Prompt, prompt_token_ids
from engine.decoding.sampling import NO_TOKEN, SUPPORTS, SamplingState, new_seed
from engine.decoding.stopping import GrowingOutput
from engine.execution.runner import Executor
from engine.models.config import ModelConfig
from engine.requests.batch import Batch
from engine.requests.listeners import Listeners, StepRecord
from engine.requests.request import Request, State
from engine.requests.step import Step, StepResult
from engine.scheduling.scheduler import Scheduler, fail_all
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
MAX_PRIORITY = 100
FINISHED = State.FINISHED  # looked up once: an Enum's member takes as long to look up as a call
Recover = Callable[[Step, Exception], list[Request]]  # a failed step, its error -> the requests that fail


class Capability(Protocol):
    """Hooks around each step, on the host: speculation (Part 16), grammars (Part B). Several capabilities are
    called in the engine's order, each with what the one before returned. A step whose `before_submit` or
    `after_result` raises has failed.
    """

    def before_submit(self, step: Step) -> Batch:
        """Called once a step, after it was scheduled and before it is submitted. Returns the record to be
        submitted: `step.batch`, or a copy of it with other draws. Changes neither step nor requests.
        """

    def must_land_first(self, step: Step) -> bool:
        """Called by an engine one step ahead (Part 13), before it schedules the next step: `step` is in
        flight. True: its tokens are needed for that, so it lands first. Changes nothing.
        """

    def after_result(self, step: Step, result: StepResult) -> StepResult:
        """Called once a step, when its result was read and no token of it is appended yet. Returns the result
        that counts: `result`, or one with other tokens, log probabilities, drafts, counters. Not called for a
        step that failed. May change the capability's own state, and reserve memory for drafts.
        """


class Adapters(Protocol):
    """The adapters that requests may ask for (Part 18)."""

    def key(self, adapter: Any) -> str:
        """What scheduler and cache call the adapter that a request asks for. It is called when the request is
        queued, by the thread that steps. Raises ParameterError.
        """


@dataclass
class Submission:
    """A request as one user sent it: `n` samples of one prompt."""

    prompt: str | None  # None: it came as token ids
    samples: list[Request]
    prompt_logprobs: Logprobs | None = None  # once complete; a preempted request forgets its own


class LLMEngine:
    """Composes a scheduler, an executor and a tokenizer; `step` is the whole engine: launch, then land. An
    engine that launches the next step before it lands the last one (Part 13) overrides `step`.
    """

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
        adapters: Adapters | None = None,
        capabilities: Sequence[Capability] = (),
    ) -> None:
        """`max_model_len` bounds prompt plus output; default: what the model sees. `adapters`: needed where
        `supports` has "adapter". `capabilities` are called in their order. Raises ValueError: the model or
        the cache has no room for `max_model_len` tokens.
        """
        self.max_model_len = max_model_len or config.max_positions
        if self.max_model_len > config.max_positions or not scheduler.cache.fits(self.max_model_len):
            raise ValueError(
                f"max_model_len={self.max_model_len}: the model sees {config.max_positions} tokens, and the "
                f"cache must hold one sequence of that length; it has {scheduler.cache.usage().tokens_total}"
            )
        self.tokenizer, self.config = tokenizer, replace(config, max_positions=self.max_model_len)
        self.scheduler, self.executor, self.recover = scheduler, executor, recover
        self.listeners = Listeners() if listeners is None else listeners
        scheduler.listeners = self.listeners  # it reports to the same ones
        self.supports, self.adapters, self.capabilities = supports, adapters, list(capabilities)
        self._submissions: dict[str, Submission] = {}  # by request id, until it has finished
        self._steps = self._empty_steps = 0
        self._process_id = os.getpid()

    def make_requests(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        adapter: Any = None,
        cache_salt: str | None = None,
    ) -> list[Request]:
        """The n samples of one request, checked but not queued; safe to call from any thread. `adapter` is
        what `Adapters.key` understands; whether it is there is checked when the request is queued.

        Raises ParameterError for a field or a prompt that is refused, and RuntimeError in a forked process,
        where a step would hang.
        """
        _refuse_forked(self._process_id)
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
        seed, samples = new_seed(params), list[Request]()
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
                    sampling=SamplingState(params, token_ids, output.token_ids, seed + index, stop_ids),
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
        """Queue what `make_requests` made. Raises ParameterError: its id is in use, or its adapter is not
        there (and whatever else `Adapters.key` raises).
        """
        if request_id in self._submissions:
            raise ParameterError(
                "request_id", f"request_id={request_id!r} is in use by an unfinished request"
            )
        if self.adapters is not None and samples[0].adapter is not None:
            key = self.adapters.key(samples[0].adapter)
            for request in samples:
                request.adapter = key
        self._submissions[request_id] = Submission(prompt if isinstance(prompt, str) else None, samples)
        for request in samples:
            self.listeners.tell("on_arrival", request)
            self.scheduler.add(request)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Stop a request, waiting or running. Returns its last output; None: unknown, or finished."""
        submission = self._submissions.get(request_id)
        if submission is None:
            return None
        for request in submission.samples:
            if request.state is not FINISHED:
                self._end(request, None if request.output.finish_reason else "abort")
                self.listeners.tell("on_finish", request)
        return self._output(request_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self._submissions)

    def unfinished_request_ids(self) -> list[str]:
        return list(self._submissions)

    def step(self) -> list[RequestOutput]:
        """Run one step, and give an output for each request that was in it."""
        step = self.launch()
        return self.land(step) if step else self._stuck()

    def launch(self) -> Step | None:
        """Schedule a step and submit it. None: no request can run. A step whose submission fails comes back
        with its `error`, and `land` deals with it.
        """
        start = time.perf_counter()
        step = self.scheduler.schedule()
        if step is None:
            return None
        self._empty_steps = 0
        step.start, step.schedule_end = start, time.perf_counter()
        self.listeners.tell("on_schedule", step.batch)
        try:
            for capability in self.capabilities:
                step.batch = capability.before_submit(step)
            step.pending = self.executor.submit(step.batch)
        except Exception as error:
            step.error = error
        return step

    def land(self, step: Step) -> list[RequestOutput]:
        """Wait for a step's result, append its tokens, and give an output for each request that was in it and
        has not finished meanwhile.
        """
        # 1. The result, as the capabilities return it. If the step failed, it is rolled back.
        try:
            result = step.result()
            for capability in self.capabilities:
                result = capability.after_result(step, result)
        except Exception as error:
            return self._recover(step, error)
        landed_at = time.perf_counter()
        # 2. Its tokens are appended, with stop checks: nothing after the last token counts.
        live = [(s, r) for s, r in enumerate(step.requests) if r.state is not FINISHED]
        ended = [request for s, request in live if _confirm(request, s, result, landed_at)]
        # 3. The scheduler learns what was appended. Finished requests leave, and their memory is free.
        self.scheduler.update(step, result.drafts)
        for request in ended:
            self._end(request)
        return self._report(step, landed_at, [request for _, request in live], ended, result.counters)

    def _recover(self, step: Step, error: Exception) -> list[RequestOutput]:
        """Roll back a step that failed, and end the requests that `recover` names. Outputs as of `land`."""
        landed_at = time.perf_counter()
        self.scheduler.rollback(step)
        failed = [r for r in self.recover(step, error) if r.state is not FINISHED]
        live = [r for r in step.requests if r.state is not FINISHED]
        for request in failed:
            request.error = error_text(error)
            self._end(request, "error")
        return self._report(step, landed_at, [*live, *failed], failed, error=error_text(error))

    def _stuck(self) -> list[RequestOutput]:
        """Called when no request could run. The second time in a row, nothing will ever change: the first
        request in line fails. Returns its last output.
        """
        queue = [*self.scheduler.running, *self.scheduler.waiting]
        self._empty_steps += 1
        if not queue or self._empty_steps < 2:
            return []
        request = queue[0]
        request.error = f"the cache has no room for the {len(request.token_ids)} tokens of this request"
        self._end(request, "error")
        self.listeners.tell("on_finish", request)
        return [self._output(request.request_id)]

    def _end(self, request: Request, reason: FinishReason | None = None) -> None:
        if reason:
            request.output.finish_reason = reason
        request.drop_placeholders()
        self.scheduler.finish(request)

    def _report(
        self,
        step: Step,
        landed_at: float,
        live: list[Request],
        ended: list[Request],
        counters: dict[str, float] | None = None,
        error: str | None = None,
    ) -> list[RequestOutput]:
        """The outputs of a step that has landed. Listeners hear of the step, then of requests that ended."""
        batch = step.batch
        outputs = [self._output(request_id) for request_id in dict.fromkeys([r.request_id for r in live])]
        self._steps += 1
        if self.listeners:
            self.listeners.tell(
                "on_step",
                StepRecord(
                    number=self._steps,
                    start=step.start,
                    end=time.perf_counter(),
                    schedule_seconds=step.schedule_end - step.start,
                    execute_seconds=landed_at - step.schedule_end,
                    request_ids=batch.ids,
                    tokens_computed=tuple(map(batch.num_new_tokens, range(len(batch.ids)))),
                    tokens_cached=tuple(request.num_cached_tokens for request in step.requests),
                    tokens_held=batch.context_lens,
                    num_running=len(self.scheduler.running),
                    num_waiting=len(self.scheduler.waiting),
                    error=error,
                    counters=counters or {},
                ),
            )
            for request in ended:
                self.listeners.tell("on_finish", request)
        return outputs

    def _output(self, request_id: str) -> RequestOutput:
        """A request's output so far; lists that still grow are not copied. A finished one is forgotten."""
        submission = self._submissions[request_id]
        completions: list[CompletionOutput] = []
        finished, error = True, None
        for request in submission.samples:
            output = request.output
            reason = output.finish_reason
            snapshot: Callable[[list], Sequence] = list if reason else Snapshot  # finished: nothing grows
            completion = CompletionOutput(
                len(completions), output.visible, snapshot(output.token_ids), reason, output.stop_reason
            )
            if request.logprobs:
                completion.cumulative_logprob = request.cumulative_logprob
                completion.logprobs = snapshot(request.logprobs)
                completion.text_offsets = snapshot(request.text_offsets)
            completions.append(completion)
            if not reason:
                finished = False
            error = error or request.error
        if finished:
            del self._submissions[request_id]
        first = submission.samples[0]
        scores = first.prompt_logprobs
        if scores and submission.prompt_logprobs is None and len(scores) == first.num_prompt_tokens:
            submission.prompt_logprobs = scores
        return RequestOutput(
            request_id,
            submission.prompt,
            first.sampling.prompt_ids,
            completions,
            finished,
            submission.prompt_logprobs,
            first.num_cached_tokens,
            error,
            first.stats,
        )


def _refuse_forked(process_id: int) -> None:
    """Raises RuntimeError: this process was forked from the one that made the engine, and computes with
    several threads. A fork copies one thread, and would wait for ever for the others.
    """
    if os.getpid() != process_id and torch.get_num_threads() > 1:
        raise RuntimeError(
            "this process was forked from the one that made the engine, without the threads that compute. "
            'Start processes with multiprocessing.get_context("spawn"), or compute with one thread here: '
            "torch.set_num_threads(1)"
        )


def _confirm(request: Request, s: int, result: StepResult, now: float) -> bool:
    """Append the tokens of sequence s of the step, read at `now`. Returns whether the request has ended: by
    its last token, or by an error, which ends no other request.
    """
    try:
        if result.prompt_logprobs and request.state is State.RUNNING:  # else preempted: computed again later
            request.prompt_logprobs += result.prompt_logprobs[s]
        scores = result.logprobs[s] if result.logprobs else None  # None, or empty: not asked for
        for i, token_id in enumerate(result.tokens[s]):
            if token_id == NO_TOKEN:
                raise ArithmeticError("the model's logits are not finite numbers")
            if scores:
                logprobs = scores[i]
                request.logprobs.append(logprobs)
                request.text_offsets.append(len(request.output.text))
                request.cumulative_logprob = (request.cumulative_logprob or 0.0) + logprobs[token_id].logprob
            if request.confirm(token_id, now):
                return True
    except Exception as error:
        logger.exception("request %s failed", request.id)
        request.error = error_text(error)
        request.output.finish_reason = "error"
        return True
    return False
