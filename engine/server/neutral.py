"""Types of fields that have no effect on this server, and accept only values that ask for nothing. Part 4.

Clients send many fields by habit. A value that asks for nothing (`tools: null`, `store: false`) is accepted;
any other value is refused, and the error says what is accepted.
"""

from typing import Any

from pydantic import GetPydanticSchema, ValidationInfo
from pydantic_core import PydanticCustomError, core_schema

EXTENSION_B = "comes with Extension B (structured output, tools, beam search)"


def neutral(*values: Any, otherwise: str) -> Any:
    """For Annotated[None, neutral(...)]: a field that accepts null and `values`, and is None then.

    Any other value raises PydanticCustomError. The message is the field's name and `otherwise`.
    """
    accepted = [None, *values]

    def check(value: Any, info: ValidationInfo) -> None:
        # Types are compared, too: in Python 0 equals false, but in JSON they are different values.
        if not any(type(value) is type(known) and value == known for known in accepted):
            message = f"{info.field_name} {otherwise}"
            raise PydanticCustomError("not_supported", message)

    return GetPydanticSchema(
        get_pydantic_core_schema=lambda *_: core_schema.with_info_plain_validator_function(check),
        get_pydantic_json_schema=lambda *_: {"enum": accepted},
    )
