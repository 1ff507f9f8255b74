"""Gives tools and thoughts their effect in chats: what is asked of the model, and what its answer says.
Extension B.

Promises OpenAI's shapes. A call that a request requires is structured output, so its arguments fit the tool's
schema unless the answer is cut off; a call that the model is free to make is found by a parser, and nothing
makes its arguments fit, `strict` or not. Shapes: https://platform.openai.com/docs/guides/function-calling
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
from engine.server.chat_tools import NamedTool, Tool, ToolCall, depth_of
from engine.server.errors import RequestError
from engine.server.limits import MAX_CALLS, MAX_JSON_DEPTH
from engine.server.reasoning import REASONING_PARSERS, ends_in_thoughts
from engine.server.response_items import ResponseItems
from engine.server.tool_parsers import FORMATS, PLAIN_JSON, TOOL_PARSERS, ArgumentsParser, CallParser
from engine.server.tool_schemas import schema_of_call, schema_of_calls
from engine.text.tokenizer import Tokenizer

NO_PARSER = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'  # vLLM's
NUM_LAST_TOKENS = 64  # of a prompt, in which it may begin thoughts
Choice = NamedTool | str  # a named tool, or one of the words


class ChatTools:
    """A ChatExtension."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        compile: Callable[[StructuredOutputsParams], Awaitable[object]],
        tool_call_parser: str | None = None,
        enable_auto_tool_choice: bool = False,
        reasoning_parser: str | None = None,
    ) -> None:
        """`compile` raises ParameterError for a schema that cannot be obeyed, and NoRoomError. The parsers
        are names of TOOL_PARSERS and REASONING_PARSERS.
        """
        self.tokenizer, self.compile = tokenizer, compile
        self.tool_call_parser, self.reasoning_parser = tool_call_parser, reasoning_parser
        self.is_auto = enable_auto_tool_choice
        # The field of a call with the arguments, as the model learned to write it.
        self.arguments_field = FORMATS[tool_call_parser or "json"].fields[0]

    def params(self, body: ChatRequest, params: SamplingParams) -> SamplingParams:
        """As in ChatExtension: a required call becomes a schema that the output must fit."""
        if body.include_reasoning is False and self.reasoning_parser is None:
            message = "include_reasoning=false needs --reasoning-parser: no thoughts are known without it"
            raise RequestError(400, message, param="include_reasoning")
        tools, choice = body.tools or [], choice_of(body)
        _check_tools(tools)
        if choice == "auto" and not self.is_auto:
            raise RequestError(400, NO_PARSER, param="tool_choice")
        if choice in ("none", "auto"):
            return params
        if not tools:
            raise RequestError(400, f"tool_choice={_name(choice)} needs tools", param="tool_choice")
        if params.structured_outputs is not None:
            message = f"tool_choice={_name(choice)} has no use with response_format or structured_outputs: "
            raise RequestError(400, message + "the output must fit one or the other", param="tool_choice")
        if isinstance(choice, NamedTool):
            schema = schema_of_call(_tool_of(choice, tools))
        else:
            most = 1 if body.parallel_tool_calls is False else MAX_CALLS
            schema = schema_of_calls(tools, self.arguments_field, most)
        try:
            return replace(params, structured_outputs=_must_fit(schema))
        except StructureError as error:
            why = str(error).removeprefix("structured_outputs.json").strip()
            message = f"tools: the schema of a required call {why}"
            raise RequestError(400, message, param="tools") from None

    def messages(self, messages: Sequence[Message], template: ChatTemplate) -> list[dict[str, Any]]:
        """As in ChatExtension: calls have their arguments as an object, as Hugging Face's templates expect.

        A template that does not read `tools` was made for a model without tools, and refuses their turns. It
        gets calls as the content that `json` would find them in, and a tool's answer as a user's turn.
        """
        knows_tools = "tools" in template.variables
        turns = []
        for i, message in enumerate(messages):
            turn: dict[str, Any] = message.plain()
            calls = [
                _call(call, f"messages[{i}].tool_calls[{j}]")
                for j, call in enumerate(message.tool_calls or ())
            ]
            thoughts = message.reasoning or message.reasoning_content
            if thoughts:
                turn |= {"reasoning": thoughts, "reasoning_content": thoughts}
            if knows_tools:
                turn |= {"tool_calls": calls} if calls else {}
                turn |= {"tool_call_id": message.tool_call_id} if message.tool_call_id else {}
            elif calls:
                turn["content"] += json.dumps([call["function"] for call in calls], ensure_ascii=False)
            elif message.role == "tool":
                turn["role"] = "user"
            turns.append(turn)
        return turns

    async def check(self, body: ChatRequest) -> None:
        """As in ChatExtension."""
        choice = choice_of(body)
        for i, tool in enumerate(body.tools or ()):
            if choice == "required" or (
                isinstance(choice, NamedTool) and tool.function.name == _name(choice)
            ):
                await self._check_schema(tool, i)
                await asyncio.sleep(0)  # let other requests run between two schemas

    async def _check_schema(self, tool: Tool, i: int) -> None:
        try:
            await self.compile(_must_fit(schema_of_call(tool)))
        except ParameterError as error:
            why = str(error).removeprefix("structured_outputs.json").lstrip(": ")
            raise RequestError(400, f"tools[{i}].function.parameters: {why}", param="tools") from None

    def tools(self, body: ChatRequest) -> list[dict[str, Any]] | None:
        """As in ChatExtension."""
        return [tool.model_dump(exclude_unset=True) for tool in body.tools or ()] or None

    def choice_fields(
        self,
        body: ChatRequest,
        output: RequestOutput,
        sample: CompletionOutput,
        previous: CompletionOutput | None,
    ) -> dict[str, Any]:
        """As in ChatExtension."""
        if not body.tools and self.reasoning_parser is None:
            return {}
        prompt = output.prompt_token_ids
        if body.stream:
            if sample.index not in body._readers:
                body._readers[sample.index] = self.reader(body, prompt)
            reader = body._readers[sample.index]
            return {"delta": reader.delta(sample, previous), "finish_reason": reader.finish_reason(sample)}
        reader = self.reader(body, prompt)
        said = reader.message(sample, body.echoed())
        if reader.has_broken_call:  # no program could read the call: all of the text is content
            reader = self.reader(body, prompt, finds_calls=False)
            said = reader.message(sample, body.echoed())
        message = {"role": body.role(), **said, "refusal": None}
        return {"message": message, "finish_reason": reader.finish_reason(sample)}

    def items(self, body: ChatRequest, prompt_token_ids: Sequence[int]) -> ResponseItems | None:
        """As in ChatExtension."""
        if not body.tools and self.reasoning_parser is None:
            return None
        if body.logprobs:
            message = "logprobs has no use with tools or --reasoning-parser: items have no place for them"
            raise RequestError(400, message, param="logprobs")
        return ResponseItems(
            lambda finds_calls: self.reader(body, prompt_token_ids, finds_calls), self.tokenizer
        )

    def reader(
        self, body: ChatRequest, prompt_token_ids: Sequence[int], finds_calls: bool = True
    ) -> AnswerReader:
        """What reads one sample of an answer to `body`."""
        choice, tools = choice_of(body) if finds_calls else "none", body.tools or []
        names = {tool.function.name for tool in tools}
        parser: Parser = PlainText()
        if isinstance(choice, NamedTool):
            parser = ArgumentsParser(choice.function.name)
        elif choice == "required":
            parser = CallParser(names, replace(PLAIN_JSON, fields=(self.arguments_field,)))
        elif choice == "auto" and self.tool_call_parser is not None:
            parser = TOOL_PARSERS[self.tool_call_parser](names)
        must_fit = choice not in ("none", "auto") or body.sampling_params().structured_outputs is not None
        if self.reasoning_parser is not None and not must_fit:  # what must fit has no thoughts before it
            last = self.tokenizer.decode(list(prompt_token_ids[-NUM_LAST_TOKENS:]))
            parser = REASONING_PARSERS[self.reasoning_parser](parser, ends_in_thoughts(last))
        most = 1 if body.parallel_tool_calls is False else None
        is_shown = body.include_reasoning is not False
        return AnswerReader(parser, isinstance(choice, NamedTool), most, self.reasoning_parser, is_shown)


