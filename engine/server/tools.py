"""Gives tools and thoughts their effect in chats: in prompt, parameters and answer. Extension B.

Promises OpenAI's shapes. A call that a request requires is structured output, so its arguments fit the tool's
schema unless the answer is cut off. A call that the model is free to make is found by a parser; its arguments
need not fit the schema, even with `strict`. Shapes: https://platform.openai.com/docs/guides/function-calling
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.decoding.chat_template import ChatTemplate
from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.decoding.params import ParameterError, SamplingParams
from engine.decoding.structured import StructuredOutputsParams, StructureError
from engine.server.answer_pieces import Parser, PlainText
from engine.server.answer_reader import AnswerReader
from engine.server.chat_request import ChatRequest, Message
from engine.server.chat_tools import ChoiceWord, NamedTool, Tool, ToolCall, depth_of
from engine.server.errors import RequestError
from engine.server.limits import MAX_CALLS, MAX_JSON_DEPTH
from engine.server.reasoning import REASONING_PARSERS, ends_in_thoughts
from engine.server.response_items import ResponseItems
from engine.server.tool_parsers import CALL_FORMATS, PLAIN_JSON, ArgumentsParser, CallParser
from engine.server.tool_schemas import schema_of_call, schema_of_calls
from engine.text.tokenizer import Tokenizer

NO_PARSER = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'  # vLLM's
NUM_LAST_TOKENS = 64  # at the end of a prompt, which are searched for the beginning of thoughts
EffectiveChoice = NamedTool | ChoiceWord


class ChatTools:
    """The ChatExtension of a server, with the parsers that its flags name."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        compile_structure: Callable[[StructuredOutputsParams], Awaitable[object]],
        tool_call_parser: str | None = None,
        enable_auto_tool_choice: bool = False,
        reasoning_parser: str | None = None,
    ) -> None:
        """`compile_structure` raises ParameterError for a schema that cannot be obeyed, and NoRoomError if
        too many schemas wait. The parsers are names of CALL_FORMATS and REASONING_PARSERS; None means
        that calls or thoughts are not looked for.
        """
        self.tokenizer, self.compile_structure = tokenizer, compile_structure
        self.tool_call_parser, self.reasoning_parser = tool_call_parser, reasoning_parser
        self.is_auto_enabled = enable_auto_tool_choice
        call_format = PLAIN_JSON if tool_call_parser is None else CALL_FORMATS[tool_call_parser]
        self.arguments_field = call_format.fields[0]  # as the model has learned to write it

    def params(self, body: ChatRequest, params: SamplingParams) -> SamplingParams:
        """As in ChatExtension: a required call becomes a schema that the output must fit."""
        if body.include_reasoning is False and self.reasoning_parser is None:
            message = "include_reasoning=false needs --reasoning-parser: no thoughts are known without it"
            raise RequestError(400, message, param="include_reasoning")
        _check_tools(body.tools or [])
        choice = choice_of(body)
        if choice == "auto" and not self.is_auto_enabled:
            raise RequestError(400, NO_PARSER, param="tool_choice")
        if choice in ("none", "auto"):
            return params
        return replace(params, structured_outputs=self._constraint_of_call(body, choice, params))

    def _constraint_of_call(
        self, body: ChatRequest, choice: EffectiveChoice, params: SamplingParams
    ) -> StructuredOutputsParams:
        """What the output must fit if `choice` requires a call. Raises RequestError if there is no such tool,
        if the output must fit something else as well, or for a schema that is refused.
        """
        tools = body.tools or []
        if not tools:
            message = f"tool_choice={_choice_name(choice)} needs tools"
            raise RequestError(400, message, param="tool_choice")
        if params.structured_outputs is not None:
            message = (
                f"tool_choice={_choice_name(choice)} has no use with response_format or "
                "structured_outputs: the output must fit one or the other"
            )
            raise RequestError(400, message, param="tool_choice")
        if isinstance(choice, NamedTool):
            schema = schema_of_call(_tool_of(choice, tools))
        else:
            max_calls = 1 if body.parallel_tool_calls is False else MAX_CALLS
            schema = schema_of_calls(tools, self.arguments_field, max_calls)
        try:
            return _call_constraint(schema)
        except StructureError as error:
            reason = str(error).removeprefix("structured_outputs.json").strip()
            message = f"tools: the schema of a required call {reason}"
            raise RequestError(400, message, param="tools") from None

    def messages(self, messages: Sequence[Message], template: ChatTemplate) -> list[dict[str, Any]]:
        """As in ChatExtension: calls have their arguments as an object, as Hugging Face's templates expect.

        A template that does not read `tools` was made for a model without tools, and refuses messages of
        tools. For such a template, calls become content, in the format of the parser `json`, and the result
        of a tool becomes a message of the user.
        """
        knows_tools = "tools" in template.variables
        return [self._template_message(message, i, knows_tools) for i, message in enumerate(messages)]

    def _template_message(self, message: Message, i: int, knows_tools: bool) -> dict[str, Any]:
        """Message `i` of the conversation as the template reads it. `knows_tools`: whether it reads `tools`.

        Raises RequestError as `_template_call` does.
        """
        template_message: dict[str, Any] = message.plain()
        calls = []
        for j, call in enumerate(message.tool_calls or ()):
            calls.append(_template_call(call, f"messages[{i}].tool_calls[{j}]"))
        thoughts = message.reasoning or message.reasoning_content
        if thoughts:  # under both names, because templates differ in the name
            template_message["reasoning"] = thoughts
            template_message["reasoning_content"] = thoughts
        if knows_tools:
            if calls:
                template_message["tool_calls"] = calls
            if message.tool_call_id:
                template_message["tool_call_id"] = message.tool_call_id
        elif calls:
            functions = [call["function"] for call in calls]
            template_message["content"] += json.dumps(functions, ensure_ascii=False)
        elif message.role == "tool":
            template_message["role"] = "user"
        return template_message

    async def check(self, body: ChatRequest) -> None:
        """As in ChatExtension: checks each tool that `tool_choice` may require."""
        choice = choice_of(body)
        for i, tool in enumerate(body.tools or ()):
            is_named = isinstance(choice, NamedTool) and tool.function.name == choice.function.name
            if choice == "required" or is_named:
                await self._check_schema(tool, i)
                await asyncio.sleep(0)  # let other requests run between two schemas

    async def _check_schema(self, tool: Tool, i: int) -> None:
        """Raise RequestError if no output can fit the schema of a call of `tool`, which is `tools[i]`."""
        try:
            await self.compile_structure(_call_constraint(schema_of_call(tool)))
        except ParameterError as error:
            why = str(error).removeprefix("structured_outputs.json").lstrip(": ")
            raise RequestError(400, f"tools[{i}].function.parameters: {why}", param="tools") from None

    def tools(self, body: ChatRequest) -> list[dict[str, Any]] | None:
        """As in ChatExtension: the tools as the client sent them; None without tools."""
        if not body.tools:
            return None
        return [tool.model_dump(exclude_unset=True) for tool in body.tools]

    def choice_fields(
        self,
        body: ChatRequest,
        output: RequestOutput,
        sample: CompletionOutput,
        previous: CompletionOutput | None,
    ) -> dict[str, Any]:
        """The message or delta of a choice, with calls and thoughts, and its finish_reason; {} if neither are
        looked for. The arguments are those of `Chat.choice`.
        """
        if not body.tools and self.reasoning_parser is None:
            return {}
        prompt_ids = output.prompt_token_ids
        if body.stream:
            if sample.index not in body.readers:  # one reader for all deltas of a sample
                body.readers[sample.index] = self.reader(body, prompt_ids)
            reader = body.readers[sample.index]
            return {"delta": reader.delta(sample, previous), "finish_reason": reader.finish_reason(sample)}

        reader = self.reader(body, prompt_ids)
        fields = reader.message(sample, body.echoed())
        if reader.has_broken_call:  # a client could not read the call, so all text is content
            reader = self.reader(body, prompt_ids, finds_calls=False)
            fields = reader.message(sample, body.echoed())
        message = {"role": body.role(), **fields, "refusal": None}
        return {"message": message, "finish_reason": reader.finish_reason(sample)}

    def items(self, body: ChatRequest, prompt_token_ids: Sequence[int]) -> ResponseItems | None:
        """As in ChatExtension: None if neither calls nor thoughts are looked for. Raises RequestError for
        `logprobs`, and RequestError or ParameterError as `reader` does.
        """
        if not body.tools and self.reasoning_parser is None:
            return None
        if body.logprobs:
            message = "logprobs has no use with tools or --reasoning-parser: items have no place for them"
            raise RequestError(400, message, param="logprobs")
        return ResponseItems(
            reader=self.reader(body, prompt_token_ids),
            content_reader=self.reader(body, prompt_token_ids, finds_calls=False),
            tokenizer=self.tokenizer,
        )

    def reader(
        self, body: ChatRequest, prompt_token_ids: Sequence[int], finds_calls: bool = True
    ) -> AnswerReader:
        """A reader of one sample of an answer to `body`. `finds_calls`: whether calls are looked for; with
        False, their text is content.

        Raises RequestError or ParameterError as `body.sampling_params` does.
        """
        choice = choice_of(body) if finds_calls else "none"
        parser = self._call_parser(choice, body.tools or [])
        # Structured output begins at once, without thoughts.
        if self.reasoning_parser is not None and not _is_structured(body):
            end_of_prompt = self.tokenizer.decode(list(prompt_token_ids[-NUM_LAST_TOKENS:]))
            parser = REASONING_PARSERS[self.reasoning_parser](parser, ends_in_thoughts(end_of_prompt))
        return AnswerReader(
            parser,
            is_tool_named=isinstance(choice, NamedTool),
            max_calls=1 if body.parallel_tool_calls is False else None,
            has_reasoning=self.reasoning_parser is not None,
            is_reasoning_shown=body.include_reasoning is not False,
        )

    def _call_parser(self, choice: EffectiveChoice, tools: Sequence[Tool]) -> Parser:
        """The parser that finds the calls of `tools` which `choice` allows."""
        names = {tool.function.name for tool in tools}
        if isinstance(choice, NamedTool):
            return ArgumentsParser(choice.function.name)
        if choice == "required":
            return CallParser(names, replace(PLAIN_JSON, fields=(self.arguments_field,)))
        if choice == "auto" and self.tool_call_parser is not None:
            return CallParser(names, CALL_FORMATS[self.tool_call_parser])
        return PlainText()


