"""Adds tools and thoughts to a server's chats, as the flags of vLLM's `serve` ask for them. Extension B.

No module imports this one: engine/cli/serving.py finds it by its name.
"""

from engine.core.engine_thread import EngineThread
from engine.decoding.structured import StructuredOutputsParams
from engine.server.reasoning import REASONING_PARSERS
from engine.server.tool_parsers import TOOL_PARSERS
from engine.server.tools import ChatTools
from engine.structured.capability import Structured


def check_flags(
    tool_call_parser: str | None, enable_auto_tool_choice: bool, reasoning_parser: str | None
) -> None:
    """Raise ValueError for the name of a parser that does not exist, and for `enable_auto_tool_choice`
    without a `tool_call_parser`.
    """
    for name, value, parsers in (
        ("tool_call_parser", tool_call_parser, TOOL_PARSERS),
        ("reasoning_parser", reasoning_parser, REASONING_PARSERS),
    ):
        if value is not None and value not in parsers:
            raise ValueError(f"{name}={value!r}: accepted are {', '.join(parsers)}")
    if enable_auto_tool_choice and tool_call_parser is None:
        raise ValueError("enable_auto_tool_choice=True needs tool_call_parser; it is None")


def chat_extension(
    thread: EngineThread,
    tool_call_parser: str | None,
    enable_auto_tool_choice: bool,
    reasoning_parser: str | None,
) -> ChatTools:
    """The ChatExtension for a server of this thread's engine. The other arguments are the flags'."""
    engine = thread.engine
    (structured,) = (item for item in engine.capabilities if isinstance(item, Structured))

    async def compile(params: StructuredOutputsParams) -> None:
        """In the thread in which requests compile. Raises ParameterError and NoRoomError."""
        if work := structured.compiling(params):
            await thread.preparing.call(work)

    return ChatTools(engine.tokenizer, compile, tool_call_parser, enable_auto_tool_choice, reasoning_parser)
