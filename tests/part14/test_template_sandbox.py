"""A template that takes too much ends with an error in words, soon, and in the thread that renders it."""

import re
import time
import tracemalloc

import pytest

from engine.decoding import template_sandbox
from engine.decoding.chat_template import ChatError, ChatTemplate
from engine.decoding.template_costs import (
    MAX_CHARACTERS,
    STEP_CHARACTERS,
    TEXT_FILTERS,
    filter_characters,
    format_characters,
    method_characters,
    sum_of_numbers,
    written_length,
)
from engine.decoding.template_sandbox import Budget, BudgetExceeded, _refuse_large_int
from engine.models.checkpoint import CheckpointError

MESSAGES = [{"role": "user", "content": "hi"}]

DOUBLED = "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = OF %}{% endfor %}"
NESTED = DOUBLED.replace("'a'", "[]").replace("OF", "[ns.x, ns.x]")  # 2 ** 40 lists, written out
TOO_MUCH = {
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for i in range(20) recursive %}{% if loop.depth < 9 %}{{ loop(range(20)) }}"
    "{% endif %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "literal text": "{% set x %}{% for i in range(99999) %}" + 5000 * "x" + "{% endfor %}{% endset %}",
    "times": "{{ 'a' * 10**9 }}",
    "times, not printed": "{{ ('a' * 10**10) | length }}",
    "a list": "{{ [0] * 10**9 }}",
    "plus": DOUBLED.replace("OF", "ns.x + ns.x"),
    "tilde": DOUBLED.replace("OF", "ns.x ~ ns.x"),
    "nested lists": NESTED + "{{ ns.x }}",
    "nested lists as JSON": NESTED + "{{ ns.x | tojson }}",
    "nested lists in a refusal": NESTED + "{{ raise_exception(ns.x) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent with a star": "{{ '%*d' % (10**10, 1) }}",
    "the filter format": "{{ '%10000000000d' | format(1) }}",
    "braces": "{{ '{:>10000000000}'.format(1) }}",
    "braces in braces": "{{ '{:>{}}'.format(1, 10**10) }}",
    "center": "{{ 'a'.center(10**10) }}",
    "the filter center": "{{ 'a' | center(10**10) }}",
    "zfill": "{{ 'x'.zfill(9**9) }}",
    "replace": "{{ ('a' * 10**5).replace('a', 'b' * 10**5) | length }}",
    "the filter replace": "{{ ('a' * 10**5) | replace('a', 'b' * 10**5) | length }}",
    "join": "{{ ('a' * 10**6).join('b' * 10**5) | length }}",
    "the filter join": "{{ range(99999) | list | join('a' * 10**6) | length }}",
    "indent": "{{ 'a\nb' | indent(10**9) }}",
    "many lines indented": "{{ ('a\n' * 10**5) | indent(10**5) }}",
    "batch": "{{ [1] | batch(10**9, 0) | list | length }}",
    "slice": "{{ [1] | slice(10**9) | list | length }}",
    "tojson": "{{ [1] | tojson(indent=10**9) }}",
    "a power": "{{ 10**5000 }}",
    "to bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "the filter replace, by names": "{{ ('a' * 10**5) | replace(new='b' * 10**5, old='a') | length }}",
    "a width in a mapping": "{{ '{a:{w}}'.format_map({'a': 1, 'w': 10**10}) }}",
    "a width in a list": "{{ '{:{x[0]}}'.format(1, x=[10**10]) }}",
    "a width in a namespace": "{% set n = namespace(w=10**10) %}{{ '{:{n.w}}'.format(1, n=n) }}",
    "a width that is the next item": "{% for i in [1, 10**10] %}{{ '{:{l.nextitem}}'.format(1, l=loop) }}"
    "{% endfor %}",
    "a width in a text": "{{ '{:{w}}'.format(1, w='>10000000000') }}",
    "a width behind a value": "{{ '{:{f}>10000000000}'.format(1, f='x') }}",
    "many fields of one text": "{{ ('{0}' * 10**4).format('a' * 10**4) }}",
    "fields as Python writes them": NESTED + "{{ '{!r}'.format(ns.x) }}",
    "percent behind brackets": "{{ '%((a))10000000000d' % {'(a)': 1} }}",
    "tojson with long separators": "{{ [range(10**5) | list] | tojson(separators=('a' * 10**6, ':')) }}",
    "tojson with separators that come one by one": "{% set long = ['a' * 10**6, ':'] | map('string') %}"
    "{{ [range(10**5) | list] | tojson(separators=long) }}",
    "tojson with a text to indent": "{{ [range(10**5) | list] | tojson(indent='a' * 10**5) }}",
    "slow steps": "{% set s = 'a' * 10**6 %}{% for i in range(99999) %}{{ s | upper | length }}{% endfor %}",
}


