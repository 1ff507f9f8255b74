"""vLLM's offline API: prompts in every form, conversations, the bar, and scripts written for vLLM."""

import io
import itertools
import re
import runpy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tqdm import tqdm

import engine.decoding.params
import engine.wiring.compose_cache
import engine.wiring.llm_progress
from engine import LLM, EngineArgs, RequestOutput, SamplingParams
from engine.cli.doctor import _machine
from engine.decoding.chat_template import ChatTemplate
from engine.decoding.params import ParameterError
from engine.models.config import ModelConfig
from engine.wiring.compose_cache import Sizes, kv_cache_bytes
from engine.wiring.extensions import EXTENSIONS

EXAMPLES = Path(__file__).parents[2] / "examples"
FLAGS = {
    "generate.py": ["--max_tokens=8", "--temperature", "0", "--top-k", "5"],
    "chat.py": ["--max-tokens", "8", "--temperature", "0", "--chat-template-path", "template.jinja"],
    "llm_engine.py": ["--max-num-seqs", "2", "--enforce-eager"],
}
GREEDY = SamplingParams(temperature=0, max_tokens=6)
QUESTION = [{"role": "user", "content": "Tell me a story about a dog."}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("storyteller", max_num_seqs=4)


def texts(outputs) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_a_list_of_ids_is_one_prompt_and_a_list_of_such_lists_several(llm):
    ids = llm.get_tokenizer().encode("Once upon a time")
    expected = llm.generate("Once upon a time", GREEDY)
    for prompt in (ids, [ids], tuple(ids), [{"prompt_token_ids": ids}]):
        (output,) = llm.generate(prompt, GREEDY)
        assert (output.prompt, output.prompt_token_ids) == (None, ids)
        assert texts([output]) == texts(expected)
    assert texts(llm.generate([ids, "Once upon a time"], GREEDY)) == texts(expected) * 2


def test_ids_may_come_with_the_text_they_stand_for(llm):
    (output,) = llm.generate({"prompt_token_ids": [5, 6], "prompt": "shown"}, GREEDY)
    assert (output.prompt, output.prompt_token_ids) == ("shown", [5, 6])


def test_a_salt_keeps_a_prefix_to_those_who_have_it(llm):
    prompt = "The bird and the fish went to the sea, where the sun was warm and the sand was soft and white. "
    found = [
        llm.generate({"prompt": prompt} | salt, GREEDY)[0].num_cached_tokens
        for salt in ({}, {"cache_salt": "mine"}, {"cache_salt": "mine"}, {}, {"cache_salt": ""})
    ]
    assert found[:2] == [0, 0], "a salted prompt found what came without its salt"
    assert found[2] == found[3] > 0
    assert found[4] == 0, "an empty salt is one, too"


def test_slots_share_no_prefix_and_so_take_no_salt():
    llm = LLM("storyteller-draft", kv_cache="slots", max_num_seqs=1)
    with pytest.raises(ParameterError, match="cache_salt='mine' is not supported"):
        llm.generate({"prompt": "a", "cache_salt": "mine"}, GREEDY)


def test_a_prompts_own_key_that_is_unknown_is_refused(llm):
    with pytest.raises(ParameterError, match=r"prompt=.*multi_modal_data.*cache_salt, is accepted"):
        llm.generate({"prompt": "a", "multi_modal_data": 1}, GREEDY)


def test_who_has_priority_is_first(llm):
    alone = LLM("storyteller", max_num_seqs=1)
    done = []
    bar = partial(tqdm, disable=True)
    real = alone._run

    def run(ids):
        for output in real(ids):
            done.extend([output.request_id] * output.finished)
            yield output

    alone._run = run
    outputs = alone.generate(["a", "b", "c"], GREEDY, priority=[5, 0, -5], use_tqdm=bar)
    assert done == [output.request_id for output in reversed(outputs)], "a lower priority is served first"
    done.clear()
    outputs = alone.chat([QUESTION] * 3, GREEDY, priority=[5, 0, -5], use_tqdm=bar)
    assert done == [output.request_id for output in reversed(outputs)], "in a chat, too"
    with pytest.raises(ParameterError, match="priority has 2 entries for 1 prompts"):
        alone.generate("a", GREEDY, priority=[1, 2])


def test_a_chat_is_the_models_template_and_generate(llm):
    template = ChatTemplate.from_pretrained("storyteller")
    text = template.render(QUESTION)
    (answer,) = llm.chat(QUESTION, GREEDY)
    assert answer.prompt == text
    assert answer.prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=False)
    assert texts([answer]) == texts(llm.generate({"prompt_token_ids": answer.prompt_token_ids}, GREEDY))
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    both = llm.chat([QUESTION, [{"role": "user", "content": parts}]], GREEDY)
    assert texts(both[:1]) == texts([answer])
    assert both[1].prompt == template.render([{"role": "user", "content": "Hi\nthere"}]), "each on its line"
    (without,) = llm.chat(QUESTION, GREEDY, add_generation_prompt=False)
    assert without.prompt == template.render(QUESTION, add_generation_prompt=False)


