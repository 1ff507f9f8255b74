"""The constraint that an output must fit: a schema, a regular expression, choices or a grammar. Part 2.

Promises that each record has exactly one constraint, of the right type and of bounded size. This module does
not know which texts a constraint allows: Extension B compiles constraints, and gives them an effect. Names
and meanings are those of vLLM's `StructuredOutputsParams`, but for `prefix`, which is ours.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
FLAGS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
JSON_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
# Limits, because a constraint is compiled, and what was compiled is kept for the next request.
MAX_SCHEMA_CHARACTERS = 1 << 16  # of a JSON schema, written as JSON
MAX_GRAMMAR_CHARACTERS = 1 << 16
MAX_REGEX_CHARACTERS = 1 << 13
MAX_CHOICES = 1024
MAX_CHOICE_CHARACTERS = 1 << 16  # of all choices together
MAX_PREFIX_CHARACTERS = 1 << 16
SURROGATE = re.compile("[\ud800-\udfff]")  # half a character of UTF-16, which has no UTF-8


class StructureError(ValueError):
    """A constraint is of the wrong type, too large, or not supported. `field` is its name."""

    def __init__(self, field: str, message: str) -> None:
        """`message` stands directly behind the field's name: "=5: true is accepted", " is too long"."""
        super().__init__(f"structured_outputs.{field}{message}")
        self.field = field


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What the text of an output must fit. Exactly one of `json`, `regex`, `choice`, `grammar` and
    `json_object` is given.

    Raises StructureError, a ValueError that names the field.
    """

    json: str | Mapping[str, Any] | None = None  # a JSON schema, or its text: the output is JSON that fits it
    regex: str | None = None  # the whole output matches this regular expression
    choice: Sequence[str] | None = None  # the output is one of these texts; kept as a list
    grammar: str | None = None  # the output can be derived from this grammar, written in Lark's language
    json_object: bool | None = None  # True: the output is any JSON object
    disable_fallback: bool = False  # no other backend is tried here in any case
    # Options of `json` and `json_object`:
    disable_any_whitespace: bool = False  # no spaces and newlines between the parts of the JSON
    disable_additional_properties: bool = False  # no properties but those that the schema names
    whitespace_pattern: str | None = None  # a regular expression for what may stand between the parts
    structural_tag: str | None = None  # vLLM's, which is refused here
    # The beginning of the text that must fit, if the prompt ends with it: the output continues it, and both
    # together fit. None: the output is the whole text.
    prefix: str | None = None

    def __post_init__(self) -> None:
        self._check_constraint_count()
        self._check_types()
        self._check_json_options()

    def _check_constraint_count(self) -> None:
        """Raises StructureError unless exactly one constraint is given, and it is one that is supported."""
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            listed = " and ".join(given) or "none"
            raise StructureError(
                given[0] if given else "json",
                f": exactly one of {', '.join(CONSTRAINTS[:-1])} is accepted; given are: {listed}",
            )
        if self.structural_tag is not None:
            raise StructureError("structural_tag", " is not supported: grammar can say the same")

    def _check_types(self) -> None:
        """Check the type and the size of each field, and copy `choice`. Raises StructureError."""
        if self.json_object is not None and self.json_object is not True:
            raise StructureError("json_object", f"={self.json_object!r}: true is accepted")
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise StructureError(name, f"={getattr(self, name)!r}: true or false is accepted")
        self._check_text("regex", MAX_REGEX_CHARACTERS)
        self._check_text("grammar", MAX_GRAMMAR_CHARACTERS)
        self._check_text("whitespace_pattern", MAX_REGEX_CHARACTERS)
        self._check_text("prefix", MAX_PREFIX_CHARACTERS)
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))  # the dataclass is frozen
        if self.json is not None:
            self.schema_text()  # raises StructureError

    def _check_json_options(self) -> None:
        """Raises StructureError for an option of JSON without JSON, or for two that exclude each other."""
        is_json = self.json is not None or self.json_object is not None
        for name in JSON_OPTIONS:
            if getattr(self, name) and not is_json:
                raise StructureError(name, f"={getattr(self, name)!r} needs json or json_object")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise StructureError("whitespace_pattern", " has no use with disable_any_whitespace=True")

    def schema_text(self) -> str:
        """The JSON schema as JSON: that of `json`, or that of any object. The order of its properties stays.

        Raises StructureError if it is no JSON schema, or too long.
        """
        schema = {"type": "object"} if self.json is None else self.json
        if not isinstance(schema, str | Mapping):
            raise StructureError("json", f"={schema!r}: a JSON schema or its text is accepted")
        if isinstance(schema, str):
            _check_schema_length(schema)  # before it is parsed
        try:
            if isinstance(schema, str):
                schema = json.loads(schema)
            text = json.dumps(schema, allow_nan=False, separators=(",", ":"))
        except RecursionError:
            raise StructureError("json", " is nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise StructureError("json", f" is no JSON schema: {error}") from None
        if not isinstance(schema, Mapping | bool):  # JSON Schema allows true and false, too
            raise StructureError("json", f" is {text[:100]}: a JSON schema is an object")
        _check_schema_length(text)
        _check_characters("json", json.dumps(schema, ensure_ascii=False))
        return text

    def continuing(self, prefix: str) -> "StructuredOutputsParams":
        """The same constraint, for an output that continues `prefix`; "" for an output that begins anew.
        Raises StructureError, field `prefix`, if it is too long or has a lone surrogate.
        """
        return dataclasses.replace(self, prefix=prefix or None)

    def __repr__(self) -> str:
        """The class and the fields that are given."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        given = [f"{name}={value!r}" for name, value in values.items() if value not in (None, False)]
        return f"StructuredOutputsParams({', '.join(given)})"

    def _check_text(self, name: str, limit: int) -> None:
        """Raises StructureError if the field is given, and is no text of 1 to `limit` characters."""
        value = getattr(self, name)
        if value is None:
            return
        if not isinstance(value, str) or not value:
            raise StructureError(name, f"={value!r}: a text of at least one character is accepted")
        if len(value) > limit:
            raise StructureError(name, f" has {len(value)} characters; at most {limit} are accepted")
        _check_characters(name, value)


def _check_schema_length(text: str) -> None:
    """Raises StructureError if the text of a JSON schema is too long."""
    if len(text) > MAX_SCHEMA_CHARACTERS:
        message = f" has {len(text)} characters; at most {MAX_SCHEMA_CHARACTERS} are accepted"
        raise StructureError("json", message)


def _check_characters(name: str, text: str) -> None:
    """Raises StructureError for a lone surrogate: half a character, which no output can have."""
    surrogate = SURROGATE.search(text)
    if surrogate:
        raise StructureError(name, f" has a lone surrogate U+{ord(surrogate[0]):04X}: not a character")


def _choices(choice: Any) -> list[str]:
    """The choices as a new list. Raises StructureError if they are no texts, too many or too long."""
    is_list = isinstance(choice, list | tuple)
    if not is_list or not choice or not all(isinstance(text, str) and text for text in choice):
        raise StructureError("choice", f"={choice!r}: a list of texts is accepted, none of them empty")
    if len(choice) > MAX_CHOICES:
        raise StructureError("choice", f" has {len(choice)} texts; at most {MAX_CHOICES} are accepted")
    total = sum(map(len, choice))
    if total > MAX_CHOICE_CHARACTERS:
        raise StructureError(
            "choice", f" has {total} characters in all; at most {MAX_CHOICE_CHARACTERS} are accepted"
        )
    _check_characters("choice", "".join(choice))
    return list(choice)