@pytest.mark.parametrize("source", TOO_MUCH.values(), ids=TOO_MUCH)
def test_a_template_that_takes_too_much_is_refused_soon(source, monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 1.0)
    begun = time.thread_time()  # a busy machine does not add to it
    with pytest.raises(ChatError, match=r"the chat template (makes|takes) "):
        ChatTemplate(source).render(MESSAGES)
    assert time.thread_time() - begun < 10


def test_time_is_bounded_by_the_clock(monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.0)
    with pytest.raises(ChatError, match="the chat template takes more than 0 seconds"):
        ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}").render(MESSAGES)


@pytest.mark.parametrize("source", [
    "{{ " + 500 * "(" + "1" + 500 * ")" + " }}", "{{ " + 5000 * "not " + "1 }}",
    "{{ " + 20000 * "- " + "1 }}", 3000 * "{% if 1 %}" + 3000 * "{% endif %}",
    25 * "{% for i in [1] %}" + 25 * "{% endfor %}", 2_000_000 * "x",
], ids=["brackets", "not", "minus", "if", "for", "long"])  # fmt: skip
def test_a_template_that_cannot_be_read_is_an_error_in_words_at_load(source):
    with pytest.raises(CheckpointError, match="the chat template") as caught:
        ChatTemplate(source)
    assert len(str(caught.value)) < 300


def test_nothing_is_computed_at_load():
    """Jinja folds constants: what is never printed would be made, and what fails would fail."""
    assert (
        ChatTemplate("{% if false %}{{ 'a' * 10**10 }}{{ 'a' | center(10**10) }}{% endif %}b").render([])
        == "b"
    )


@pytest.mark.parametrize(("source", "text"), [
    ("{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}", "1/1True"),
    ("{% for m in [] %}x{% else %}none{% endfor %}", "none"),
    ("{% for m in missing %}x{% endfor %}", ""),
    ("{% for k, v in messages[0].items() if k == 'role' %}{{ k ~ '=' ~ v }}{% endfor %}", "role=user"),
    ("{{ '%s is %d' % ('x', 3) }}{{ '{:>3}'.format(1) }}{{ 'a,b'.split(',') | join('-') }}", "x is 3  1a-b"),
    ("{{ '{:>{}}{}{x[0]}'.format(1, 3, 10**9, x=['y']) }}", "  11000000000y"),
    ("{{ '{a}{b!r}'.format_map({'a': 1, 'b': 'c'}) }}{{ 'aa' | replace(new='b', old='a') }}", "1'c'bb"),
    ("{{ messages | map(attribute='content') | join }}{{ 2 * 3 + 2 ** 3 }}{{ 'ab' * 2 }}", "hi14abab"),
    ("{{ 'a\nb' | indent(2) }}{{ ' x ' | trim | upper }}{{ none }}{{ [1, 'a'] }}", "a\n  bXNone[1, 'a']"),
    ("{% set s = namespace(n=0) %}{% for m in [1, 2] %}{% set s.n = s.n + m %}{% endfor %}{{ s.n }}", "3"),
])  # fmt: skip
def test_what_templates_do_is_as_without_bounds(source, text):
    assert ChatTemplate(source).render(MESSAGES) == text


def test_a_long_conversation_is_within_the_bounds():
    """A million tokens have about four million characters."""
    messages = [{"role": "user", "content": 4000 * "x"} for _ in range(1000)]
    source = (
        "{% for m in messages %}{{ '<' + m.role + '>' }}{{ m.content | trim }}"
        "{% if loop.last %}{{ messages | length }}{% endif %}{% endfor %}"
    )
    assert len(ChatTemplate(source).render(messages)) == 1000 * 4006 + 4


@pytest.mark.parametrize(
    ("operator", "left", "right"), [("**", 2, 2049), ("*", 2**2048, 2**2047)], ids=["power", "product"]
)
def test_a_number_may_have_4096_bits(operator, left, right):
    """As they are counted before the number is made: those of 2 are 2, and 2048 times 2 are just allowed."""
    with pytest.raises(BudgetExceeded, match="a number of more than 4,096 bits"):
        _refuse_large_int(operator, left, right)
    _refuse_large_int(operator, left, right - 1)


