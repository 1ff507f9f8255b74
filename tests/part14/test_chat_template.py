"""A conversation becomes the text that Hugging Face makes of it."""

import pytest

from engine.decoding.chat_template import ChatError, ChatTemplate
from engine.models.checkpoint import ZOO, CheckpointError

CONVERSATIONS = {
    "one question": [("user", "Tell me a story.")],
    "a system prompt": [("system", "Be brief."), ("user", "Hi")],
    "two systems": [("system", "Be brief."), ("system", "Be kind."), ("user", "Hi")],
    "several turns": [("user", "Hi"), ("assistant", "Hello!"), ("user", "More <b>please</b> & \"thanks\"\n")],
    "no ascii": [("user", "Grüße an 🐉")],
}  # fmt: skip


def messages(turns):
    return [{"role": role, "content": content} for role, content in turns]


@pytest.mark.parametrize("turns", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_text_is_hugging_faces(turns, add_generation_prompt):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(ZOO / "storyteller").apply_chat_template(
        messages(turns), tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert (
        ChatTemplate.from_pretrained("storyteller").render(messages(turns), add_generation_prompt) == theirs
    )


# What templates of known models do: special tokens, tojson, loop controls, a date, attributes of a message.
SOURCES = {
    "bos and loop": "{{ bos_token }}{% for m in messages %}{% if m.role == 'x' %}{% continue %}{% endif %}"
    "[{{ loop.index0 }}{{ m['content'] | trim }}]{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "tojson, in order and close": "{{ messages | tojson(sort_keys=true, separators=(',', ':')) }}"
    "{{ messages | tojson(true, none, ('; ', '=')) }}",
    "trimmed blocks": "{% if messages %}\n    {% for m in messages %}\nA{{ m.content }}\n    {% endfor %}\n"
    "{% endif %}\n",
    "tools": "{% if tools is defined and tools is none and documents is none %}none{% endif %}",
    "training": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}",
    "generation prompt": "{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}",
}  # fmt: skip


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_other_templates_give_hugging_faces_text_too(source):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(ZOO / "storyteller")
    turns = messages([("user", " <a> & 'b' "), ("x", "left out"), ("user", "ä")])
    want = theirs.apply_chat_template(turns, chat_template=source, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(source, {"bos_token": theirs.bos_token}).render(turns) == want


def test_what_a_template_refuses_is_told_in_its_words():
    template = ChatTemplate.from_pretrained("storyteller")
    with pytest.raises(ChatError, match="role must be system, user or assistant, not tool"):
        template.render(messages([("tool", "x")]))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{{ missing.x }}",
        "{{ messages[0].content | dictsort }}",
    ],
)
def test_a_template_that_reaches_out_of_its_sandbox_or_fails_is_refused(source):
    with pytest.raises(ChatError):
        ChatTemplate(source).render(messages([("user", "Hi")]))


def test_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert ChatTemplate.from_pretrained(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}],'
        ' "eos_token": {"content": "<end>"}}'
    )
    assert ChatTemplate.from_pretrained(tmp_path).render([]) == "D", "of several, the default"
    (tmp_path / "chat_template.jinja").write_text("J{{ eos_token }}")
    assert ChatTemplate.from_pretrained(tmp_path).render([]) == "J<end>", "the file of its own goes first"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(CheckpointError, match="template"):
        ChatTemplate.from_pretrained(tmp_path)


SWALLOWS = "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}"
REVERSES = "{{ messages[-1].content | reverse }}"


@pytest.mark.parametrize("source", [SWALLOWS, REVERSES])
def test_a_message_that_the_template_leaves_out_cannot_go_on(source):
    with pytest.raises(ChatError, match="leaves out the last message"):
        ChatTemplate(source).render(messages([("user", "Hi")]), False, True)


def test_variables_are_the_templates():
    template = ChatTemplate("{{ a }}{{ self }}{{ eos_token }}", {"eos_token": "</s>"})
    assert template.render([], variables={"a": 1, "eos_token": "E"}).startswith("1")
    assert template.render([], variables={"a": 1, "eos_token": "E"}).endswith("E"), "as in Hugging Face"
    assert template.variables >= {"a", "eos_token"}
