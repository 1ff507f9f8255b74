"""The interface between server and engine, and the simplest backend: one request at a time. Part 4.

The server uses an engine only through the Protocols `Backend` and `OutputStream`. Part 6's `EngineThread` is
a backend that serves many requests at once. Admission control (Part 15) is a backend that wraps another one.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol, Self

from engine.decoding.bad_words import bad_words_of
from engine.decoding.greedy import SUPPORTS, Choose, DecodeStep, Forward, argmax, decode_steps
from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.decoding.params import ParameterError, SamplingParams
from engine.decoding.prompts import Prompt, prompt_token_ids
from engine.decoding.refusals import refuse_unknown_tokens, refuse_unsupported
from engine.models.config import ModelConfig
from engine.text.tokenizer import Tokenizer


class OutputStream(Protocol):
    """The outputs of one request, as an asynchronous iterator.

    Each output has all text and tokens so far, and the last output is finished. A slow reader may miss
    outputs and get only the latest. If the request fails, the iterator raises the error.
    """

    tokens: int  # the most tokens that all samples together may have, prompts and outputs

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> RequestOutput: ...

    async def aclose(self) -> None:
        """Abort the request and free all that it holds, also if nothing was read. May be called twice."""


class Backend(Protocol):
    """An engine, as the server sees it. The server keeps the backend in an `async with` while it runs."""

    supports: frozenset[str]  # parameters of later parts that this backend supports

    async def __aenter__(self) -> Self:
        """Start to serve."""

    async def __aexit__(self, *_: object) -> None:
        """Abort all unfinished requests, and stop."""

    def models(self) -> list[str]:
        """The names that a request may have as its `model`."""

    def health(self) -> bool:
        """Whether requests can be served. May raise RequestError with the reason instead (Part 15)."""

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, **options
    ) -> OutputStream:
        """Check one request and admit it. The caller must close the stream.

        `options` are priority, adapter and cache_salt. The call does not block the event loop: a text is
        turned into tokens in another thread.

        Raises ParameterError, RequestError or NoRoomError if the request is refused. Nothing is admitted
        then.
        """

    async def abort(self, request_id: str) -> None:
        """Stop a request; the reader gets a last output with finish reason "abort"."""


class LockedStream:
    """The stream of one request: a task that computes the request, and the latest output, if it is unread.

    The first read starts the task, `LockedBackend.compute`. The task never waits for the reader, because a
    reader may be slow or stop. A read raises the exception with which the task has failed.
    """

    def __init__(
        self, backend: "LockedBackend", output: RequestOutput, params: SamplingParams, tokens: int
    ) -> None:
        """`output` is the request's output before the first token. `tokens` is as in OutputStream."""
        self.output, self.params, self.tokens = output, params, tokens
        self.aborted = False  # whether `abort` was called
        self._backend = backend
        self._task: asyncio.Task[None] | None = None
        self._unread: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue(maxsize=1)
        self._is_over = False  # whether nothing more is to be read

    def put(self, output: RequestOutput | Exception) -> None:
        """Give the reader an output; called by the task. The output replaces one that was not read yet."""
        if self._unread.full():
            self._unread.get_nowait()
        self._unread.put_nowait(output)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        if self._task is None:
            self._task = asyncio.create_task(self._backend.compute(self))
        output = await self._unread.get()
        if isinstance(output, Exception):
            self._is_over = True
            raise output
        self._is_over = output.finished
        return output

    async def aclose(self) -> None:
        """Cancel the task and wait until it has unwound. May be called twice."""
        self._is_over = True
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])
            self.put(StopAsyncIteration())  # wakes a reader that waits for an output


# (parameters, token ids of the prompt, index of the sample) -> the function that chooses the sample's tokens
MakeChoose = Callable[[SamplingParams, Sequence[int], int], Choose]


def greedy_choice(params: SamplingParams, prompt_ids: Sequence[int], index: int) -> Choose:
    """A `make_choose` that always takes the likeliest token; it ignores the parameters (Part 5 samples)."""
    return argmax