def test_each_width_that_is_written_in_a_format_counts():
    widths = format_characters("%7d %9d", (1, 2)) - format_characters("%d %d", (1, 2))
    assert widths == 7 + 9 + len("79"), "two widths, and their digits in the text"


def test_a_tab_may_stand_at_every_character_and_a_margin_stands_once():
    assert method_characters("expandtabs", "\t" * 10, [100]) == 10 + 100 * (10 + 1), "each may be a tab"
    assert method_characters("center", "x" * 10, [100]) == 10 + 100, "the text, and one margin"


@pytest.mark.parametrize(
    "filters", ["string", "pprint", "join", "join('')", "join(' ')", "tojson", "trim | string | e"]
)
def test_a_filter_that_adds_little_to_a_text_costs_little(filters):
    """A message of a million characters is within the bounds, as it is without the filter."""
    messages = [{"role": "user", "content": "x" * 10**6}]
    length = ChatTemplate("{{ messages[0].content | " + filters + " | length }}").render(messages)
    assert length in ("1000000", "1000002", "1999999"), "as it is, with two quotes, with a space between all"


def test_a_separator_may_stand_behind_each_item():
    alone = filter_characters("join", "x" * 10, ())
    assert filter_characters("join", "x" * 10, ("ab",)) == alone + 10 * len("ab")
    assert filter_characters("join", "x" * 10, (["ab"],)) > alone + 10 * len("['ab']"), "or a list, written"


ZEROS = 12 * "0"
HIDDEN = {
    "percent": "{{ '%0" + ZEROS + "999999999d' % 1 }}",
    "percent, a precision": "{{ '%." + ZEROS + "999999999f' % 1 }}",
    "percent of bytes": "{{ '%" + ZEROS + "999999999d'.encode() % 1 }}",
    "percent behind a name": "{{ '%(a)" + ZEROS + "999999999d' % {'a': 1} }}",
    "the filter format": "{{ '%" + ZEROS + "999999999d' | format(1) }}",
    "braces": "{{ '{:" + ZEROS + "999999999}'.format(1) }}",
    "braces, more zeros than int reads": "{{ '{:" + 5000 * "0" + "999999999}'.format(1) }}",
    "braces, a precision": "{{ '{:." + ZEROS + "999999999f}'.format(1.5) }}",
    "braces, digits of another script": "{{ '{:" + 12 * "\u0660" + 9 * "\u0669" + "}'.format(1) }}",
    "braces in braces": "{{ '{:{w}}'.format(1, w='" + ZEROS + "999999999') }}",
    "replace a number": "{{ ('1' * 10**4) | replace(1, 'b' * 10**5) | length }}",
    "replace with a list": "{{ ('a' * 10**4) | replace('a', ['b' * 10**5]) | length }}",
    "lines that end otherwise": r"{{ ('a\r' * 10**4) | indent(10**5) | length }}",
    "attributes of links": "{{ ('a.com ' * 10**3) | urlize(rel='r' * 10**6, target='t') | length }}",
}


@pytest.mark.parametrize("source", HIDDEN.values(), ids=HIDDEN)
def test_what_multiplies_a_text_is_found_where_it_hides(source):
    """And before the text is made."""
    tracemalloc.start()
    try:
        with pytest.raises(ChatError, match="the chat template makes more than"):
            ChatTemplate(source).render(MESSAGES)
        assert tracemalloc.get_traced_memory()[1] < MAX_CHARACTERS
    finally:
        tracemalloc.stop()


def test_a_long_number_counts_as_too_many_and_leading_zeros_do_not_count():
    assert sum_of_numbers("0" * 5000 + "7.09") == 7 + 9
    assert MAX_CHARACTERS < sum_of_numbers("9" * 5000) < 2 * MAX_CHARACTERS


@pytest.mark.parametrize("name", sorted(TEXT_FILTERS))
def test_a_filter_that_writes_its_value_is_charged_for_all_of_it(name):
    arguments = {"replace": "('a', 'b')", "center": "(1)", "format": "(1)"}.get(name, "")
    with pytest.raises(ChatError, match="the chat template makes more than"):
        ChatTemplate(NESTED + "{{ ns.x | " + name + arguments + " | length }}").render(MESSAGES)


