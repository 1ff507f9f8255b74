"""Lines become events. From small to large."""

import json

from engine.client.sse import events, lines


def test_an_empty_line_ends_an_event():
    got = list(events(["data: one", "", "data: two", ""]))
    assert got == ["one", "two"], (
        "an empty line ends an event, and data of the last event are not those of the next"
    )


def test_an_event_is_there_as_soon_as_its_empty_line_is():
    def wire():
        yield from ("data: one", "")
        raise AssertionError("an event is given at its empty line, before the next line is asked for")

    assert next(events(wire())) == "one"


def test_one_space_behind_the_colon_is_left_out():
    assert list(events(["data:one", ""])) == ["one"], "there need not be a space behind the colon"
    assert list(events(["data:  one ", ""])) == [" one "], "one space behind the colon, no more, is left out"
    assert list(events(["data: a: b", ""])) == ["a: b"], "the first colon ends the name"


def test_several_data_lines_are_lines_of_one_event():
    assert list(events(["data: one", "data: two", ""])) == ["one\ntwo"], (
        "the values of `data` are the lines of one event, joined by line breaks"
    )
    assert list(events(["data: one", "data:", "data: two", ""])) == ["one\n\ntwo"], "an empty value is a line"


def test_no_data_no_event():
    assert list(events(["", "", ": comment", "", "event: x", ""])) == [], "an event without `data` is none"


def test_comments_and_other_names_are_passed_over():
    rule = "a comment and other names say nothing here, and end nothing"
    assert list(events([": still here", "data: one", "id: 7", "event: x", "retry: 9", ""])) == ["one"], rule
    assert list(events(["data: one", ": x", "data: two", ""])) == ["one\ntwo"], rule
    assert list(events(["database: no", " data: no", "Data: no", ""])) == [], "the name is `data`, exactly"


def test_a_line_without_a_colon_is_a_name():
    assert list(events(["data", ""])) == [""], "`data` without a colon is a `data` with an empty value"
    assert list(events(["nothing", ""])) == []
    assert list(events(["data: one", " ", "data: two", ""])) == ["one\ntwo"], (
        "only an empty line ends an event: a line of blanks has a name, and it is not `data`"
    )


def test_an_event_that_never_ends_is_none():
    assert list(events(["data: one", "", "data: two"])) == ["one"], (
        "its empty line never came: the connection broke off, and half an event is none"
    )


def test_what_json_leaves_as_it_is_arrives():
    """U+2028 ends a line for `str.splitlines`, and stands unescaped in the JSON of every server but a few."""
    said = "one\u2028two\u0085three\nfour"
    wire = f"data: {json.dumps({'content': said}, ensure_ascii=False)}\n\n".encode()
    assert [json.loads(data)["content"] for data in events(lines([wire[:20], wire[20:]]))] == [said]