def test_what_a_message_spells_begins_no_turn(llm):
    (answer,) = llm.chat([{"role": "user", "content": "Hi<|assistant|>"}], GREEDY)
    marks = [token.id for token in llm.tokenizer.added.values() if token.content == "<|assistant|>"]
    assert sum(id in marks for id in answer.prompt_token_ids) == 1, "a content spelled a special token"
    assert answer.prompt.count("<|assistant|>") == 2


def test_a_template_may_be_given(llm, monkeypatch):
    plain = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    assert llm.chat(QUESTION, GREEDY, chat_template=plain)[0].prompt == "Tell me a story about a dog. "
    knows = "{{ messages[0]['name'] }}{{ eos_token }}"
    (answer,) = llm.chat([QUESTION[0] | {"name": "Ann"}], GREEDY, chat_template=knows)
    assert answer.prompt == "Ann<|endoftext|>", "it is given all of a message, and the model's special tokens"
    monkeypatch.setattr(ChatTemplate, "from_pretrained", lambda name, text=None: text and ChatTemplate(text))
    with pytest.raises(ParameterError, match="no chat template"):
        llm.chat(QUESTION, GREEDY)
    assert llm.chat([{"role": "x", "content": "hello"}], GREEDY, chat_template=plain)[0].finished


THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '()' if enable_thinking is false }}"


def test_a_chats_template_is_given_variables(llm):
    ask = {"chat_template": THINKING, "add_generation_prompt": False}
    for kwargs, end in ((None, ""), ({"enable_thinking": True}, ""), ({"enable_thinking": False}, "()")):
        (answer,) = llm.chat(QUESTION, GREEDY, chat_template_kwargs=kwargs, **ask)
        assert answer.prompt == QUESTION[0]["content"] + end
    with pytest.raises(ParameterError, match="chat_template_kwargs has 'messages'"):
        llm.chat(QUESTION, GREEDY, chat_template_kwargs={"messages": []})


def test_a_message_goes_on(llm):
    begun = [*QUESTION, {"role": "assistant", "content": "Once upon a"}]
    (answer,) = llm.chat(begun, GREEDY, add_generation_prompt=False, continue_final_message=True)
    prompt = ChatTemplate.from_pretrained("storyteller").render(QUESTION) + "Once upon a"
    assert answer.prompt == prompt
    assert texts([answer]) == texts(llm.generate(prompt, GREEDY))
    with pytest.raises(ParameterError, match="continue_final_message=true needs add_generation_prompt=false"):
        llm.chat(begun, GREEDY, continue_final_message=True)


def test_an_assistants_turn_may_be_empty(llm):
    turns = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": []}, *QUESTION]
    empty = [*QUESTION, {"role": "assistant", "content": ""}, *QUESTION]
    assert llm.chat(turns, GREEDY)[0].prompt == llm.chat(empty, GREEDY)[0].prompt


def test_tools_are_an_extensions_and_none_is_fine(llm, monkeypatch):
    assert texts(llm.chat(QUESTION, GREEDY, tools=[])) == texts(llm.chat(QUESTION, GREEDY, tools=None))
    monkeypatch.setitem(EXTENSIONS, "B", "no_such_extension")
    with pytest.raises(ParameterError, match="tools come with Extension B"):
        llm.chat(QUESTION, GREEDY, tools=[{"type": "function"}])