def _call_constraint(schema: dict[str, Any]) -> StructuredOutputsParams:
    """The constraint that the output fits the schema of a call.

    It allows at most one space between the parts of the JSON, and no arguments beside those that the schema
    describes: a model that was not trained on calls might never stop to write spaces or further arguments.
    """
    return StructuredOutputsParams(json=schema, whitespace_pattern=" ?", disable_additional_properties=True)


def choice_of(body: ChatRequest) -> EffectiveChoice:
    """The body's `tool_choice`, which by default is "auto". "auto" without tools is "none"."""
    if body.tool_choice is None or body.tool_choice == "auto":
        return "auto" if body.tools else "none"
    return body.tool_choice


def _is_structured(body: ChatRequest) -> bool:
    """Whether the output must fit something: a required call's schema, or what the body asks for.

    Raises RequestError or ParameterError as `body.sampling_params` does.
    """
    requires_call = choice_of(body) not in ("none", "auto")
    return requires_call or body.sampling_params().structured_outputs is not None


def _choice_name(choice: EffectiveChoice) -> str:
    """The choice as messages name it: the tool's name, or the word."""
    return choice.function.name if isinstance(choice, NamedTool) else choice


def _check_tools(tools: Sequence[Tool]) -> None:
    """Raise RequestError for two tools of one name, and for parameters that are not an object's schema."""
    names = set()
    for i, tool in enumerate(tools):
        function = tool.function
        if function.name in names:
            message = f"tools[{i}].function.name={function.name!r} is the name of an earlier tool"
            raise RequestError(400, message, param="tools")
        names.add(function.name)
        kind = (function.parameters or {}).get("type", "object")
        if kind != "object":
            message = f"tools[{i}].function.parameters.type={kind!r}: 'object' is accepted"
            raise RequestError(400, message, param="tools")


def _tool_of(choice: NamedTool, tools: Sequence[Tool]) -> Tool:
    """The named tool. Raises RequestError if it is not among `tools`."""
    for tool in tools:
        if tool.function.name == choice.function.name:
            return tool
    names = ", ".join(tool.function.name for tool in tools)
    message = f"tool_choice names {choice.function.name!r}, which is none of tools: {names}"
    raise RequestError(400, message, param="tool_choice")


def _template_call(call: ToolCall, path: str) -> dict[str, Any]:
    """A call of an earlier answer as templates read it, with the arguments as an object. `path` is the call's
    place in the body, for errors. Raises RequestError if the arguments are not a JSON object, or are
    nested too deeply.
    """
    path += ".function.arguments"
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        raise RequestError(400, f"{path} is not JSON", param="messages") from None
    if not isinstance(arguments, Mapping) or depth_of(arguments) > MAX_JSON_DEPTH:
        message = f"{path}: an object is accepted, at most {MAX_JSON_DEPTH} levels deep"
        raise RequestError(400, message, param="messages")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
