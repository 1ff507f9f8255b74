"""The flags of vLLM's `serve` for tools and thoughts: their checks, and what they add to chats. Extension B.

`ruvon serve` (engine/cli/serving.py) finds this module by `optional_module("tool_flags")`, since no file of
Parts 1 to 20 imports an extension's.
"""

from engine.core.engine_thread import EngineThread
from engine.decoding.structured import StructuredOutputsParams
from engine.server.reasoning import REASONING_PARSERS
from engine.server.tool_parsers import CALL_FORMATS
from engine.server.tools import ChatTools
from engine.structured.capability import StructuredOutput


def check_flags(
    tool_call_parser: str | None, enable_auto_tool_choice: bool, reasoning_parser: str | None
) -> None:
    """Raise ValueError for the name of a parser that does not exist, and for `enable_auto_tool_choice`
    without a `tool_call_parser`.
    """
    if tool_call_parser is not None and tool_call_parser not in CALL_FORMATS:
        raise ValueError(f"tool_call_parser={tool_call_parser!r}: accepted are {', '.join(CALL_FORMATS)}")
    if reasoning_parser is not None and reasoning_parser not in REASONING_PARSERS:
        raise ValueError(
            f"reasoning_parser={reasoning_parser!r}: accepted are {', '.join(REASONING_PARSERS)}"
        )
    if enable_auto_tool_choice and tool_call_parser is None:
        raise ValueError("enable_auto_tool_choice=True needs tool_call_parser; it is None")


def chat_extension(
    thread: EngineThread,
    tool_call_parser: str | None,
    enable_auto_tool_choice: bool,
    reasoning_parser: str | None,
) -> ChatTools:
    """The ChatExtension for a server of this thread's engine. The other arguments are the flags'. Raises
    ValueError for an engine without structured output: a call that is required could not be kept to its
    schema.
    """
    engine = thread.engine
    structured = next((item for item in engine.capabilities if isinstance(item, StructuredOutput)), None)
    if structured is None:
        raise ValueError(
            "tools need an engine with structured output; its capabilities have no StructuredOutput"
        )

    async def compile_structure(params: StructuredOutputsParams) -> None:
        """Compile in the thread in which requests compile. Raises ParameterError and NoRoomError."""
        work = structured.work_to_compile(params)
        if work is not None:
            await thread.preparing.call(work)

    return ChatTools(
        engine.tokenizer,
        compile_structure,
        tool_call_parser=tool_call_parser,
        enable_auto_tool_choice=enable_auto_tool_choice,
        reasoning_parser=reasoning_parser,
    )
