"""Compiles the constraints of requests, and keeps the results for later requests. Extension B.

Promises a structure, or a ParameterError that names the constraint's field, and for a JSON schema that
llguidance refuses also the place. Any thread may compile, and several do at the same time: who serves many
clients lets one compile after the other (engine/core/one_at_a_time.py).
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from engine.decoding.params import ParameterError
from engine.decoding.structured import CONSTRAINTS, StructuredOutputsParams
from engine.structured.automaton import TokenAutomaton
from engine.structured.choice import Choice
from engine.structured.costs import why_refused
from engine.structured.matcher import Matcher, Structure, StructureFailed, StructureFromMatcher
from engine.structured.places import place_of_refusal
from engine.structured.regex import RegexError, parse
from engine.structured.stack import call_with_large_stack
from engine.structured.vocabulary import Vocabulary
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.structured.guidance import Guidance

BACKENDS = ("auto", "guidance", "ruvon")
MAX_CACHED = 64  # the most structures that are kept for later requests
FIELD = "structured_outputs"  # the request's field, which errors name
INSTALL = "pip install 'ruvon[structured]'"


@dataclass(frozen=True)
class StructuredOutputsConfig:
    """The options of an engine for all requests; vLLM's names. Raises ValueError for a wrong one."""

    # "guidance" is llguidance; "ruvon" is our own code, which knows choice and regex. "auto" is llguidance
    # where it is installed.
    backend: str = "auto"
    disable_fallback: bool = False  # has no effect: after a refusal, no other backend is tried in any case
    disable_any_whitespace: bool = False  # as if each request had said so
    disable_additional_properties: bool = False  # as if each request had said so

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            accepted = ", ".join(BACKENDS)
            raise ValueError(f"{FIELD}_config.backend={self.backend!r}: accepted are {accepted}")
        for name in ("disable_fallback", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{FIELD}_config.{name}={getattr(self, name)!r}: true or false is accepted")

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> "StructuredOutputsConfig":
        """The config of a dict of option names and values. Raises ValueError for an unknown name or a wrong
        value.
        """
        names = [spec.name for spec in fields(cls)]
        unknown = [name for name in options if name not in names]
        if unknown:
            raise ValueError(f"{FIELD}_config.{unknown[0]} is unknown: accepted are {', '.join(names)}")
        return cls(**options)


class Compiler:
    """Compiles constraints for one tokenizer, and keeps the MAX_CACHED structures that were used last."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int], config: StructuredOutputsConfig) -> None:
        """`eos_ids`: the tokens that end an output. Raises ValueError if the backend "guidance" is asked for
        and llguidance is not installed.
        """
        self._tokenizer, self._eos_ids, self._config = tokenizer, tuple(eos_ids), config
        is_installed = find_spec("llguidance") is not None
        if config.backend == "guidance" and not is_installed:
            raise ValueError(f"{FIELD}_config.backend='guidance' needs llguidance: {INSTALL}")
        self._uses_guidance = is_installed and config.backend != "ruvon"
        self._cache: OrderedDict[str, Structure] = OrderedDict()  # the least recently used first
        self._cache_lock = threading.Lock()
        self._setup_lock = threading.Lock()  # only one thread makes the vocabulary and the backend

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self._tokenizer, self._eos_ids)

    @cached_property
    def _guidance(self) -> "Guidance":
        from engine.structured.guidance import Guidance  # imported here, since llguidance is optional

        return Guidance(self._tokenizer, self._vocabulary, self._eos_ids)

    def compile(self, params: StructuredOutputsParams) -> Structure:
        """The structure of a constraint. Any thread may call this method; it may take seconds.

        Raises ParameterError, which names the constraint's field, if the constraint cannot be compiled.
        """
        params = self._with_config(params)
        key = _cache_key(params)
        structure = self._cached(key)
        if structure is None:
            structure = self._compile_new(params)
            with self._cache_lock:
                self._cache[key] = structure
                if len(self._cache) > MAX_CACHED:
                    self._cache.popitem(last=False)
        return structure

    def key(self, params: StructuredOutputsParams) -> str:
        """The same text for constraints with the same structure."""
        return _cache_key(self._with_config(params))

    def knows(self, key: str) -> bool:
        """Whether the structure of constraints with this key is kept, so that `compile` takes no time. If so,
        it is now the one that was used last.
        """
        return self._cached(key) is not None

    def _cached(self, key: str) -> Structure | None:
        """The structure that is kept under this key, which is now the one that was used last."""
        with self._cache_lock:
            if key in self._cache:
                self._cache.move_to_end(key)
            return self._cache.get(key)

    def _compile_new(self, params: StructuredOutputsParams) -> Structure:
        """The structure of a constraint that is not kept. Raises as `compile` does."""
        if params.prefix is not None:
            return self._continuation(params)
        self._set_up()
        if self._uses_guidance:
            return call_with_large_stack(lambda: self._compile_with_guidance(params))
        return self._compile_with_ruvon(params)

    def _continuation(self, params: StructuredOutputsParams) -> Structure:
        """The structure of what may follow `params.prefix`. In whatever tokens the prefix is read, the same
        bytes lead to the same place. Raises ParameterError, also if no output begins with the prefix.
        """
        assert params.prefix is not None
        matcher = self.compile(replace(params, prefix=None)).start()
        data = params.prefix.encode()
        beginning = ": the beginning that the output continues"
        try:
            num_fitting = self._advance(matcher, data)
        except (StructureFailed, ValueError) as error:
            raise _refused(params, f"{beginning}: {error}") from None
        if num_fitting < len(data):
            rest = data[num_fitting:].decode(errors="replace")[:40]
            raise _refused(params, f"{beginning} does not fit from {rest!r} on")
        return StructureFromMatcher(matcher)

    def _advance(self, matcher: Matcher, text: bytes) -> int:
        """Have the matcher take tokens of a text, up to the first that does not fit. Returns the number of
        their bytes. Raises StructureFailed, and ValueError if the text is not made of tokens.
        """
        num_bytes = 0
        for token_id in self._vocabulary.longest_tokens(text):
            if not matcher.advance(token_id):
                break
            num_bytes += len(self._vocabulary.tokens[token_id])
        return num_bytes

    def _set_up(self) -> None:
        """Make the vocabulary and the backend, if they are not made yet."""
        with self._setup_lock:
            _ = self._vocabulary  # the first access makes it
            if self._uses_guidance:
                _ = self._guidance

    def _with_config(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """`params`, with the engine's options for all requests. The options concern JSON only."""
        if params.json is None and params.json_object is None:
            return params
        no_whitespace = params.disable_any_whitespace or self._config.disable_any_whitespace
        if params.whitespace_pattern is not None:  # the request's own rule for whitespace takes precedence
            no_whitespace = False
        no_additional = params.disable_additional_properties or self._config.disable_additional_properties
        return replace(
            params, disable_any_whitespace=no_whitespace, disable_additional_properties=no_additional
        )

    def _compile_with_ruvon(self, params: StructuredOutputsParams) -> Structure:
        """A choice or a regular expression, compiled by our own code. Raises ParameterError for others."""
        if params.choice is not None:
            return Choice(params.choice, self._vocabulary)
        if params.regex is None:
            remedy = "backend='guidance'" if self._config.backend == "ruvon" else INSTALL
            raise _refused(params, f" needs llguidance ({remedy}); without, choice and regex are accepted")
        try:
            automaton = TokenAutomaton(parse(params.regex), self._vocabulary)
            is_possible = automaton.allowed(automaton.first).any() or automaton.may_end(automaton.first)
        except (RegexError, StructureFailed) as error:
            raise _refused(params, f": {error}") from None
        if not is_possible:
            raise _refused(params, f"={params.regex!r}: no text fits it")
        return automaton

    def _compile_with_guidance(self, params: StructuredOutputsParams) -> Structure:
        """Any constraint, compiled by llguidance. Raises ParameterError."""
        from engine.structured import guidance

        try:
            if params.regex is not None:
                return self._guidance.compile(guidance.regex_grammar(params.regex))
            if params.grammar is not None:
                return self._guidance.compile(guidance.lark_grammar(params.grammar))
            if params.choice is not None:
                return self._guidance.compile(guidance.choice_grammar(params.choice))
            return self._compile_json(params)
        except guidance.RefusedByGuidance as error:
            raise _refused(params, f": {error}") from None
        except RecursionError:
            raise _refused(params, " is nested too deeply") from None

    def _compile_json(self, params: StructuredOutputsParams) -> Structure:
        """A JSON schema, compiled by llguidance. Raises ParameterError and RecursionError. If llguidance
        refuses the schema, the error also names the place.
        """
        schema = json.loads(params.schema_text())
        reason = why_refused(schema)
        if reason is not None:
            raise _refused(params, f": {reason}")
        try:
            return self._compile_schema(params, schema)
        except ValueError as error:  # llguidance's
            place = place_of_refusal(schema, partial(self._guidance_error, params))
            raise _refused(params, f": {error} at {place}") from None

    def _compile_schema(self, params: StructuredOutputsParams, schema: Any) -> Structure:
        """`schema`, with the options of `params`. Raises ValueError, with llguidance's words."""
        from engine.structured import guidance

        return self._guidance.compile(guidance.json_grammar(params, schema))

    def _guidance_error(self, params: StructuredOutputsParams, schema: Any) -> str | None:
        """llguidance's error for this schema, or None."""
        try:
            self._compile_schema(params, schema)
        except ValueError as error:
            return str(error)
        return None


def _cache_key(params: StructuredOutputsParams) -> str:
    """The same text for equal constraints. A JSON schema may be given as a dict or as a text, so the key has
    the schema's text.
    """
    if params.json is None:
        return repr(params)
    return f"{params.schema_text()} {replace(params, json='{}')!r}"


def _refused(params: StructuredOutputsParams, message: str) -> ParameterError:
    """The error of a constraint that is refused. `message` is what follows the name of the constraint's
    field.
    """
    field = next(name for name in CONSTRAINTS if getattr(params, name) is not None)
    return ParameterError(FIELD, f"{FIELD}.{field}{message}")
