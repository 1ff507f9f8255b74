"""The engine: requests in, one step at a time, outputs out. Part 6.

The engine promises three things. Every request that was added ends: it finishes, is aborted, or fails with a
reason. An exception inside a step fails only the requests that `recover` names. The memory of a request is
free once the request has ended. The engine knows no HTTP and no threads.
"""

import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from engine.core.interfaces import Adapters, Capability, Preparation, Recover
from engine.core.landing import append_tokens
from engine.core.submission import Submission, make_samples, refuse_forked, refuse_options
from engine.decoding.outputs import RequestOutput
from engine.decoding.params import ParameterError, SamplingParams
from engine.decoding.prompts import Prompt
from engine.decoding.refusals import refuse_unknown_tokens, refuse_unsupported
from engine.decoding.sampling import SUPPORTS
from engine.execution.runner import Executor
from engine.models.config import ModelConfig
from engine.requests.listeners import Listener, Listeners, StepRecord
from engine.requests.request import Request, State, error_text
from engine.requests.step import Step
from engine.requests.work import SlowWork
from engine.scheduling.scheduler import Scheduler, fail_all
from engine.text.tokenizer import Tokenizer

FINISHED = State.FINISHED  # a global, since each lookup of an Enum's member takes as long as a call


class EngineOptions(Protocol):
    """The options of an engine, which know how to build it: Part 20's EngineArgs."""

    def build_engine(self) -> "LLMEngine":
        """Load the model and build the engine."""