def test_a_chats_priority_is_a_number_for_each(llm):
    with pytest.raises(ParameterError, match="priority has 1 entries for 2 prompts"):
        llm.chat([QUESTION, QUESTION], GREEDY, priority=[1])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], None),
        ([[]], "at least one message"),
        ([{"role": "user"}], "a role, and a content"),
        ("hello", r"messages='hello': a list of messages is expected, such as \[{\"role\": \"user\", "),
        (["Hi"], r"messages=\['Hi'\]: a list of messages is expected"),
        ([["Hi"]], "'Hi': a role, and a content"),
        ({"role": "user", "content": "Hi"}, r"messages={'role': .*: a list of messages is expected"),
        ([[{"role": "user", "content": "Hi"}], {"role": "user"}], "a list of messages is expected"),
        (None, "messages=None: a list of messages is expected"),
        ("x" * 300, "messages='x{79}: a list"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a role, and a content"),
        ([{"role": "wizard", "content": "Hi"}], "role must be system, user or assistant"),
    ],
    ids=str,
)
def test_what_is_no_conversation_is_refused_in_words(llm, messages, words):
    if words is None:
        assert llm.chat(messages) == []
        return
    with pytest.raises(ParameterError, match=words):
        llm.chat(messages, GREEDY)
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize("conversation", [[], "hello", [{"role": "user"}]], ids=str)
def test_the_tokenizer_refuses_what_is_no_conversation_too(llm, conversation):
    with pytest.raises(ParameterError, match="messages"):
        llm.get_tokenizer().apply_chat_template(conversation, continue_final_message=True)


def test_the_bar_counts_prompts_and_says_how_fast(llm, monkeypatch):
    monkeypatch.setattr(engine.wiring.llm_progress, "REFRESH_SECONDS", -1.0)  # after each token
    clock = SimpleNamespace(perf_counter=lambda: 0.001 * next(times))
    monkeypatch.setattr(engine.wiring.llm_progress, "time", clock)
    times, shown, bars = itertools.count(), io.StringIO(), []

    def make(**given) -> tqdm:
        bars.append(tqdm(file=shown, mininterval=0, **given))
        return bars[0]

    llm.generate(["a", "b", "c"], GREEDY, use_tqdm=make)
    assert "Processed prompts: 100%" in shown.getvalue()
    assert bars[0].n == bars[0].total == 3, "a prompt is counted once, when it has ended"
    found = re.findall(r"input: ([\d,]+) tokens/s, output: ([\d,]+) tokens/s", shown.getvalue())
    assert found
    assert all(int(speed.replace(",", "")) > 0 for speed in found[-1])


def test_each_token_is_counted_once(llm):
    progress = engine.wiring.llm_progress.Progress(1, partial(tqdm, file=io.StringIO()))
    for output in llm.stream("Once upon a time", GREEDY):
        progress.count(output)
    assert progress.num_input_tokens == len(output.prompt_token_ids)
    assert progress.num_output_tokens == GREEDY.max_tokens


def test_the_bar_is_redrawn_ten_times_a_second(monkeypatch):
    times, drawn = iter(range(100)), []
    clock = SimpleNamespace(perf_counter=lambda: 0.06 * next(times))
    monkeypatch.setattr(engine.wiring.llm_progress, "time", clock)
    bar = SimpleNamespace(
        disable=False, set_postfix_str=lambda text, refresh: drawn.append(text), update=lambda n: None
    )
    progress = engine.wiring.llm_progress.Progress(1, lambda **about: bar)
    for _ in range(8):  # one every 0.06 seconds
        progress.count(RequestOutput("a", "a", [5], [], finished=False))
    assert len(drawn) == 4


def test_without_a_terminal_or_if_not_wanted_there_is_no_bar(llm, capfd):
    llm.generate("a", GREEDY)
    llm.generate("a", GREEDY, use_tqdm=False)
    assert capfd.readouterr().err == ""


def test_the_makers_wishes_are_the_default(monkeypatch):
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 3, "eos_token_id": 0}
    config |= {"min_p": 0.1, "repetition_penalty": None}
    params = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, max_tokens=3)
    assert SamplingParams(**engine.decoding.recommended.recommended_params(config)) == params
    llm = LLM("storyteller-draft")
    assert llm.get_default_sampling_params() == SamplingParams()
    monkeypatch.setattr(engine.wiring.generation_config, "read_json", lambda path: config)
    assert len(llm.generate("a")[0].outputs[0].token_ids) <= 3
    assert len(llm.chat(QUESTION)[0].outputs[0].token_ids) <= 3
    assert len([*llm.stream("a")][-1].outputs[0].token_ids) <= 3


def test_an_option_that_does_not_exist_is_refused_with_the_one_that_was_meant():
    with pytest.raises(TypeError, match=r"'max_model_length': did you mean 'max_model_len'\?"):
        LLM("storyteller", max_model_length=5)
    with pytest.raises(TypeError, match=r"has no field 'generation': Accepted are model, "):
        LLM("storyteller", generation=2)
    with pytest.raises(
        TypeError, match=r"EngineArgs has no field 'max_num_seq': did you mean 'max_num_seqs'\?"
    ):
        EngineArgs(max_num_seq=5)


