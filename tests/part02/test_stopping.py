"""When an output ends, and which text may be shown before: on a tokenizer of single bytes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.decoding.params import SamplingParams
from engine.decoding.stopping import GrowingOutput
from engine.text.tokenizer import Tokenizer
from engine.text.vocabulary import byte_alphabet

END, TOOL = 256, 257


def start(tokenizer, prompt_length=1, max_positions=1000, eos=(END,), **settings) -> GrowingOutput:
    params = SamplingParams(**{"max_tokens": None, "temperature": 0} | settings)
    return GrowingOutput(tokenizer, params, prompt_length, max_positions, eos)


def feed(output: GrowingOutput, tokens) -> list[str]:
    """Append until it is finished; what was visible after each token."""
    shown = []
    for token in tokens.encode() if isinstance(tokens, str) else tokens:
        finished = output.append(token)
        assert finished == (output.finish_reason is not None), "`append` says whether that was the last token"
        shown.append(output.visible)
        if finished:
            break
    return shown


def visible(tokenizer, stop, text) -> str:
    """What may be shown of `text`, while the output still grows."""
    output = start(tokenizer, stop=stop)
    output.text = text
    return output.visible


@pytest.mark.parametrize("stop", [(), "END"])
def test_text_that_begins_no_stop_string_is_visible(byte_tokenizer, stop):
    got = visible(byte_tokenizer, stop, "a story")
    assert got == "a story", "only an end that may begin a stop string is held back"


@pytest.mark.parametrize(("text", "shown"), [("a storyE", "a story"), ("a storyEN", "a story"), ("EN", "")])
def test_an_end_that_may_begin_a_stop_string_is_not_visible(byte_tokenizer, text, shown):
    got = visible(byte_tokenizer, "END", text)
    assert got == shown, "an end that may begin a stop string is held back"


@pytest.mark.parametrize("text", ["END of it", "ENd", "END", "aN"])
def test_only_the_very_end_counts(byte_tokenizer, text):
    """A whole stop string in a text that still grows was complete before `min_tokens`: it ended nothing."""
    got = visible(byte_tokenizer, "END", text)
    assert got == text, "held back is an end that may *become* a stop string, nothing else"


@pytest.mark.parametrize(("stop", "text", "shown"), [("aab", "xaa", "x"), ("\n\nQ", "one\n\n", "one")])
def test_of_several_ends_the_longest_is_held_back(byte_tokenizer, stop, text, shown):
    got = visible(byte_tokenizer, stop, text)
    assert got == shown, "the longest end that may begin a stop string is held back"


@pytest.mark.parametrize(("text", "shown"), [("one\n", "one"), ("one Q", "one ")])
def test_any_of_the_stop_strings_may_have_begun(byte_tokenizer, text, shown):
    got = visible(byte_tokenizer, ["Q:", "\n\n"], text)
    assert got == shown, "each of the stop strings may have begun, not the first of them alone"


def test_of_two_stop_strings_that_may_have_begun_the_longer_beginning_counts(byte_tokenizer):
    got = visible(byte_tokenizer, ["bx", "abc"], "xab")
    assert got == "x", "the longest end that may begin any of the stop strings is held back"


def test_a_finished_output_shows_everything(byte_tokenizer):
    output = start(byte_tokenizer, stop="END", max_tokens=3)
    got = feed(output, "aEN")
    assert got == ["a", "a", "aEN"], "once the output has a finish reason, all of its text is visible"


def test_a_whole_stop_string_before_min_tokens_is_text_like_any_other(byte_tokenizer):
    got = feed(start(byte_tokenizer, stop="END", min_tokens=5), "ENDab")
    assert got == ["", "", "END", "ENDa", "ENDab"], "a stop string before min_tokens ends nothing: it is text"


@pytest.mark.parametrize(
    ("stop", "text", "kept", "found"),
    [
        ("END", "a story END of it", "a story ", "END"),
        ("END", "EEND", "E", "END"),
        ("aab", "aaaab", "aa", "aab"),
        ("日本", "x日本y", "x", "日本"),
        (["\n\n", "Q:"], "one\nQ: two", "one\n", "Q:"),
        (["\n\n", "Q:"], "one\n\nQ: two", "one", "\n\n"),
        (["abcd", "bc"], "xabcd", "xa", "bc"),  # the one that ends first, though the other began earlier
        (["bc", "abc"], "xabc", "x", "abc"),  # ending together: the longer one
        (["x"], "x", "", "x"),
    ],
)
def test_a_stop_string_ends_the_output_and_is_cut_off(byte_tokenizer, stop, text, kept, found):
    output = start(byte_tokenizer, stop=stop)
    feed(output, text)
    assert (output.text, output.finish_reason, output.stop_reason) == (kept, "stop", found)
    assert output.visible == kept
    included = start(byte_tokenizer, stop=stop, include_stop_str_in_output=True)
    feed(included, text)
    assert (included.text, included.stop_reason) == (kept + found, found)


def test_text_that_may_become_a_stop_string_is_held_back_until_it_is_clear(byte_tokenizer):
    output = start(byte_tokenizer, stop="END")
    assert feed(output, "aEENxE") == ["a", "a", "aE", "aE", "aEENx", "aEENx"]
    assert output.text == "aEENxE"


def test_held_back_text_is_shown_when_the_output_ends_otherwise(byte_tokenizer):
    output = start(byte_tokenizer, stop="END", max_tokens=3)
    assert feed(output, "aENDx") == ["a", "a", "aEN"]
    assert output.finish_reason == "length"
    output = start(byte_tokenizer, stop="END")
    assert feed(output, [ord("E"), END]) == ["", "E"]


def test_without_stop_strings_nothing_is_held_back(byte_tokenizer):
    assert feed(start(byte_tokenizer), "abc") == ["a", "ab", "abc"]


def test_a_token_of_many_characters_stops_at_the_first_of_two_stop_strings(byte_tokenizer):
    output = start(byte_tokenizer, stop=["l", "<t"])
    feed(output, [ord("a"), TOOL])  # "<tool>" holds both
    assert (output.text, output.stop_reason) == ("a", "<t")


LETTERS = st.text("ab", min_size=1, max_size=4)


@given(
    text=st.text("abé", max_size=30),
    stop=st.lists(LETTERS, max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
    max_tokens=st.integers(6, 40),
)
def test_what_is_shown_only_grows_and_is_the_beginning_of_the_final_text(
    byte_tokenizer, text, stop, include, min_tokens, max_tokens
):
    output = start(
        byte_tokenizer,
        stop=stop,
        include_stop_str_in_output=include,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
    )
    shown = feed(output, [*text.encode(), END])
    for earlier, later in pairwise(shown):
        assert later.startswith(earlier), "what was visible is never taken back"
    assert shown[-1] == output.text, "in the end all of the text is visible"
    if output.finish_reason == "stop" and output.stop_reason is None:
        assert output.text == text


@given(text=st.text("abé", max_size=30), stop=st.lists(LETTERS, min_size=1, max_size=3))
def test_a_stop_string_is_found_where_the_whole_text_has_it(byte_tokenizer, text, stop):
    output = start(byte_tokenizer, stop=stop)
    feed(output, [*text.encode(), END])
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
    if ends:
        _, first, string = min(ends)
        assert (output.text, output.stop_reason) == (text[:first], string)
    else:
        assert (output.text, output.stop_reason) == (text, None)


@pytest.mark.parametrize(
    ("settings", "reason", "text"),
    [
        ({}, None, "ab"),
        ({"skip_special_tokens": False}, None, "ab"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, None, "ab<end>"),
        ({"include_stop_str_in_output": True}, None, "ab"),
        ({"stop_token_ids": [END]}, None, "ab"),  # end of sequence all the same
    ],
)
def test_end_of_sequence_counts_as_a_token_and_is_no_text_unless_asked(
    byte_tokenizer, settings, reason, text
):
    output = start(byte_tokenizer, **settings)
    feed(output, [97, 98, END, 99])
    assert (output.finish_reason, output.stop_reason, output.text) == ("stop", reason, text)
    assert output.token_ids == [97, 98, END]


def test_any_of_several_ends_of_sequence_will_do(byte_tokenizer):
    for ends, reason in (("ab\nc", 10), ([97, 98, END], None)):
        output = start(byte_tokenizer, eos=(10, END))
        feed(output, ends)
        assert (output.text, output.finish_reason) == ("ab", "stop")
        assert output.stop_reason == reason, "the tokenizer's own end has no stop_reason, another has its id"


def test_a_tokenizer_without_an_end_takes_the_models_first(byte_tokenizer):
    tokenizer = Tokenizer({char: byte for byte, char in byte_alphabet().items()}, [])
    for last, reason in ((10, None), (98, 98)):
        output = start(tokenizer, eos=(10, 98))
        feed(output, [97, last])
        assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", reason)


def test_an_end_of_sequence_that_is_ignored_and_named_as_a_stop_token_has_its_id(byte_tokenizer):
    output = start(byte_tokenizer, ignore_eos=True, stop_token_ids=[END])
    feed(output, [97, END])
    assert (output.finish_reason, output.stop_reason) == ("stop", END)


def test_without_detokenize_tokens_are_counted_and_have_no_text(byte_tokenizer):
    settings = {"max_tokens": 4, "stop_token_ids": [98], "include_stop_str_in_output": True}
    output = start(byte_tokenizer, detokenize=False, **settings)
    feed(output, "xyb")
    assert (output.text, output.visible, output.token_ids) == ("", "", [*b"xyb"])
    assert (output.finish_reason, output.stop_reason) == ("stop", 98)
    cut = start(byte_tokenizer, detokenize=False, max_tokens=1)
    feed(cut, [0xF0])
    assert cut.text == "", "nor is there a mark for an incomplete character"


def test_ignored_ends_of_sequence_are_passed_over(byte_tokenizer):
    output = start(byte_tokenizer, ignore_eos=True, max_tokens=3)
    feed(output, [97, END, 98])
    assert (output.text, output.finish_reason, output.token_ids) == ("ab", "length", [97, END, 98])


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_token_is_named_and_its_text_left_out_unless_asked(byte_tokenizer, include, text):
    output = start(byte_tokenizer, stop_token_ids=[98], include_stop_str_in_output=include)
    feed(output, "abc")
    assert (output.text, output.finish_reason, output.stop_reason) == (text, "stop", 98)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_until_min_tokens_the_tokens_that_end_are_banned(byte_tokenizer, ignore_eos):
    output = start(byte_tokenizer, min_tokens=2, stop_token_ids=[98], ignore_eos=ignore_eos)
    banned = {98} if ignore_eos else {98, END}
    assert set(output.banned_token_ids) == banned
    output.append(97)
    assert set(output.banned_token_ids) == banned
    output.append(97)
    assert output.banned_token_ids == ()


@pytest.mark.parametrize(("min_tokens", "text"), [(0, ""), (2, ""), (3, "aba"), (4, "aba")])
def test_a_stop_string_does_not_end_the_output_before_min_tokens(byte_tokenizer, min_tokens, text):
    output = start(byte_tokenizer, stop="ab", min_tokens=min_tokens)
    feed(output, "abaab")
    assert output.text == text


@pytest.mark.parametrize(
    ("max_tokens", "prompt_length", "count"),
    [(3, 1, 3), (1, 1, 1), (None, 7, 3), (5, 7, 3), (2, 7, 2), (5, 9, 1)],
)
def test_the_length_ends_at_max_tokens_or_at_the_models_limit(
    byte_tokenizer, max_tokens, prompt_length, count
):
    output = start(byte_tokenizer, prompt_length, max_positions=10, max_tokens=max_tokens)
    feed(output, "a" * 20)
    assert (len(output.token_ids), output.finish_reason, output.stop_reason) == (count, "length", None)


def test_a_stop_on_the_last_token_is_a_stop(byte_tokenizer):
    for settings, tokens in (({"stop": "ab"}, "ab"), ({}, [97, END]), ({"stop_token_ids": [98]}, "ab")):
        output = start(byte_tokenizer, max_tokens=2, **settings)
        feed(output, tokens)
        assert output.finish_reason == "stop"


def test_half_a_character_at_the_end_is_replaced_and_after_a_stop_string_dropped(byte_tokenizer):
    half = "é".encode()[0]
    output = start(byte_tokenizer, max_tokens=2)
    assert feed(output, [97, half]) == ["a", "a\ufffd"]
    output = start(byte_tokenizer)
    assert feed(output, [97, half, END])[-1] == "a\ufffd"
