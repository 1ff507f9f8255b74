"""The fields of a body that say what an output must fit: OpenAI's and vLLM's. Part 4.

Promises that what they ask for becomes a `StructuredOutputsParams`, or a RequestError that names the field as
the client sent it. Engines without Extension B refuse the StructuredOutputsParams.
Shapes: https://platform.openai.com/docs/guides/structured-outputs
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictStr

from engine.decoding.params import ParameterError
from engine.decoding.structured import MAX_CHOICES, StructuredOutputsParams, StructureError
from engine.server.errors import RequestError
from engine.server.fields import Fields
from engine.server.neutral import neutral

if TYPE_CHECKING:
    from engine.server.protocol import SamplingFields

ENGINE_FIELD = "structured_outputs"  # the field's name in the engine's errors
SchemaName = Annotated[StrictStr, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class JsonSchema(Fields):
    """A schema with a name. The output fits the schema, whatever `strict` says."""

    name: SchemaName
    description: StrictStr | None = None  # nothing here reads it
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: StrictBool | None = None


class ResponseFormat(Fields):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def structure(self) -> StructuredOutputsParams | None:
        """What the output must fit; None for text. Raises StructureError or RequestError."""
        if self.type == "json_schema":
            if self.json_schema is None:
                message = 'response_format.json_schema is required with type "json_schema"'
                raise RequestError(400, message, param="response_format")
            return StructuredOutputsParams(json=self.json_schema.schema_)
        if self.json_schema is not None:
            message = 'response_format.json_schema needs type "json_schema"'
            raise RequestError(400, message, param="response_format")
        return StructuredOutputsParams(json_object=True) if self.type == "json_object" else None


class StructuredOutputs(Fields):
    """vLLM's `structured_outputs`: the fields of `StructuredOutputsParams`, which checks them."""

    json_: Annotated[dict[str, Any] | StrictStr | None, Field(alias="json")] = None
    regex: StrictStr | None = None
    choice: Annotated[list[StrictStr], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None = (
        None
    )
    grammar: StrictStr | None = None
    json_object: StrictBool | None = None
    disable_fallback: StrictBool | None = None
    disable_any_whitespace: StrictBool | None = None
    disable_additional_properties: StrictBool | None = None
    whitespace_pattern: StrictStr | None = None
    structural_tag: Annotated[None, neutral(otherwise="is not supported: grammar can say the same")] = None

    def structure(self) -> StructuredOutputsParams:
        """What the output must fit. Raises StructureError."""
        sent: dict[str, Any] = {}  # without the fields that are null
        for name, spec in type(self).model_fields.items():
            value = getattr(self, name)
            if value is not None:
                sent[spec.alias or name] = value
        return StructuredOutputsParams(**sent)


def structure_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> StructuredOutputsParams | None:
    """What the output must fit; None if nothing is asked for.

    Raises RequestError if a field is wrong, or if both fields ask for something.
    """
    try:
        structure = response_format.structure() if response_format else None
    except StructureError as error:
        message = _with_name("response_format", str(error))
        raise RequestError(400, message, param="response_format") from None
    if structured_outputs is None:
        return structure
    if structure is not None:
        message = "response_format and structured_outputs both say what the output must fit: one is accepted"
        raise RequestError(400, message, param=ENGINE_FIELD)
    try:
        return structured_outputs.structure()
    except StructureError as error:
        raise RequestError(400, str(error), param=ENGINE_FIELD) from None


def structure_of_rest(structure: StructuredOutputsParams, message: str) -> StructuredOutputsParams:
    """What the rest of a message must fit, so that the whole message fits `structure`.

    `message` is the beginning of the message. Raises RequestError if the beginning is too long or has a lone
    surrogate.
    """
    try:
        return structure.continuing(message)
    except StructureError as error:
        why = str(error).removeprefix(f"{ENGINE_FIELD}.prefix")
        reason = f"messages: the content that the output continues{why}"
        raise RequestError(400, reason, param="messages") from None


def with_sent_name(error: Exception, body: "SamplingFields") -> Exception:
    """The same error, about the field that the client sent. Two kinds of errors change:

    - an error about the output's length (`max_tokens`, Part 15): some bodies have another field for it;
    - the engine's error about what the output must fit: `response_format` may have asked for it, or, if no
      field did, a call that `tool_choice` requires (Extension B).
    """
    if isinstance(error, RequestError) and error.param == "max_tokens":
        name, _ = body.output_bound()
        return RequestError(error.status, error.message, param=name, code=error.code, headers=error.headers)
    is_about_structure = isinstance(error, ParameterError) and error.field == ENGINE_FIELD
    if not is_about_structure or body.structured_outputs is not None:
        return error
    asks_for_format = body.response_format is not None and body.response_format.type != "text"
    name = "response_format" if asks_for_format else "tools"
    return ParameterError(name, _with_name(name, str(error)))


def _with_name(name: str, message: str) -> str:
    """The engine's message, with `name` in place of the engine's names for the field."""
    for engine_name in (f"{ENGINE_FIELD}.json_object", f"{ENGINE_FIELD}.json", ENGINE_FIELD):  # longest first
        message = message.replace(engine_name, name)
    return message