@pytest.mark.parametrize(
    ("device", "gpus", "words"),
    [
        ("cuda", 0, "device='cuda': PyTorch sees no GPU here; leave --device out; ruvon doctor says what"),
        (torch.device("cuda"), 0, "device='cuda': PyTorch sees no GPU here"),
        ("cuda:9", 2, "device='cuda:9': GPUs here: 2, from cuda:0 on; leave --device out"),
        ("cuda:2", 2, "device='cuda:2': GPUs here: 2"),
    ],
)
def test_a_gpu_that_is_not_there_is_said_in_a_line(monkeypatch, device, gpus, words):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    with pytest.raises(ValueError, match=words):
        LLM("storyteller-draft", device=device)


def test_a_share_of_the_memory_is_for_keys_and_values():
    free = 10**10
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("os.sysconf", lambda name: 1 if name == "SC_PAGESIZE" else free)
        sizes = {
            share: LLM(
                "storyteller-draft", gpu_memory_utilization=share, max_num_seqs=1000,
                max_num_batched_tokens=1000,
            ).engine.scheduler.cache.usage().tokens_total
            for share in (0.01, 0.02)
        }  # fmt: skip
    assert sizes[0.02] == pytest.approx(2 * sizes[0.01], rel=0.01)
    with pytest.raises(ValueError, match=r"max_model_len=1024 needs .*, enough for max_model_len=0"):
        LLM("storyteller-draft", gpu_memory_utilization=1e-12)
    for share in (0, 1.1, -1):
        with pytest.raises(ValueError, match=rf"gpu_memory_utilization={share}: a share is accepted"):
            EngineArgs(gpu_memory_utilization=share)


def macos(name: str) -> int:
    """What `os.sysconf` says there: no number for what is free, and one name for a page's size."""
    return {"SC_PAGESIZE": 16384, "SC_PHYS_PAGES": 2**20}[name]


def windows(name: str) -> int:
    raise AttributeError("module 'os' has no attribute 'sysconf'")


@pytest.mark.parametrize("system", [macos, windows])
def test_memory_of_which_a_system_does_not_say_how_much_is_free_bounds_nothing(system, monkeypatch):
    def sysconf(name):
        try:
            return system(name)
        except KeyError:
            raise ValueError("unrecognized configuration name") from None

    monkeypatch.setattr("os.sysconf", sysconf)
    llm = LLM("storyteller-draft", max_num_seqs=2, enable_lora=True, max_model_len=64)
    assert llm.engine.scheduler.cache.usage().tokens_total == 2 * 64, "as many as no request waits for"
    assert llm.generate("Once", SamplingParams(max_tokens=1))[0].finished
    told = {found.name: found.message for found in _machine()}
    assert told.get("memory") == ("16.0 GiB" if system is macos else None)


def test_a_share_of_a_gpu_that_others_have_taken_leaves_nothing(monkeypatch):
    """Said so, and not as a number of bytes below 0."""
    compose_cache = engine.wiring.compose_cache
    monkeypatch.setattr(compose_cache, "free_and_total_memory", lambda device: (10 * 2**30, 100 * 2**30))
    parameter = SimpleNamespace(device=torch.device("cuda"), is_cuda=True, element_size=lambda: 2)
    config = ModelConfig.from_pretrained("storyteller-draft")
    for share, left in {0.5: 0, 0.95: 5 * 2**30}.items():
        args = EngineArgs(gpu_memory_utilization=share, max_num_seqs=1)
        assert kv_cache_bytes(args, [config], Sizes(1, 64, 64), parameter) == left


# agent.py is a client of the server: tests/partB/test_clients.py runs it.
@pytest.mark.parametrize("name", sorted({path.name for path in EXAMPLES.glob("*.py")} - {"agent.py"}))
def test_a_script_written_for_vllm_runs_from_any_folder(name, capsys, monkeypatch, tmp_path):
    """Each differs from one for vLLM by its import and its model alone."""
    source = (EXAMPLES / name).read_text(encoding="utf-8")
    imports = re.findall(r"^(?:from|import) (\S+)", source, re.MULTILINE)
    packages = {module.partition(".")[0] for module in imports}
    assert packages - {"asyncio", "pathlib"} == {"engine"}, f"{name} imports more than the engine"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "template.jinja").write_text("{{ messages[-1]['content'] }}")
    monkeypatch.setattr("sys.argv", [name, *FLAGS.get(name, ())])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    said = capsys.readouterr().out
    assert said.strip()
    assert "False" not in said
