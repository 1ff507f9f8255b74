"""Conversations as Llama 3, Qwen3 and TinyLlama write them down: text and ids are Hugging Face's.

The templates are written in this project's words, and use what those models' own use: macros, namespaces,
slices, methods of strings, dates, and a thinking part that is left out of past answers.
"""

import json
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, normalizers
from transformers import PreTrainedTokenizerFast

from engine.decoding.chat_template import ChatError, ChatTemplate, chat_prompt, guarded
from engine.text.tokenizer import Tokenizer
from tests.part01.test_tokenizer_kinds import LLAMA3, QWEN, train
from tests.part20.sentencepiece import tokenizer_json

LLAMA3_TEMPLATE = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "22 Nov 2026" if strftime_now("%Y") | length == 4 else "?" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{%- if tools is not none %}{{- raise_exception("no tools here") }}{%- endif %}
{%- macro header(role) %}{{- "<|start_header_id|>" + role + "<|end_header_id|>\\n\\n" }}{%- endmacro %}
{{- header("system") + "Today: " + date_string + "\\n\\n" + system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not message.role in ("user", "assistant") %}
        {{- raise_exception("only user and assistant may speak, not " + message.role) }}
    {%- endif %}
    {{- header(message['role']) + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- header("assistant") }}
{%- endif %}
"""
QWEN3_TEMPLATE = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string
           and not (message.content.startswith('<answer>') and message.content.endswith('</answer>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content, thought = message.content, '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
TINYLLAMA_TEMPLATE = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""


def added(*contents: str) -> list[AddedToken]:
    return [AddedToken(content, special=True, normalized=False) for content in contents]


def llama3() -> str:
    theirs = train(pattern=LLAMA3, begin=True, ignore_merges=True)
    theirs.add_tokens(added("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"))
    return theirs.to_str()


def qwen3() -> str:
    theirs = train(pattern=QWEN, normalizer=normalizers.NFC())
    theirs.add_tokens(added("<|im_start|>", "<|im_end|>"))
    return theirs.to_str()


MODELS = {
    "llama3": (LLAMA3_TEMPLATE, llama3, {"bos_token": "<|begin|>", "eos_token": "<|eot_id|>"}),
    "qwen3": (QWEN3_TEMPLATE, qwen3, {"eos_token": "<|im_end|>"}),
    "tinyllama": (
        TINYLLAMA_TEMPLATE,
        lambda: json.dumps(tokenizer_json("llama 2")),
        {"bos_token": "<s>", "eos_token": "</s>"},
    ),
}
CONVERSATIONS = {
    "a question": [("user", "Tell me a story.")],
    "a system prompt": [("system", " Be brief. "), ("user", "Hi"), ("assistant", "\n\nYes!"), ("user", "a")],
    "a thought, past": [("user", "a"), ("assistant", "<think>\nhm\n</think>\n\nb"), ("user", "c")],
    "a thought, last": [("user", "a"), ("assistant", "<think>\nhm\n</think>\n\nb")],
    "no ascii": [("user", "Grüße an 🐉, cafe\u0301!\n\tÜber  zwei")],
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """(theirs, our tokenizer, our template), from the same folder."""
    template, make, tokens = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "tokenizer.json").write_text(make(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens | {"chat_template": template}))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **tokens)
    theirs.chat_template = template
    return theirs, Tokenizer.from_pretrained(folder), ChatTemplate.from_pretrained(folder)


def messages(turns) -> list[dict]:
    return [{"role": role, "content": content} for role, content in turns]


@pytest.mark.parametrize("turns", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_text_and_ids_are_hugging_faces(model, turns, add_generation_prompt):
    theirs, tokenizer, template = model
    options = {"add_generation_prompt": add_generation_prompt}
    text = template.render(messages(turns), **options)
    assert text == theirs.apply_chat_template(messages(turns), tokenize=False, **options)
    ids = theirs.apply_chat_template(messages(turns), tokenize=True, return_dict=False, **options)
    assert tokenizer.encode(text, add_special_tokens=False) == ids


def test_who_ends_a_turn_inside_a_message_ends_none(model):
    theirs, tokenizer, template = model
    end = theirs.eos_token
    special = [token.content for token in tokenizer.added.values() if token.special]
    given = messages([("user", f"Hi{end}bye")])
    safe, guard = guarded(given, special)
    ids = tokenizer.encode(template.render(safe), add_special_tokens=False, guard=guard)
    plain = tokenizer.encode(template.render(messages([("user", "Hi")])), add_special_tokens=False)
    assert ids.count(tokenizer.eos_token_id) == plain.count(tokenizer.eos_token_id) > 0
    assert f"Hi{end}bye" in tokenizer.decode(ids)


def test_a_refusal_is_in_the_templates_words():
    template = ChatTemplate(LLAMA3_TEMPLATE, {"bos_token": "<|begin|>"})
    with pytest.raises(ChatError, match="only user and assistant may speak, not tool"):
        template.render(messages([("user", "a"), ("tool", "b")]))


@pytest.mark.parametrize("turns", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("end", ["", "  ", "\n"])
def test_a_message_that_goes_on_is_hugging_faces(model, turns, end):
    """The last message stays open; spaces at its end stay if the template leaves them."""
    theirs, _, template = model
    (*before, (role, content)) = turns
    open_turns = messages([*before, (role, content + end)])
    options = {"add_generation_prompt": False, "continue_final_message": True}
    text = template.render(open_turns, **options)
    assert text == theirs.apply_chat_template(open_turns, tokenize=False, **options)
    assert text.rstrip().endswith(content.strip().removeprefix("<think>\nhm\n</think>\n\n"))


def test_special_tokens_around_the_text_only_if_asked_for(model):
    theirs, tokenizer, template = model
    config = SimpleNamespace(max_positions=1000, vocab_size=len(tokenizer.added) + 100_000)
    ids = [
        chat_prompt(messages([("user", "a")]), template, tokenizer, config, add_special_tokens=add)[1]
        for add in (False, True)
    ]
    text = template.render(messages([("user", "a")]))
    assert ids == [theirs.encode(text, add_special_tokens=add) for add in (False, True)]


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_qwen3_is_told_whether_to_think(enable_thinking):
    template = ChatTemplate(QWEN3_TEMPLATE)
    text = template.render(messages([("user", "a")]), variables={"enable_thinking": enable_thinking})
    assert text.endswith("<|im_start|>assistant\n" + ("" if enable_thinking else "<think>\n\n</think>\n\n"))
    assert "enable_thinking" in template.variables
    assert "date_string" in ChatTemplate(LLAMA3_TEMPLATE).variables, "read, although the template may set it"
