"""Structures that llguidance computes: JSON schemas, grammars and the rest. Extension B.

llguidance is a library (https://github.com/guidance-ai/llguidance, the extra `structured`). It gets the
tokens as bytes from our own tokenizer, and nothing else of it. Everything that a constraint may cost is
bounded: its size (engine/decoding/structured.py), the work to compile it, the work of a step, and the states
that it may need. What goes beyond is refused; if that shows in the middle of an output, that request alone
fails.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import llguidance
import numpy as np

from engine.decoding.structured import StructuredOutputsParams
from engine.structured.matcher import Begun, Mask, StructureFailed
from engine.structured.places import changed
from engine.structured.vocabulary import Vocabulary
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_MESSAGE = 300  # characters of llguidance's own words
NO_TEXT = "no text fits"
# Counted in llguidance's units; the comments say about how much that is.
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=100_000,  # 2 ms, once; and of all that one output may need
    step_lexer_fuel=20_000,  # up to 100 ms, in a step that then fails
    step_max_items=20_000,  # 1 ms, in a step
    max_lexer_states=10_000,  # 20 MB
    max_grammar_size=200_000,
    verbose_errors=False,  # which would have the whole grammar in them
)


class RefusedByGuidance(ValueError):
    """llguidance refuses the constraint. The message is in its words."""


class _Tokens:
    """The tokenizer as llguidance wants it: the bytes of each token, and how text becomes tokens."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary, eos_ids: Sequence[int]) -> None:
        size = max(tokenizer.vocab_size, max(eos_ids) + 1)
        self.tokens = [tokenizer.id_to_bytes.get(id, b"") for id in range(size)]
        self.special_token_ids = sorted({*tokenizer.special_ids, *eos_ids})
        self.eos_token_id, self.bos_token_id = eos_ids[0], None
        self._tokenizer, self._vocabulary = tokenizer, vocabulary

    def __call__(self, data: bytes) -> list[int]:
        """Tokens with a text's bytes: the tokenizer's own, if they are; else the longest at each place.

        A SentencePiece tokenizer puts a space before a text, and any tokenizer reads a special token where
        its name stands: what an output must say is neither.
        """
        tokens = self._vocabulary.tokens
        ids = self._tokenizer.encode(data.decode(), add_special_tokens=False)
        if b"".join(tokens.get(id, b"") for id in ids) == data and all(id in tokens for id in ids):
            return ids
        return self._vocabulary.longest_tokens(data)


class Guidance:
    """Compiles constraints for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary, eos_ids: Sequence[int]) -> None:
        wrapped = llguidance.TokenizerWrapper(_Tokens(tokenizer, vocabulary, eos_ids))
        self._eos_ids = set(eos_ids)
        self._tokenizer = llguidance.LLTokenizer(wrapped, eos_token=list(eos_ids))

    def compile(self, grammar: str) -> Begun:
        """The structure of a grammar that one of the functions below has made. Raises RefusedByGuidance."""
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        structure = Begun(GuidanceMatcher(matcher, -(-self._tokenizer.vocab_size // 32)))
        if not matcher.is_error():
            try:  # two masks: what goes beyond a limit mostly does so in one of them
                trial = structure.start()
                bits = np.unpackbits(trial.allowed().view(np.uint8), bitorder="little")
                may_come = set(np.flatnonzero(bits).tolist()) - self._eos_ids
                if not may_come and not trial.may_end():
                    raise RefusedByGuidance(NO_TEXT)
                if may_come and trial.advance(min(may_come)):
                    trial.allowed()
            except StructureFailed as error:
                raise RefusedByGuidance(str(error)) from None
        if matcher.is_error():
            raise RefusedByGuidance(message(matcher.get_error()))
        return structure


class GuidanceMatcher:
    """A `Matcher` that is llguidance's."""

    def __init__(self, matcher: llguidance.LLMatcher, num_words: int) -> None:
        self._matcher, self._num_words = matcher, num_words

    def allowed(self) -> Mask:
        mask = np.zeros(self._num_words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        return mask

    def may_end(self) -> bool:
        return self._matcher.is_accepting()

    def advance(self, token_id: int) -> bool:
        fits = self._matcher.try_consume_tokens([token_id]) == 1
        self._check()
        return fits

    def rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)
            self._check()

    def copy(self) -> "GuidanceMatcher":
        return GuidanceMatcher(self._matcher.deep_copy(), self._num_words)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise StructureFailed(message(self._matcher.get_error()))


def json_grammar(params: StructuredOutputsParams, schema: Any) -> str:
    """llguidance's grammar of a JSON schema, with the whitespace that `params` say. Raises
    RefusedByGuidance.
    """
    if schema is False:
        raise RefusedByGuidance("nothing fits the schema false")
    options: JsonCompileOptions = {"whitespace_flexible": not params.disable_any_whitespace}
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    if params.disable_additional_properties:
        schema = changed(schema, _closed)
    text = "{}" if schema is True else json.dumps(schema)
    return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options)


def regex_grammar(pattern: str) -> str:
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def lark_grammar(text: str) -> str:
    return llguidance.LLMatcher.grammar_from_lark(text)


def choice_grammar(choices: Sequence[str]) -> str:
    """llguidance's grammar of a choice. Lark's strings are written as JSON's."""
    texts = (json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in choices)
    return lark_grammar("start: " + " | ".join(texts))


def message(error: str) -> str:
    """The error's first lines, without what is not meant for a user."""
    words = " ".join(error.replace("<non-verbose/>", "").split())[:MAX_MESSAGE]
    return NO_TEXT if words == "NoExtensionBias" else words


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with `additionalProperties: false` if it names properties and leaves it open."""
    if ("properties" in schema or "patternProperties" in schema) and "additionalProperties" not in schema:
        return schema | {"additionalProperties": False}
    return schema