class LLMEngine:
    """Composes a scheduler, an executor and a tokenizer.

    `step` launches a step and lands it. An engine that launches the next step before it lands the last one
    (Part 13) overrides `step`. Nothing here is locked: no two threads may call methods at the same time, but
    for those that any thread may call.
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
        seed: int | None = None,
        preparations: Sequence[Preparation] = (),
    ) -> None:
        """`supports` names the fields of SamplingParams that later parts add, and the options of a request,
        that have an effect here; others are refused. `recover` says which requests fail with a step.

        `max_model_len` is the most tokens of a request, prompt and output together; the default is
        `config.max_positions`. `adapters` is needed if `supports` contains "adapter". `capabilities` are
        called in the order given, and so are `preparations`. `seed` makes the seeds of requests that have
        none; by default they are random. Raises ValueError if `max_model_len` is below 1, or more than the
        model or the cache has room for.
        """
        self.max_model_len = config.max_positions if max_model_len is None else max_model_len
        if not 0 < self.max_model_len <= config.max_positions or not scheduler.cache.fits(self.max_model_len):
            raise ValueError(
                f"max_model_len={self.max_model_len}: the model sees {config.max_positions} tokens, and the "
                f"cache must hold one sequence of that length; it has {scheduler.cache.usage().tokens_total}"
            )
        self.tokenizer, self.config = tokenizer, replace(config, max_positions=self.max_model_len)
        self.scheduler, self.executor, self.recover = scheduler, executor, recover
        self.listeners = Listeners() if listeners is None else listeners
        scheduler.listeners = self.listeners  # scheduler and engine report to the same listeners
        self.supports, self.adapters, self.capabilities = supports, adapters, list(capabilities)
        self.preparations = tuple(preparations)
        self._submissions: dict[str, Submission] = {}  # unfinished requests, by request id
        self._seeds = None if seed is None else random.Random(seed)
        self._num_steps = 0  # steps that have landed or failed
        self._num_empty_steps = 0  # calls of `step` in a row in which no request could run
        self._process_id = os.getpid()
        # Functions to call, in any thread, when no step can be computed any more.
        self.on_lost: list[Callable[[BaseException], None]] = []
        self.on_shutdown: list[Callable[[], None]] = []  # called by `shutdown`

    @classmethod
    def from_engine_args(cls, engine_args: EngineOptions) -> "LLMEngine":
        """Build the engine that the options describe, of this class or of a subclass."""
        return engine_args.build_engine()

    @property
    def model_config(self) -> ModelConfig:
        """The model's shape. Its `max_model_len` is the engine's."""
        return self.config

    def make_requests(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        adapter: Any = None,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> list[Request]:
        """Check a request, and return its `params.n` samples, which are not queued. Any thread may call this.

        `priority` is from -MAX_PRIORITY to MAX_PRIORITY, and the lowest goes first. `adapter` is a value that
        `Adapters.key` accepts; `add` checks that the adapter exists. `trace_headers` are for listeners that
        trace requests beyond this process.

        The samples have a copy of `params`, which the caller may change afterwards.

        Raises ParameterError for a field or a prompt that is refused, and RuntimeError in a forked process,
        where a step would hang.
        """
        refuse_forked(self._process_id)
        params = params.clone() if params else SamplingParams()
        refuse_unsupported(params, self.supports)
        refuse_unknown_tokens(params, self.config.vocab_size)
        refuse_options(self.supports, priority, adapter, cache_salt)
        samples = make_samples(
            request_id,
            prompt,
            params,
            self.tokenizer,
            self.config,
            self._seeds,
            priority=priority,
            adapter=adapter,
            cache_salt=cache_salt,
            trace_headers=trace_headers,
        )
        for preparation in self.preparations:
            preparation.prepare(samples)
        return samples

    def slow_work(self, params: SamplingParams) -> list[SlowWork]:
        """Work for these parameters that may take longer than a step. A caller may do it first, in another
        thread; otherwise `make_requests` does it. Any thread may call this.
        """
        all_work = []
        for preparation in self.preparations:
            work = preparation.slow_work(params)
            if work is not None:
                all_work.append(work)
        return all_work

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, **options
    ) -> None:
        """Check and queue a request. `options` are those of `make_requests`.

        Raises ParameterError if the request is refused. A refused request is not queued.
        """
        try:
            samples = self.make_requests(request_id, prompt, params, **options)
            self.add(request_id, samples, prompt)
        except ParameterError as error:
            self.listeners.tell(Listener.on_reject, request_id, error)
            raise

    def add(self, request_id: str, samples: list[Request], prompt: Prompt) -> None:
        """Queue the samples that `make_requests` returned.

        Raises ParameterError if an unfinished request has the same id or if the adapter does not exist, and
        whatever else `Adapters.key` raises.
        """
        if request_id in self._submissions:
            raise ParameterError(
                "request_id", f"request_id={request_id!r} is in use by an unfinished request"
            )
        adapter = samples[0].adapter
        if self.adapters is not None and adapter is not None:
            key = self.adapters.key(adapter)
            for request in samples:
                request.adapter = key
        text = prompt if isinstance(prompt, str) else None
        self._submissions[request_id] = Submission(text, samples, adapter)
        for request in samples:
            self.listeners.tell(Listener.on_arrival, request)
            self.scheduler.add(request)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Stop a waiting or running request. Returns its last output, or None if no unfinished request has
        this id.
        """
        submission = self._submissions.get(request_id)
        if submission is None:
            return None
        for request in submission.samples:
            if request.state is not FINISHED:
                if request.output.finish_reason is None:
                    request.output.finish_reason = "abort"
                self._end(request)
                self.listeners.tell(Listener.on_finish, request)
        return self._outputs([request_id])[0]

    def report_lost(self, error: BaseException) -> None:
        """Call each callback of `on_lost` with `error`, the reason why no step can be computed any more. Any
        thread may call this.
        """
        for callback in list(self.on_lost):
            callback(error)

    def shutdown(self) -> None:
        """Call those in `on_shutdown`, and end the processes and threads that compute for this engine. No
        step may follow.
        """
        for callback in self.on_shutdown:
            callback()
        self.executor.shutdown()

    def has_unfinished_requests(self) -> bool:
        """Whether there is anything for `step` to do."""
        return bool(self._submissions)

    def unfinished_request_ids(self) -> list[str]:
        """The ids of the requests that wait or run, in the order in which they were added."""
        return list(self._submissions)

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns an output for each request of the step."""
        step = self.launch()
        return self.land(step) if step else self._fail_if_stuck()

    def launch(self) -> Step | None:
        """Schedule a step and submit it. Returns None if no request can run.

        If a capability or the submission raises, the step's `error` is set, and `land` recovers from it.
        """
        start = time.perf_counter()
        step = self.scheduler.schedule()
        if step is None:
            return None
        self._num_empty_steps = 0
        step.start, step.schedule_end = start, time.perf_counter()
        self.listeners.tell(Listener.on_schedule, step.batch)
        try:
            for capability in self.capabilities:
                step.batch = capability.before_submit(step)
            step.pending = self.executor.submit(step.batch)
        except Exception as error:
            step.error = error
        return step

    def land(self, step: Step) -> list[RequestOutput]:
        """Wait for a step's result, and append its tokens. Returns an output for each request of the step
        that has not finished meanwhile. A step that failed is rolled back (`_recover`).
        """
        # 1. Get the result, as the capabilities return it. If the step failed, roll it back.
        try:
            result = step.result()
            for capability in self.capabilities:
                result = capability.after_result(step, result)
        except Exception as error:
            return self._recover(step, error)
        landed_at = time.perf_counter()
        # 2. Append the tokens, with stop checks: tokens after the one that ends a request are dropped.
        live = [(s, request) for s, request in enumerate(step.requests) if request.state is not FINISHED]
        ended: list[Request] = []
        for s, request in live:
            if append_tokens(request, s, result, landed_at):
                ended.append(request)
        # 3. The scheduler learns what was appended. Only then are the ended requests finished, since `update`
        #    leaves out finished requests. Their memory is free before the next step.
        self.scheduler.update(step, result.drafts)
        for request in ended:
            self._end(request)
        return self._report(step, landed_at, [request for _, request in live], ended, result.counters)

    def _recover(self, step: Step, error: Exception) -> list[RequestOutput]:
        """Roll back a step that failed, and end the requests that `recover` names. Returns their outputs, and
        those of the step's requests.
        """
        landed_at = time.perf_counter()
        self.scheduler.rollback(step)
        failed = [request for request in self.recover(step, error) if request.state is not FINISHED]
        live = [request for request in step.requests if request.state is not FINISHED]
        for request in failed:
            request.error = error_text(error)
            request.output.finish_reason = "error"
            self._end(request)
        return self._report(step, landed_at, [*live, *failed], failed, error=error_text(error))

    def _fail_if_stuck(self) -> list[RequestOutput]:
        """Count a step in which no request could run. Returns the output of the request that fails, if any.

        The first such step in a row fails no request. From the second on, waiting longer would change
        nothing, so each fails one request: the first that runs or, if none runs, the first that waits.
        """
        queue = [*self.scheduler.running, *self.scheduler.waiting]
        self._num_empty_steps += 1
        if not queue or self._num_empty_steps < 2:
            return []
        request = queue[0]
        request.error = f"the cache has no room for the {len(request.token_ids)} tokens of this request"
        request.output.finish_reason = "error"
        self._end(request)
        self.listeners.tell(Listener.on_finish, request)
        return self._outputs([request.request_id])

    def _end(self, request: Request) -> None:
        """Take a request whose output has its finish reason out of the scheduler, which frees its memory."""
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
        """Return the outputs of a landed step, one for each user's request of the `live` samples. Tell
        listeners of the step, then of the ended requests.
        """
        request_ids = dict.fromkeys([request.request_id for request in live])  # each once, in order
        outputs = self._outputs(request_ids)
        self._num_steps += 1
        if self.listeners:
            record = StepRecord.of(
                step,
                number=self._num_steps,
                landed_at=landed_at,
                end=time.perf_counter(),
                num_running=len(self.scheduler.running),
                num_waiting=len(self.scheduler.waiting),
                error=error,
                counters=counters,
            )
            self.listeners.tell(Listener.on_step, record)
            for request in ended:
                self.listeners.tell(Listener.on_finish, request)
        return outputs

    def _outputs(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Return the outputs of these requests so far. A request of which all samples have finished is
        forgotten.
        """
        outputs, submissions = [], self._submissions
        for request_id in request_ids:
            output = submissions[request_id].output(request_id)
            if output.finished:
                del submissions[request_id]
            outputs.append(output)
        return outputs