@pytest.mark.parametrize(("source", "text"), [
    ("{{ none | trim }}{{ 12 | replace(1, 3) }}{{ [1] | upper }}{{ missing | lower }}", "None32[1]"),
    ("{{ '<' | safe | e }}{{ '<' | e | e }}{{ '%03d' | format(7) }}", "<&lt;007"),
])  # fmt: skip
def test_a_filter_writes_any_value_as_jinja_does(source, text):
    assert ChatTemplate(source).render(MESSAGES) == text


def test_a_width_of_a_line_is_not_written():
    assert filter_characters("wordwrap", "x" * 10, (79,)) == 10
    assert filter_characters("wordwrap", "x" * 10, (79, True, "ab")) == 10 + 11 * len("ab")


WITHOUT_TEXT = {
    "is lower": NESTED + "{{ ns.x is lower }}",
    "is upper": NESTED + "{{ ns.x is upper }}",
    "an element that is missing": NESTED + "{{ ns.x[ns.x].y }}",
    "an index that is missing": NESTED + "{{ [].index(ns.x) }}",
    "a date with widths": "{{ strftime_now('%1500Y' * 10**6) | length }}",
    "digits that are rounded to": "{{ 1 | round(30000000, 'ceil') }}",
    "a long number from a text": "{{ ('f' * 10**7) | int(base=16) // 3 }}",
    "a long number from bytes": "{{ (1).from_bytes(('f' * 10**7).encode(), 'big') // 3 }}",
}


@pytest.mark.parametrize("source", WITHOUT_TEXT.values(), ids=WITHOUT_TEXT)
def test_what_is_made_on_the_way_to_a_result_is_bounded_too(source):
    with pytest.raises(ChatError, match="the chat template makes "):
        ChatTemplate(source).render(MESSAGES)


@pytest.mark.parametrize(("source", "text"), [
    ("{{ 'a' is lower }}{{ 1 is upper }}{{ [1].index(1) }}{{ '12' | int + 1 }}", "TrueFalse013"),
    ("{{ 2.345 | round(2) }}{{ 7 | round(1, 'ceil') }}{{ strftime_now('%Y') | length }}", "2.357.04"),
])  # fmt: skip
def test_small_results_are_as_without_bounds(source, text):
    assert ChatTemplate(source).render(MESSAGES) == text


def test_the_error_of_a_missing_element_names_it():
    with pytest.raises(ChatError, match="has no element 7"):
        ChatTemplate("{{ messages[7].role }}").render(MESSAGES)


def test_each_field_of_a_format_may_show_all_of_its_values():
    values = ("a" * 100, 7)
    shown = written_length(values)
    assert format_characters("%s %s %d", values) == len("%s %s %d") + 3 * shown, "the text, and each field"
    assert filter_characters("format", "%s", values) == len("%s") + shown
    assert format_characters("%*d", (-90, 7)) == len("%*d") + written_length((-90, 7)) + 90, "* is a width"
    for template in ("%s", b"%s"):
        assert format_characters(template, "a" * 100) == len(template) + written_length(("a" * 100,))


def test_a_text_that_is_put_in_counts_as_often_as_it_may_stand():
    assert method_characters("replace", "a-a-a", ("a", "bcd")) == 5 + 3 * 3, "for each that is replaced"
    assert method_characters("replace", b"a-a-a", (b"a", b"bcd")) == 5 + 3 * 3
    assert filter_characters("replace", "a-a-a", ("a", "bcd")) == 5 + 3 * 3
    assert method_characters("replace", "a-a-a", ("a", "bcd", 1)) == 5 + 3 * 3, "a third argument is a limit"
    assert method_characters("center", "ab", (10, "-")) == 2 + 10, "what fills the margins is one character"
    items = ["x" * 10, "y", "z"]
    assert method_characters("join", "--", (items,)) == written_length((items,)) + 2 * 3, "at each item"
    table = {97: "b" * 10}
    assert method_characters("translate", "abc", (table,)) == 3 * written_length((table,)), "for each letter"
    assert filter_characters("indent", "a\nb\nc", (4,)) == 5 + 4 * 4, "in each line, and one more"
    assert filter_characters("wordwrap", "abcd", (2, False, "xyz")) == 4 + 5 * 3, "between any two letters"
    assert filter_characters("center", "ab", (10,)) == filter_characters("truncate", "ab", (9, 10)) == 2 + 10
    assert filter_characters("pprint", "ab", (5,)) == written_length("ab") + 2 * written_length(5)
    assert filter_characters("default", "ab", ("xyz", 1)) == 0, "one of what is there already"


