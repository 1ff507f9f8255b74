"""A client that streams answers from any server with OpenAI's chat API. Part 14.

Each piece of text is yielded as soon as the server has sent it, and an error has the server's own words.
Closing a stream closes its connection, from which a server can tell that nobody reads the answer any more.
Source: https://platform.openai.com/docs/api-reference/chat
"""

import re
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from engine.client import sse
from engine.client.untrusted import (
    ByteLimit,
    check_port,
    is_this_machine,
    parse_json,
    printable,
    token_count,
)

CONNECT_SECONDS = 10
SILENCE_SECONDS = 300  # the longest time in which a server may send nothing, as it does with a long queue
MAX_MESSAGE_CHARACTERS = 1000  # of an error message from a server
SURROGATE = re.compile(r"[\ud800-\udfff]")  # half a character: JSON can contain it, UTF-8 cannot


class ChatFailed(Exception):
    """The server refused a request, failed, or did not answer. The message is safe to print in a terminal."""

    def __init__(self, message: str) -> None:
        """`message` may be a server's: it is cut, and made safe to print."""
        super().__init__(printable(message[:MAX_MESSAGE_CHARACTERS]))


@dataclass
class ChatAnswer:
    """An answer as far as it has come. Times are in seconds since the question was sent, and None before any
    text has come. Token counts are the server's, and None if the server has not sent them.
    """

    text: str = ""
    finish_reason: str | None = None  # None until the server sends it
    num_tokens: int | None = None  # tokens of the answer
    first_text_seconds: float | None = None  # when the first piece of text came
    last_text_seconds: float | None = None  # when the last piece of text came
    num_prompt_tokens: int | None = None  # tokens of the whole conversation before the answer
    num_pieces: int = 0  # pieces of text that have come; each has a token at least

    def add_text(self, text: str, seconds: float) -> None:
        """Append a piece of text that came `seconds` after the question."""
        self.text += text
        self.num_pieces += 1
        self.last_text_seconds = seconds
        if self.first_text_seconds is None:
            self.first_text_seconds = seconds

    @property
    def tokens_per_second(self) -> float | None:
        """The number of tokens after the first, divided by the seconds from the first piece of text to the
        last. None without a token count, and as long as fewer than two pieces have come.
        """
        if self.num_tokens is None or self.first_text_seconds is None or self.last_text_seconds is None:
            return None
        if self.last_text_seconds <= self.first_text_seconds:
            return None
        return (self.num_tokens - 1) / (self.last_text_seconds - self.first_text_seconds)


