"""Structures that llguidance computes: JSON schemas, grammars and the rest. Extension B.

llguidance is a library (https://github.com/guidance-ai/llguidance, the extra `structured`). From our
tokenizer, it gets the bytes of the tokens, the ids of special tokens and of those that end an output, and a
function that encodes text. Everything that a constraint may cost is bounded: its size
(engine/decoding/structured.py), the work to compile it, the work of a step, and the number of states. A
constraint that exceeds a limit is refused. If that shows only in the middle of an output, its request alone
fails.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import llguidance
import numpy as np

from engine.decoding.structured import StructuredOutputsParams
from engine.structured.matcher import Mask, StructureFailed, StructureFromMatcher
from engine.structured.schemas import map_schemas
from engine.structured.vocabulary import Vocabulary
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_MESSAGE = 300  # characters of an error message of llguidance
NO_TEXT = "no text fits"
# In llguidance's units. The comments say about how much a limit is.
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=100_000,  # 2 ms, once; and for all steps of an output together
    step_lexer_fuel=20_000,  # up to 100 ms, in a step that then fails
    step_max_items=20_000,  # 1 ms, in a step
    max_lexer_states=10_000,  # 20 MB
    max_grammar_size=200_000,
    verbose_errors=False,  # verbose errors contain the whole grammar
)


class RefusedByGuidance(ValueError):
    """llguidance refuses the constraint, and the message is in its words; or no text fits the constraint."""


class _LibraryTokenizer:
    """The tokenizer in the form that llguidance asks for: attributes with the tokens, and a call that encodes
    text.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary, eos_ids: Sequence[int]) -> None:
        size = max(tokenizer.vocab_size, max(eos_ids) + 1)
        self.tokens = [tokenizer.id_to_bytes.get(token_id, b"") for token_id in range(size)]
        self.special_token_ids = sorted({*tokenizer.special_ids, *eos_ids})
        self.eos_token_id, self.bos_token_id = eos_ids[0], None
        self._tokenizer, self._vocabulary = tokenizer, vocabulary

    def __call__(self, data: bytes) -> list[int]:
        """Tokens with exactly these bytes of a text: those of the tokenizer, if they have these bytes, and
        otherwise the longest token at each place.

        The tokenizer's tokens may have other bytes. A SentencePiece tokenizer puts a space before a text, and
        any tokenizer reads the name of a special token as that token, which stands for no text.
        """
        token_bytes = self._vocabulary.tokens
        token_ids = self._tokenizer.encode(data.decode(), add_special_tokens=False)
        is_text = all(token_id in token_bytes for token_id in token_ids)
        if is_text and b"".join(token_bytes[token_id] for token_id in token_ids) == data:
            return token_ids
        return self._vocabulary.longest_tokens(data)


class Guidance:
    """Compiles grammars for one vocabulary. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary, eos_ids: Sequence[int]) -> None:
        """`eos_ids`: the tokens that end an output, at least one."""
        wrapped = llguidance.TokenizerWrapper(_LibraryTokenizer(tokenizer, vocabulary, eos_ids))
        self._eos_ids = set(eos_ids)
        self._tokenizer = llguidance.LLTokenizer(wrapped, eos_token=list(eos_ids))

    def compile(self, grammar: str) -> StructureFromMatcher:
        """The structure of a grammar, as one of the functions below makes it. Raises RefusedByGuidance."""
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        num_words = -(-self._tokenizer.vocab_size // 32)  # of a mask, rounded up
        structure = StructureFromMatcher(GuidanceMatcher(matcher, num_words))
        if matcher.is_error():
            raise RefusedByGuidance(_short(matcher.get_error()))
        self._try(structure)
        return structure

    def _try(self, structure: StructureFromMatcher) -> None:
        """Compute two masks: a grammar that exceeds a limit mostly does so in one of the first masks. Raises
        RefusedByGuidance, also if no text fits.
        """
        try:
            trial = structure.start()
            bits = np.unpackbits(trial.allowed().view(np.uint8), bitorder="little")
            may_come = set(np.flatnonzero(bits).tolist()) - self._eos_ids
            if not may_come and not trial.may_end():
                raise RefusedByGuidance(NO_TEXT)
            if may_come and trial.advance(min(may_come)):
                trial.allowed()
        except StructureFailed as error:
            raise RefusedByGuidance(str(error)) from None


class GuidanceMatcher:
    """A `Matcher` over a matcher of llguidance's."""

    def __init__(self, matcher: llguidance.LLMatcher, num_words: int) -> None:
        """`num_words`: the length of a mask."""
        self._matcher, self._num_words = matcher, num_words

    def allowed(self) -> Mask:
        mask = np.zeros(self._num_words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._raise_error()
        return mask

    def may_end(self) -> bool:
        return self._matcher.is_accepting()

    def advance(self, token_id: int) -> bool:
        fits = self._matcher.try_consume_tokens([token_id]) == 1
        self._raise_error()
        return fits

    def rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)
            self._raise_error()

    def copy(self) -> "GuidanceMatcher":
        return GuidanceMatcher(self._matcher.deep_copy(), self._num_words)

    def _raise_error(self) -> None:
        """Raise StructureFailed if llguidance has reported an error."""
        if self._matcher.is_error():
            raise StructureFailed(_short(self._matcher.get_error()))


def json_grammar(params: StructuredOutputsParams, schema: Any) -> str:
    """llguidance's grammar of a JSON schema, with the options of `params`: whitespace and additional
    properties. Raises RefusedByGuidance, or ValueError with llguidance's words.
    """
    if schema is False:
        raise RefusedByGuidance("nothing fits the schema false")
    options: JsonCompileOptions = {"whitespace_flexible": not params.disable_any_whitespace}
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    if params.disable_additional_properties:
        schema = map_schemas(schema, _without_additional_properties)
    text = "{}" if schema is True else json.dumps(schema)  # the schema true accepts everything, as {} does
    return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options)


def regex_grammar(pattern: str) -> str:
    """llguidance's grammar of a regular expression. `Guidance.compile` refuses a wrong one."""
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def lark_grammar(text: str) -> str:
    """llguidance's grammar of a grammar in its dialect of Lark. `Guidance.compile` refuses a wrong one."""
    return llguidance.LLMatcher.grammar_from_lark(text)


def choice_grammar(choices: Sequence[str]) -> str:
    """llguidance's grammar of a choice."""
    # Lark's strings are written as JSON's, but the character 7F must be escaped, too.
    texts = (json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in choices)
    return lark_grammar("start: " + " | ".join(texts))


def _short(error: str) -> str:
    """An error message of llguidance in one line of at most MAX_MESSAGE characters, without its internal
    marks.
    """
    words = " ".join(error.replace("<non-verbose/>", "").split())[:MAX_MESSAGE]
    return NO_TEXT if words == "NoExtensionBias" else words


def _without_additional_properties(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with `additionalProperties: false`, if it names properties and does not say whether others
    may come.
    """
    names_properties = "properties" in schema or "patternProperties" in schema
    if names_properties and "additionalProperties" not in schema:
        return schema | {"additionalProperties": False}
    return schema
