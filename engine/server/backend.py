"""What the server needs of an engine, and the simplest engine that gives it: one request at a time. Part 4.

The server knows these two Protocols and nothing behind them. Part 6's engine in its own thread keeps the same
promise for many requests at once, and admission control (Part 15) wraps either.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, Self

from engine.decoding.greedy import SUPPORTS, Choose, DecodeStep, Forward, argmax, decode_steps
from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.decoding.params import ParameterError, SamplingParams, refuse_unknown_tokens, refuse_unsupported
from engine.decoding.prompts import Prompt, prompt_token_ids
from engine.models.config import ModelConfig
from engine.text.tokenizer import Tokenizer


class OutputStream(Protocol):
    """Outputs of one request as they grow, each with everything so far; the last one is finished.

    A slow reader may get only the latest. An error of the request is raised in an output's place.
    """

    tokens: int  # that all its samples may have at most, prompts and outputs

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> RequestOutput: ...

    async def aclose(self) -> None:
        """Abort the request and free all it holds, read or unread, begun or not. May be called twice."""


class Backend(Protocol):
    """An engine, as the server sees it. It lives in an `async with`, which the server's life opens."""

    supports: frozenset[str]  # fields of later parts that have their effect here

    async def __aenter__(self) -> Self:
        """Start to serve."""

    async def __aexit__(self, *_: object) -> None:
        """Abort what is unfinished, and stop."""

    def models(self) -> list[str]:
        """Names that requests may ask for."""

    def health(self) -> bool:
        """Whether requests can be served; or RequestError, which says why not (Part 15)."""

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, **options
    ) -> OutputStream:
        """Check one request and admit it, or raise: ParameterError, RequestError. Then nothing was admitted.

        Awaiting it takes no time of the event loop: a text is turned into tokens in a thread. The caller
        must close the stream. `options`: priority, adapter, cache_salt.
        """

    async def abort(self, request_id: str) -> None:
        """Stop a request; its reader gets a last output with finish reason "abort"."""


class LockedStream:
    """One request: a task that computes, begun by the first read, and the latest output for the reader.

    The task never waits for the reader, who may be slow, or not read at all.
    """

    def __init__(self, work: Callable[["LockedStream"], Coroutine[None, None, None]], tokens: int) -> None:
        self.tokens = tokens
        self.aborted = False  # whether `abort` was called
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self._unread: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue(maxsize=1)
        self._over = False

    def put(self, output: RequestOutput | Exception) -> None:
        """From the task. An output that was not read yet is replaced: the new one contains it."""
        if self._unread.full():
            self._unread.get_nowait()
        self._unread.put_nowait(output)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._over:
            raise StopAsyncIteration
        self._task = self._task or asyncio.create_task(self._work(self))
        output = await self._unread.get()
        self._over = isinstance(output, Exception) or output.finished
        if isinstance(output, Exception):
            raise output
        return output

    async def aclose(self) -> None:
        """The work is cancelled, and has unwound when this returns; a reader that waits gets the end."""
        self._over = True
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])
            self.put(StopAsyncIteration())  # for a reader that waits for an output: there will be none


# A request's parameters, its prompt's ids, which of its n samples -> what chooses this sample's tokens.
MakeChoose = Callable[[SamplingParams, Sequence[int], int], Choose]


def greedy_choice(params: SamplingParams, prompt_ids: Sequence[int], index: int) -> Choose:
    """For `make_choose`: the likeliest token, whatever the parameters ask for (Part 5 samples)."""
    return argmax


class LockedBackend:
    """Parts 2 and 3's loop, one request at a time: a second one waits until the first is done."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        config: ModelConfig,
        make_forward: Callable[[], Forward],
        make_choose: MakeChoose = greedy_choice,
        supports: frozenset[str] = SUPPORTS,
    ) -> None:
        """`make_forward` gives each request its own cache; `make_choose` its own sampler (Part 5)."""
        self.name, self.tokenizer, self.config = name, tokenizer, config
        self.make_forward, self.make_choose, self.supports = make_forward, make_choose, supports
        self._lock = asyncio.Lock()
        self._live: dict[str, LockedStream] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in [*self._live.values()]:
            await stream.aclose()

    def models(self) -> list[str]:
        return [self.name]

    def health(self) -> bool:
        return True

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, **options
    ) -> LockedStream:
        """The work begins when the stream is first read. Raises ParameterError, also for an option that this
        engine does not support.
        """
        for name, value in options.items():
            if value and name not in self.supports:
                raise ParameterError(name, f"{name}={value!r} is not supported by this engine")
        refuse_unsupported(params, self.supports)
        refuse_unknown_tokens(params, self.config.vocab_size)
        token_ids = await asyncio.to_thread(prompt_token_ids, prompt, self.tokenizer, self.config)
        text = prompt if isinstance(prompt, str) else None
        output = RequestOutput(request_id, text, token_ids, [], finished=False)
        room = self.config.max_positions - len(token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        return LockedStream(partial(self._work, output, params), params.n * (len(token_ids) + max_tokens))

    async def abort(self, request_id: str) -> None:
        if request_id in self._live:
            self._live[request_id].aborted = True

    async def _work(self, output: RequestOutput, params: SamplingParams, stream: LockedStream) -> None:
        """Compute one request once it is its turn. Its reader gets whatever goes wrong."""
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
        """Part 3's loop for one sample. Nothing is computed before its first `next`."""
        choose = self.make_choose(params, prompt_token_ids, index)
        return decode_steps(
            self.make_forward(), self.tokenizer, self.config, prompt_token_ids, params, choose, self.supports
        )

    async def _sample(
        self, output: RequestOutput, params: SamplingParams, index: int, stream: LockedStream
    ) -> None:
        """The sample `index` of `params.n`: `output` grows by it, and each state goes to `stream`.

        A step of the loop runs in another thread, and its state is put before the next step begins: a
        record of its own, because a slow reader still holds the one before, with the text that is visible
        and, at the end, its finish_reason and stop_reason. `output` is finished with the last sample's
        last token. When `stream.aborted` is set, the step under way is the last one: its reason is
        "abort", and `output` is finished.
        """
        steps = self._steps(output.prompt_token_ids, params, index)
        output.outputs.append(CompletionOutput(index, "", []))
        while (step := await asyncio.to_thread(next, steps, None)) is not None:
            done, reason = step.output, step.finish_reason or ("abort" if stream.aborted else None)
            output.outputs[index] = CompletionOutput(
                index, done.visible, list(done.token_ids), reason, done.stop_reason
            )
            output.finished = reason == "abort" or (reason is not None and index == params.n - 1)
            stream.put(replace(output, outputs=list(output.outputs)))
            if output.finished:
                return