class ChatClient:
    """A client for one server, API key and model."""

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        """`url` is the server's address, with or without /v1. `model` is by default the first model that the
        server lists. Raises ChatFailed if `url` is not an address, or if the key is not ASCII.
        """
        if not url.startswith(("http://", "https://")):
            raise ChatFailed(f"{url!r}: an address begins with http:// or https://")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS)
        try:
            check_port(url)
            base_url = httpx.URL(url)
            if base_url.path in ("", "/"):
                base_url = base_url.copy_with(path="/v1")
            use_proxies = not is_this_machine(base_url.host)  # the proxies that the environment names
            self._http = httpx.Client(
                base_url=base_url, headers=headers, timeout=timeout, trust_env=use_proxies
            )
        except UnicodeEncodeError:
            raise ChatFailed("the API key has characters that a header cannot have") from None
        except (httpx.InvalidURL, ValueError) as error:
            raise ChatFailed(f"{url!r} is no address: {error}") from None
        self._model = model

    def close(self) -> None:
        """Close the connections to the server. No request may follow."""
        self._http.close()

    @property
    def model(self) -> str:
        """The model's name. If no model was given, the first use sends a request to the server and waits.
        Raises ChatFailed if the server does not answer, or has no model.
        """
        if self._model is None:
            with self._as_chat_failed(), self._http.stream("GET", "models") as response:
                _raise_for_error(response)
                names = [entry["id"] for entry in _body(response)["data"]]
                if not all(isinstance(name, str) for name in names):
                    raise ValueError("a model's id is no text")
            if not names:
                raise ChatFailed(f"{self._http.base_url} has no model")
            self._model = names[0]
        return self._model

    def stream(self, messages: Sequence[Mapping], **options) -> Generator[tuple[str, ChatAnswer], None, None]:
        """Send a conversation, and yield each new piece of the answer's text together with the answer so far.
        The last piece is empty, and its answer is complete.

        `messages` are mappings with "role" and "content". `options` are further fields of the request. Every
        piece comes with the same ChatAnswer object, which grows. Raises ChatFailed if the request fails or
        the answer breaks off.
        """
        body = {
            "model": self.model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
        answer = ChatAnswer()
        start = time.perf_counter()
        with (
            self._as_chat_failed(),
            self._http.stream("POST", "chat/completions", json=body) as response,
        ):
            _raise_for_error(response)
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise ValueError(f"its answer is {response.headers.get('content-type')}, no event stream")
            for chunk in _chunks(_pieces(response)):
                for text in _read_chunk(chunk, answer):
                    answer.add_text(text, time.perf_counter() - start)
                    yield text, answer
        if answer.finish_reason is None:
            raise ChatFailed("the answer broke off: the server closed the connection")
        yield "", answer

    @contextmanager
    def _as_chat_failed(self) -> Iterator[None]:
        """Turn every error of the connection or of the answer's form into a ChatFailed."""
        try:
            yield
        except httpx.TimeoutException:
            raise ChatFailed(f"{self._http.base_url} did not answer in time") from None
        except httpx.HTTPError as error:
            raise ChatFailed(f"{self._http.base_url}: {error}") from None
        except (ValueError, LookupError, TypeError, AttributeError) as error:  # not JSON, or other fields
            raise ChatFailed(f"{self._http.base_url} does not speak OpenAI's chat API: {error}") from None


def _chunks(pieces: Iterator[bytes]) -> Iterator[Any]:
    """The JSON of each event, up to the event [DONE], with which OpenAI's API ends a stream."""
    for data in sse.events(sse.lines(pieces)):
        if data == "[DONE]":
            return
        yield parse_json(data)


def _read_chunk(chunk: Any, answer: ChatAnswer) -> Iterator[str]:
    """Yield the pieces of text in an event, none of them empty. The event's token counts and finish reason go
    to `answer`. Raises ChatFailed for an error event.
    """
    if "error" in chunk:
        raise ChatFailed(_message(chunk))
    usage = chunk.get("usage")
    if usage:
        answer.num_tokens = token_count(usage.get("completion_tokens"))
        answer.num_prompt_tokens = token_count(usage.get("prompt_tokens"))
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        text = SURROGATE.sub("\N{REPLACEMENT CHARACTER}", delta.get("content") or "")
        if choice.get("finish_reason"):
            answer.finish_reason = choice["finish_reason"]
        if text:
            yield text


def _body(response: httpx.Response) -> Any:
    """The value of the whole body as JSON. Raises ValueError if the body is too long, or not JSON."""
    return parse_json(b"".join(_pieces(response)))


def _pieces(response: httpx.Response) -> Iterator[bytes]:
    """Yield the body as it comes. Raises ValueError if it is longer than MAX_ANSWER_BYTES."""
    limit = ByteLimit()
    for piece in response.iter_bytes():
        yield limit.take(piece)


def _raise_for_error(response: httpx.Response) -> None:
    """Raise ChatFailed if the status is not a success, with the body's message, or else with the status."""
    if response.is_success:
        return
    try:
        message = _message(_body(response))
    except ValueError:
        message = f"{response.url}: {response.status_code} {response.reason_phrase}"
    raise ChatFailed(message)


def _message(body: Any) -> str:
    """The message in an error's JSON: OpenAI's `error.message`, or an `error` that is a text, as other
    servers have it; otherwise the whole JSON.
    """
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else str(body)
