"""What an output must fit, as it is said: exactly one constraint, of the right type and of bounded size."""

import pytest

from engine.decoding.structured import StructuredOutputsParams, StructureError

ONE = {
    "json": {"type": "object"},
    "regex": "[0-9]+",
    "choice": ["yes", "no"],
    "grammar": 'start: "a"',
    "json_object": True,
}
deep: dict = {}
for _ in range(100_000):
    deep = {"not": deep}
WRONG = [
    ("json", 5, "a JSON schema or its text is accepted"),
    ("json", "{", "is no JSON schema"),
    ("json", "[]", r"is \[\]: a JSON schema is an object"),
    ("json", {"enum": [float("nan")]}, "is no JSON schema"),
    ("json", {"a": object()}, "is no JSON schema"),
    ("json", deep, "nested too deeply"),
    ("json", '{"not":' * 8000, "is no JSON schema|nested too deeply"),
    ("json", {"enum": ["a" * 200_000]}, "characters; at most 65536 are accepted"),
    ("json", " " * 200_000, "has 200000 characters; at most 65536 are accepted"),
    ("regex", "", "a text of at least one character is accepted"),
    ("regex", b"a", "a text of at least one character is accepted"),
    ("regex", "a" * 9000, "has 9000 characters; at most 8192 are accepted"),
    ("grammar", "a" * 70_000, "has 70000 characters; at most 65536 are accepted"),
    ("choice", "yes", "a list of texts is accepted"),
    ("choice", [], "a list of texts is accepted"),
    ("choice", ["a", ""], "none of them empty"),
    ("choice", ["a", 5], "a list of texts is accepted"),
    ("choice", ["a"] * 1025, "has 1025 texts; at most 1024 are accepted"),
    ("choice", ["a" * 70_000], "has 70000 characters in all; at most 65536 are accepted"),
    ("json_object", False, "true is accepted"),
    ("structural_tag", "{}", "is not supported"),
]


@pytest.mark.parametrize("field", ONE)
def test_each_constraint_is_accepted_alone_and_shown(field):
    params = StructuredOutputsParams(**{field: ONE[field]})
    assert repr(params) == f"StructuredOutputsParams({field}={ONE[field]!r})"


@pytest.mark.parametrize(("field", "value", "says"), WRONG)
def test_a_wrong_constraint_is_refused_by_name(field, value, says):
    with pytest.raises(StructureError, match=rf"structured_outputs\.{field}.*({says})") as caught:
        StructuredOutputsParams(**{field: value})
    assert caught.value.field == field


def test_exactly_one_constraint_is_given():
    with pytest.raises(StructureError, match=r"exactly one of json, regex, .* given are: none"):
        StructuredOutputsParams()
    with pytest.raises(StructureError, match="given are: regex and choice"):
        StructuredOutputsParams(regex="a", choice=["a"])


@pytest.mark.parametrize(
    "options",
    [{"disable_any_whitespace": True}, {"whitespace_pattern": " ?"}, {"disable_additional_properties": True}],
)
def test_options_of_json_have_no_use_without_it(options):
    assert StructuredOutputsParams(json={}, **options)
    ((name, _),) = options.items()
    with pytest.raises(StructureError, match=rf"structured_outputs\.{name}=.* needs json or json_object"):
        StructuredOutputsParams(regex="a", **options)


def test_a_beginning_is_a_text_beside_any_constraint():
    for field in ONE:
        params = StructuredOutputsParams(**{field: ONE[field]}, prefix="a")
        assert repr(params) == f"StructuredOutputsParams({field}={ONE[field]!r}, prefix='a')"
        assert params == StructuredOutputsParams(**{field: ONE[field]}).continuing("a")
        assert params.continuing("") == StructuredOutputsParams(**{field: ONE[field]}), "no beginning at all"
    for wrong, says in (
        ("", "at least one character"), (5, "a text of"), ("a" * 70_000, "70000 characters; at most 65536"),
        ("\ud800", "a lone surrogate"),
    ):  # fmt: skip
        with pytest.raises(StructureError, match=rf"structured_outputs\.prefix.*{says}") as caught:
            StructuredOutputsParams(regex="a", prefix=wrong)
        assert caught.value.field == "prefix"
    with pytest.raises(StructureError, match="given are: none"):
        StructuredOutputsParams(prefix="a")


def test_a_flag_is_true_or_false_and_whitespace_is_said_once():
    with pytest.raises(StructureError, match="disable_fallback='yes': true or false"):
        StructuredOutputsParams(json={}, disable_fallback="yes")
    with pytest.raises(StructureError, match="whitespace_pattern has no use"):
        StructuredOutputsParams(json={}, whitespace_pattern=" ?", disable_any_whitespace=True)


def test_the_schema_keeps_the_order_of_its_properties():
    schema = {"properties": {"z": {}, "a": {}}}
    text = '{"properties":{"z":{},"a":{}}}'
    assert StructuredOutputsParams(json=schema).schema_text() == text
    assert StructuredOutputsParams(json=text).schema_text() == text
    assert StructuredOutputsParams(json_object=True).schema_text() == '{"type":"object"}'


@pytest.mark.parametrize("as_text", [False, True])
def test_a_schema_has_at_most_65536_characters(as_text):
    def schema(num_characters: int) -> dict | str:
        title = "a" * (num_characters - len('{"title":""}'))
        return f'{{"title":"{title}"}}' if as_text else {"title": title}

    assert len(StructuredOutputsParams(json=schema(65_536)).schema_text()) == 65_536, "the longest"
    with pytest.raises(StructureError, match="json has 65537 characters; at most 65536 are accepted"):
        StructuredOutputsParams(json=schema(65_537)).schema_text()