def test_an_indent_of_json_may_stand_before_each_of_its_parts():
    size, num_parts = written_length([1, 2]), 3  # the list and its items
    assert filter_characters("tojson", [1, 2], ()) == size + num_parts * written_length(())
    for indent, width in ((4, 4), ("xyz", 3)):
        with_indent = size + num_parts * (STEP_CHARACTERS * width + written_length((indent,)))
        assert filter_characters("tojson", [1, 2], (indent,)) == with_indent


def test_what_is_written_is_counted_part_by_part():
    for text in ("abc", b"abc"):
        assert written_length(text) == STEP_CHARACTERS + 3
    assert written_length(2**90) == STEP_CHARACTERS + 91 // 3, "three bits a digit"
    assert written_length([1, 0, None]) == 4 * STEP_CHARACTERS + 3, "a comma for each item"
    assert written_length({"ab": ["c"]}) == 4 * STEP_CHARACTERS + len("ab") + len("c") + 1


def test_a_budget_is_spent_to_its_last_character():
    budget = Budget()
    budget.charge(MAX_CHARACTERS - 3 * STEP_CHARACTERS - 1)
    budget.charge_result("x")
    budget.charge_result(7)  # neither a text nor a list
    assert budget.characters == 0
    with pytest.raises(BudgetExceeded, match="makes more than"):
        budget.charge(0)


@pytest.mark.parametrize(("source", "times"), [
    ("{% set x = 'LONG' + 'a' %}", 1), ("{% set x = 'a' + 'LONG' %}", 1), ("{% set x = 'LONG' ~ 'a' %}", 1),
    ("{% set x = 'a' * NUMBER %}", 1), ("{% set x = NUMBER * 'a' %}", 1), ("{% set x = 'LONG' * 3 %}", 3),
    ("{% set x = '%d LONG' % 3 %}", 1), ("{% set x = '%NUMBERd' % 3 %}", 1), ("{{ 'LONG' }}", 2),
    ("{% set x = '%s' % 'LONG' %}", 1), ("LONG", 1),
    ("{% set x = '{:>NUMBER}'.format(3) %}", 2), ("{% set x = '{}'.format('LONG') %}", 2),
])  # fmt: skip
def test_what_an_operation_makes_is_charged(source, times, monkeypatch):
    """`times`: how often each character is. A format's fields are, and what the call returns; what is printed
    is, and what leaves the template."""
    budgets = []
    monkeypatch.setattr(template_sandbox, "Budget", lambda: budgets.append(Budget()) or budgets[-1])
    for number in (1000, 3000):
        text = source.replace("LONG", "x" * number).replace("NUMBER", str(number))
        ChatTemplate(text).render([])
    shorter, longer = (MAX_CHARACTERS - budget.characters for budget in budgets)
    assert longer - shorter == 2000 * times


def test_numbers_with_a_point_are_computed_as_without_bounds():
    assert (
        ChatTemplate("{{ 1.5 + 1 }} {{ 1.5 * 2 }} {{ 2 * 1.5 }} {{ 7.5 % 2 }}").render([])
        == "2.5 3.0 3.0 1.5"
    )


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        ("'%99999999999d' + 1", 'can only concatenate str (not "int") to str'),
        ("'%99999999999d' ** 2", "unsupported operand type(s) for ** or pow(): 'str' and 'int'"),
        ("1 + 'a'", "unsupported operand type(s) for +: 'int' and 'str'"),
        ("[1] + 1", 'can only concatenate list (not "int") to list'),
        ("'a' * 1.5", "can't multiply sequence by non-int of type 'float'"),
        ("['%99999999999d'] % 1", "unsupported operand type(s) for %: 'list' and 'int'"),
        ("1.5 % 'a'", "unsupported operand type(s) for %: 'float' and 'str'"),
    ],
)
def test_what_has_no_result_costs_nothing_and_is_refused_in_pythons_words(operation, words):
    """Only % formats, and only a text: a width elsewhere is no width."""
    with pytest.raises(ChatError, match=re.escape(f"TypeError: {words}")):
        ChatTemplate("{{ " + operation + " }}").render([])


def test_what_cannot_be_joined_has_no_items_to_charge_for():
    for arguments in ((), (7,), (None, 7)):
        assert method_characters("join", "-" * 100, arguments) == written_length(arguments), (
            "no separator is charged where there is nothing to join"
        )
