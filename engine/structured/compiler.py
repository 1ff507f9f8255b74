"""Compiles what a user asks for, by the backend that can, and keeps it for the next who asks. Extension B.

Promises a structure, or a ParameterError that names the constraint's field, and of a JSON schema the keyword
and its place. Any thread may compile, and several do at the same time: who serves many clients lets one
compile after the other (engine/core/one_at_a_time.py).
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from engine.decoding.params import ParameterError
from engine.decoding.structured import StructuredOutputsParams
from engine.structured import places
from engine.structured.automaton import TokenAutomaton
from engine.structured.choice import Choice
from engine.structured.costs import why_costly
from engine.structured.matcher import Begun, Structure, StructureFailed
from engine.structured.regex import RegexError, parse
from engine.structured.stack import call_deep
from engine.structured.vocabulary import Vocabulary
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.structured.guidance import Guidance

BACKENDS = ("auto", "guidance", "ruvon")
KEPT = 64  # structures that are kept for the next request
NAME = "structured_outputs"


@dataclass(frozen=True)
class StructuredOutputsConfig:
    """The options of an engine for all requests; vLLM's names. Raises ValueError for a wrong one."""

    # "guidance" is llguidance; "ruvon" is our own code, which knows choice and regex. "auto" is llguidance
    # where it is installed.
    backend: str = "auto"
    disable_fallback: bool = False  # no other backend is tried here in any case
    disable_any_whitespace: bool = False  # as if each request had said so
    disable_additional_properties: bool = False

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            accepted = ", ".join(BACKENDS)
            raise ValueError(f"{NAME}_config.backend={self.backend!r}: accepted are {accepted}")
        for name in ("disable_fallback", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{NAME}_config.{name}={getattr(self, name)!r}: true or false is accepted")

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "StructuredOutputsConfig":
        """Raises ValueError for an unknown name or a wrong value."""
        names = [spec.name for spec in fields(cls)]
        unknown = [name for name in given if name not in names]
        if unknown:
            raise ValueError(f"{NAME}_config.{unknown[0]} is unknown: accepted are {', '.join(names)}")
        return cls(**given)


class Compiler:
    """Compiles for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int], config: StructuredOutputsConfig) -> None:
        """Raises ValueError if the backend is named and not installed."""
        self._tokenizer, self._eos_ids, self._config = tokenizer, tuple(eos_ids), config
        is_installed = find_spec("llguidance") is not None
        if config.backend == "guidance" and not is_installed:
            raise ValueError(f"{NAME}_config.backend='guidance' needs llguidance: {INSTALL}")
        self._has_guidance = is_installed and config.backend != "ruvon"
        self._kept: OrderedDict[StructuredOutputsParams | str, Structure] = OrderedDict()
        self._lock = threading.Lock()  # of `_kept`
        self._making = threading.Lock()  # the vocabulary and the backend are made once

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self._tokenizer, self._eos_ids)

    @cached_property
    def _guidance(self) -> "Guidance":
        from engine.structured.guidance import Guidance

        return Guidance(self._tokenizer, self._vocabulary, self._eos_ids)

    def compile(self, params: StructuredOutputsParams) -> Structure:
        """The structure of a constraint. Raises ParameterError, field `structured_outputs`."""
        key = self.key(params)
        structure = self._known(key)
        if structure is None:
            structure = self._made(self._with_config(params))
            with self._lock:
                self._kept[key] = structure
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
        return structure

    def key(self, params: StructuredOutputsParams) -> str:
        """What constraints have in common that have the same structure."""
        params = self._with_config(params)
        if params.json is None:
            return repr(params)
        return f"{params.schema_text()} {replace(params, json='{}')!r}"

    def knows(self, key: str) -> bool:
        """Whether the structure of constraints with this key is kept: `compile` has nothing to do."""
        return self._known(key) is not None

    def _known(self, key: str) -> Structure | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _made(self, params: StructuredOutputsParams) -> Structure:
        """A new structure."""
        if params.prefix is not None:
            return self._behind(params.prefix, self.compile(replace(params, prefix=None)))
        with self._making:
            _ = self._vocabulary, self._has_guidance and self._guidance
        if self._has_guidance:
            return call_deep(partial(self._by_guidance, params))
        return self._by_ourselves(params)

    def _behind(self, prefix: str, structure: Structure) -> Structure:
        """The structure of what may follow a text in outputs of `structure`. Whatever tokens the text is read
        as, the same bytes lead to the same place. Raises ParameterError if no output begins with the text.
        """
        matcher, data = structure.start(), prefix.encode()
        beginning = "the beginning that the output continues"
        try:
            token_ids = self._vocabulary.longest_tokens(data)
            fitting = list(takewhile(matcher.advance, token_ids))
        except (StructureFailed, ValueError) as error:
            raise ParameterError(NAME, f"{NAME}: {beginning}: {error}") from None
        if len(fitting) < len(token_ids):
            num_bytes = sum(len(self._vocabulary.tokens[token_id]) for token_id in fitting)
            rest = data[num_bytes:].decode(errors="replace")[:40]
            raise ParameterError(NAME, f"{NAME}: {beginning} does not fit from {rest!r} on")
        return Begun(matcher)

    def _with_config(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """`params`, with what the engine's options say for all requests."""
        flags: dict[str, Any] = {}
        if params.json is not None or params.json_object is not None:
            if self._config.disable_any_whitespace and params.whitespace_pattern is None:
                flags["disable_any_whitespace"] = True
            if self._config.disable_additional_properties:
                flags["disable_additional_properties"] = True
        return replace(params, **flags) if flags else params

    def _by_ourselves(self, params: StructuredOutputsParams) -> Structure:
        """A choice or a regular expression, compiled by our own code."""
        if params.choice is not None:
            return Choice(params.choice, self._vocabulary)
        if params.regex is None:
            field = "grammar" if params.grammar is not None else "json"
            chosen = "backend='guidance'" if self._config.backend == "ruvon" else INSTALL
            raise _refused(field, f" needs llguidance ({chosen}); without, choice and regex are accepted")
        try:
            automaton = TokenAutomaton(parse(params.regex), self._vocabulary)
            if not automaton.allowed(automaton.first).any() and not automaton.may_end(automaton.first):
                raise _refused("regex", f"={params.regex!r}: no text fits it")
        except (RegexError, StructureFailed) as error:
            raise _refused("regex", f": {error}") from None
        return automaton

    def _by_guidance(self, params: StructuredOutputsParams) -> Structure:
        """Any constraint, compiled by llguidance."""
        from engine.structured import guidance

        backend = self._guidance
        if params.regex is not None:
            field, grammar = "regex", guidance.regex_grammar(params.regex)
        elif params.grammar is not None:
            field, grammar = "grammar", guidance.lark_grammar(params.grammar)
        elif params.choice is not None:
            field, grammar = "choice", guidance.choice_grammar(params.choice)
        else:
            return self._json(params)
        try:
            return backend.compile(grammar)
        except guidance.RefusedByGuidance as error:
            raise _refused(field, f": {error}") from None

    def _json(self, params: StructuredOutputsParams) -> Structure:
        """A JSON schema, compiled by llguidance."""
        from engine.structured import guidance

        def why(schema: Any) -> str | None:
            try:
                self._guidance.compile(guidance.json_grammar(params, schema))
            except (guidance.RefusedByGuidance, ValueError) as error:
                return str(error)
            return None

        schema = json.loads(params.schema_text())
        try:
            if why_not := why_costly(schema):
                raise _refused("json", f": {why_not}")
            return self._guidance.compile(guidance.json_grammar(params, schema))
        except RecursionError:
            raise _refused("json", " is nested too deeply") from None
        except ParameterError:
            raise
        except (guidance.RefusedByGuidance, ValueError) as error:
            field = "json" if params.json is not None else "json_object"
            raise _refused(field, f": {error} at {places.place(schema, why)}") from None


INSTALL = "pip install 'ruvon[structured]'"


def _refused(field: str, message: str) -> ParameterError:
    return ParameterError(NAME, f"{NAME}.{field}{message}")
