"""Outputs as OpenAI's JSON: one whole object, or a stream of chunks. Part 4.

Promises that new text is sent as soon as the backend gives it, and that other answers have their turn while a
long one is written. `Completions` makes the choices, in the shape of a completion or of a chat (Part 14).
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from fastapi.responses import Response

from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.server.backend import OutputStream
from engine.server.limits import TURN_SECONDS
from engine.server.middleware import yield_to_others
from engine.server.protocol import Body, Completions
from engine.server.structured_fields import with_sent_name

# The number of a stream, and the stream's next output, or the error with which the stream failed.
NumberedOutput = tuple[int, RequestOutput | Exception]


async def whole_response(
    envelope: dict, outputs: list[RequestOutput], n: int, body: Body, api: Completions[Body]
) -> Response:
    """One JSON object with the choices of all prompts, `n` of each prompt.

    `envelope` has the fields that all answers and chunks of this request share, such as its id. The JSON is
    written choice by choice, because a choice with a prompt's log probabilities takes long to write: between
    two choices, other requests' outputs are sent.
    """
    choices = []
    for i, output in enumerate(outputs):
        for sample in output.outputs:
            choice = {"index": i * n + sample.index}
            choice |= api.choice(body, output, sample, previous=None)
            choice |= api.vllm_fields(body, output, sample, previous=None)
            choices.append(_json(choice))
            await yield_to_others()
    first_fields = envelope | api.answer_fields(body, outputs) | _prompt_ids(body, outputs[0], api)
    content = _answer_json(first_fields, choices, api.usage(body, outputs))
    return Response(content, media_type="application/json")


def _answer_json(first_fields: dict, choices: list[bytes], usage: dict) -> bytes:
    """An answer as JSON: `first_fields`, then the choices, each of which is JSON already, and the usage."""
    opening = _json(first_fields).removesuffix(b"}")  # the other two fields follow
    return b'%b,"choices":[%b],"usage":%b}' % (opening, b",".join(choices), _json(usage))


async def stream_chunks(
    envelope: dict,
    streams: list[OutputStream],
    empty_outputs: list[RequestOutput],
    n: int,
    body: Body,
    api: Completions[Body],
) -> AsyncGenerator[dict, None]:
    """OpenAI's chunks, in the order in which outputs arrive. Each chunk has what is new in one choice.

    `envelope` has the fields that all chunks share. `empty_outputs` has an output without tokens for each
    stream, for what is sent before the first token. `n` is the number of samples of each stream. The last
    chunk has the usage, if the body asks for it. Raises the error of the first stream that fails.
    """
    sent: dict[int, CompletionOutput] = {}  # index of a choice -> its sample as it was last sent
    latest = list(empty_outputs)
    stream_options = body.stream_options
    has_usage = bool(stream_options and stream_options.include_usage)
    has_continuous_usage = bool(stream_options and stream_options.continuous_usage_stats)

    def usage_field() -> dict:
        """The field `usage` of the next chunk: the usage so far, or null. {} if usage is not asked for."""
        if has_continuous_usage:
            return {"usage": api.usage(body, latest)}
        return {"usage": None} if has_usage else {}

    clock = asyncio.get_running_loop().time
    async with _arrivals(streams) as arrivals:
        only_in_first_chunk = _prompt_ids(body, empty_outputs[0], api)  # of a chat, which has an opening
        for choice in api.opening(body):
            yield envelope | {"choices": [choice]} | usage_field() | only_in_first_chunk
            only_in_first_chunk = {}
        while not all(output.finished for output in latest):
            i, output = await arrivals.get()
            turn_start = clock()
            if isinstance(output, Exception):
                raise with_sent_name(output, body)
            latest[i] = output
            for sample in output.outputs:
                index = i * n + sample.index
                previous = sent.get(index)
                if not _has_news(sample, previous):
                    continue
                sent[index] = sample
                choice = {"index": index} | api.choice(body, output, sample, previous)
                choice |= api.vllm_fields(body, output, sample, previous)
                yield envelope | {"choices": [choice]} | usage_field()
                if clock() - turn_start > TURN_SECONDS:  # log probabilities of a prompt make a choice long
                    await yield_to_others()
                    turn_start = clock()
        if has_usage:
            yield envelope | {"choices": [], "usage": api.usage(body, latest)}


def _prompt_ids(body: Body, output: RequestOutput, api: Completions[Body]) -> dict:
    """vLLM's `prompt_token_ids` beside the choices of a chat, if the body asks for it; otherwise {}."""
    if not body.return_token_ids or api.prompt_ids_in_choice:
        return {}
    return {"prompt_token_ids": list(output.prompt_token_ids)}


@asynccontextmanager
async def _arrivals(streams: list[OutputStream]) -> AsyncIterator[asyncio.Queue[NumberedOutput]]:
    """A queue into which the outputs and errors of all streams come, in the order in which they arrive, until
    the `async with` ends.
    """
    arrivals: asyncio.Queue[NumberedOutput] = asyncio.Queue(maxsize=len(streams))

    async def forward(i: int, stream: OutputStream) -> None:
        try:
            async for output in stream:
                await arrivals.put((i, output))
        except Exception as error:
            await arrivals.put((i, error))

    tasks = [asyncio.create_task(forward(i, stream)) for i, stream in enumerate(streams)]
    try:
        yield arrivals
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _has_news(sample: CompletionOutput, previous: CompletionOutput | None) -> bool:
    """Whether `sample` has more text than `previous`, or has finished since then. `previous` is the same
    sample as it was last sent to the client; None if nothing was sent.
    """
    if previous is None:
        return sample.text != "" or sample.finish_reason is not None
    if previous.finish_reason is not None:
        return False
    return len(sample.text) > len(previous.text) or sample.finish_reason is not None


def _json(data: dict) -> bytes:
    """`data` as JSON without spaces, in UTF-8. Raises ValueError for NaN and infinity."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