class LockedBackend:
    """The loop of Parts 2 and 3 as a backend: one request at a time; the others wait for a lock."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        config: ModelConfig,
        make_forward: Callable[[], Forward],
        make_choose: MakeChoose = greedy_choice,
        supports: frozenset[str] = SUPPORTS,
    ) -> None:
        """`make_forward` is called once for each sample, and gives the sample its own cache. `make_choose`
        gives the sample its own sampler (Part 5). `supports` names the supported parameters of later parts.
        """
        self.name, self.tokenizer, self.config = name, tokenizer, config
        self.make_forward, self.make_choose, self.supports = make_forward, make_choose, supports
        self._lock = asyncio.Lock()
        self._live: dict[str, LockedStream] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in list(self._live.values()):
            await stream.aclose()

    def models(self) -> list[str]:
        return [self.name]

    def health(self) -> bool:
        return True

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, **options
    ) -> LockedStream:
        """Check a request; the first read of the stream starts the work.

        Raises ParameterError if the prompt, a parameter or an option is wrong or not supported.
        """
        for name, value in options.items():
            if value and name not in self.supports:
                raise ParameterError(name, f"{name}={value!r} is not supported by this engine")
        params = params.clone()
        refuse_unsupported(params, self.supports)
        refuse_unknown_tokens(params, self.config.vocab_size)
        bad_words_of(params, self.tokenizer, self.config.vocab_size)  # refused here, not in the stream
        token_ids = await asyncio.to_thread(
            prompt_token_ids,
            prompt,
            self.tokenizer,
            self.config,
            truncate=params.truncate_prompt_tokens,
        )
        text = prompt if isinstance(prompt, str) else None
        output = RequestOutput(request_id, text, token_ids, [], finished=False)
        max_length = self.config.max_positions  # of prompt and output together
        if params.max_tokens is not None:
            max_length = min(max_length, len(token_ids) + params.max_tokens)
        return LockedStream(self, output, params, tokens=params.n * max_length)

    async def abort(self, request_id: str) -> None:
        if request_id in self._live:
            self._live[request_id].aborted = True

    async def compute(self, stream: LockedStream) -> None:
        """Wait for the lock, then compute the request of `stream`. The reader gets any error."""
        output, params = stream.output, stream.params
        self._live[output.request_id] = stream
        try:
            async with self._lock:
                for index in range(params.n):
                    await self._sample(output, params, index, stream)
                    if output.finished:
                        break
        except Exception as error:
            stream.put(error)
        finally:
            del self._live[output.request_id]

    def _steps(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, index: int
    ) -> Iterator[DecodeStep]:
        """The steps of Part 3's loop for one sample. The first `next` starts the computation."""
        choose = self.make_choose(params, prompt_token_ids, index)
        return decode_steps(
            self.make_forward(), self.tokenizer, self.config, prompt_token_ids, params, choose, self.supports
        )

    async def _sample(
        self, output: RequestOutput, params: SamplingParams, index: int, stream: LockedStream
    ) -> None:
        """Compute the sample `index`, one of `params.n`; add it to `output` and put each state into `stream`.

        - Each step of `_steps` runs in another thread. The state after a step is put before the next step
          begins.
        - Each state that is put is a record of its own, because a slow reader still holds the one before. The
          sample in the record has the visible text, the token ids so far, and, at the sample's end, its
          finish_reason and stop_reason, all from `step.output`.
        - `output` is finished with the last token of the last sample.
        - If `stream.aborted` is set, the step under way is the last one. Unless the step has a finish reason
          of its own, the sample's finish_reason is "abort". After "abort", `output` is finished.
        """
        steps = self._steps(output.prompt_token_ids, params, index)
        output.outputs.append(CompletionOutput(index, "", []))
        while (step := await asyncio.to_thread(next, steps, None)) is not None:
            growing = step.output
            reason = step.finish_reason or ("abort" if stream.aborted else None)
            sample = CompletionOutput(
                index, growing.visible, list(growing.token_ids), reason, growing.stop_reason
            )
            output.outputs[index] = sample
            output.finished = reason == "abort" or (reason is not None and index == params.n - 1)
            stream.put(replace(output, outputs=list(output.outputs)))
            if output.finished:
                return