def _must_fit(schema: dict[str, Any]) -> StructuredOutputsParams:
    """A space at most between the parts of the JSON, and no arguments but those that a schema names, unless
    it says what others may be: a model that was not trained on calls may write either for ever.
    """
    return StructuredOutputsParams(json=schema, whitespace_pattern=" ?", disable_additional_properties=True)


def choice_of(body: ChatRequest) -> Choice:
    """The body's `tool_choice`; if it is left out, "auto" with tools and "none" without. "auto" without tools
    is "none", too.
    """
    if body.tool_choice is None or body.tool_choice == "auto":
        return "auto" if body.tools else "none"
    return body.tool_choice


def _name(choice: Choice) -> str:
    return choice.function.name if isinstance(choice, NamedTool) else choice


def _check_tools(tools: Sequence[Tool]) -> None:
    """Raise RequestError for two tools of one name, and for parameters that are no object's schema."""
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


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    """A call of an earlier turn as templates read it. Raises RequestError if its arguments are no object."""
    where += ".function.arguments"
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        raise RequestError(400, f"{where} is not JSON", param="messages") from None
    if not isinstance(arguments, Mapping) or depth_of(arguments) > MAX_JSON_DEPTH:
        message = f"{where}: an object is accepted, at most {MAX_JSON_DEPTH} levels deep"
        raise RequestError(400, message, param="messages")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
