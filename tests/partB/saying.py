"""A server whose model says given texts, with tools and thoughts, and what is asked of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from engine.decoding.chat_template import ChatTemplate
from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.decoding.params import ParameterError
from engine.server.app import create_app
from engine.server.chat import Chat, chat_routes
from engine.server.chat_page import chat_page
from engine.server.responses_route import responses_route
from engine.server.tokenization import tokenization_routes
from engine.server.tools import ChatTools
from tests.part04.serving import ScriptedBackend, serve
from tests.part06.fakes import CONFIG, TOKENIZER

LONG = replace(CONFIG, max_positions=4000)

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}},
            "required": ["a", "b"],
            "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        },
    },
}
ASK = [{"role": "user", "content": "Hi"}]
# A template that tells of tools, as Qwen3's does.
TEMPLATE = ChatTemplate(
    "{% if tools %}[{{ tools | tojson }}]{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}={{ call.function.arguments | tojson }};"
    "{% endfor %}{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


async def refuses_unique_items(params) -> None:
    """A compiler that knows one keyword too few."""
    if "uniqueItems" in params.schema_text():
        raise ParameterError("structured_outputs", "structured_outputs.json: uniqueItems is unknown at #/x")


def chat_of(**flags) -> Chat:
    chat = Chat(TOKENIZER)
    chat.extension = ChatTools(TOKENIZER, refuses_unique_items, **flags)
    return chat


class Says(ScriptedBackend):
    """Says a text character by character, or in one piece, and ends by itself."""

    def __init__(self, text: str, reason: str = "stop", size: int = 1, n: int = 1) -> None:
        super().__init__([text[i : i + size] for i in range(0, len(text), size)] or [""])
        self.reason, self.n = reason, n

    async def _outputs(self, prompt, request_id):
        text = ""
        for i, piece in enumerate(self.pieces):
            text += piece
            reason = self.reason if i == len(self.pieces) - 1 else None
            ids = TOKENIZER.encode(text)
            samples = [CompletionOutput(k, text, ids, reason) for k in range(self.n)]
            yield RequestOutput(request_id, None, list(prompt), samples, finished=reason is not None)


@contextmanager
def saying(backend: ScriptedBackend, template: ChatTemplate = TEMPLATE, **flags) -> Iterator[str]:
    """The URL of a server in front of the backend; `flags` are those of ChatTools."""
    chat = chat_of(**flags)
    extensions = [
        chat_routes(TOKENIZER, LONG, template, chat),
        responses_route(TOKENIZER, LONG, template, chat),
        tokenization_routes(TOKENIZER, LONG, template, chat.extension),
        chat_page,
    ]
    with serve(create_app(backend, extensions)) as url:
        yield url
    assert backend.open == 0, "a stream was left open"
