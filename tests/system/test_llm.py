"""`LLM`: a vLLM user's script, and what it takes and refuses."""

import gc
import shutil
from itertools import pairwise, zip_longest

import pytest
import torch

from engine import LLM, CheckpointError, RequestOutput, SamplingParams
from engine.decoding.params import ParameterError
from engine.machine.collector import NEW_OBJECTS
from tests.part01 import reference


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("storyteller")


def greedy(**settings) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 20} | settings)


def test_a_vllm_users_script_runs(llm):
    prompts = ["Once upon a time", "The little cat"]
    sampling_params = SamplingParams(temperature=0, max_tokens=12)
    outputs = llm.generate(prompts, sampling_params)
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        assert isinstance(output, RequestOutput)
        assert output.finished
        assert output.outputs[0].text
        assert len(output.outputs[0].token_ids) == 12
    assert len({output.request_id for output in outputs}) == 2


def test_tokens_equal_hugging_faces_with_packed_weights_and_cache(llm):
    theirs = reference.load("storyteller")
    (output,) = llm.generate("One day, Tim found a", greedy(max_tokens=120))
    assert output.outputs[0].token_ids == reference.generate(
        theirs, output.prompt_token_ids, max_new_tokens=120
    )


def test_a_prompt_is_a_text_a_dict_or_a_list_of_them(llm):
    text = "Once upon a time"
    ids = llm.tokenizer.encode(text)
    forms = [text, {"prompt": text}, {"prompt_token_ids": ids}]
    expected = llm.generate(text, greedy())[0].outputs[0].token_ids
    outputs = llm.generate(forms, greedy())
    assert [output.outputs[0].token_ids for output in outputs] == [expected] * 3
    assert [output.prompt_token_ids for output in outputs] == [ids] * 3
    assert [output.prompt for output in outputs] == [text, text, None]
    assert llm.generate({"prompt_token_ids": ids}, greedy())[0].outputs[0].token_ids == expected
    assert llm.generate([]) == []


def test_each_prompt_may_have_its_own_params(llm):
    outputs = llm.generate(["a", "b"], [greedy(max_tokens=3), greedy(max_tokens=5)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5]
    assert len(llm.generate("a")[0].outputs[0].token_ids) <= 16


def test_params_and_prompts_must_be_as_many(llm):
    with pytest.raises(ParameterError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], [greedy()])


@pytest.mark.parametrize("prompt", [5.5, {"text": "a"}, ["a", 5], None])
def test_a_prompt_of_another_kind_is_refused(llm, prompt):
    with pytest.raises(ParameterError, match="prompt"):
        llm.generate([prompt], greedy())
    with pytest.raises(ParameterError, match="prompt"):
        llm.generate(prompt, greedy())


@pytest.mark.parametrize(("name", "given"), [
    ("sampling_params", {"max_tokens": 3}),
    ("sampling_params", [{"max_tokens": 3}]),
    ("sampling_params", 0.7),
    ("priority", 1.5),
    ("priority", ["first"]),
    ("lora_request", "adapters/poetry"),
    ("lora_request", [7]),
])  # fmt: skip
def test_what_is_given_for_a_prompt_is_of_the_kind_that_is_accepted(llm, name, given):
    with pytest.raises(ParameterError, match=f"{name}=.*(SamplingParams|int|LoRARequest) is accepted"):
        llm.generate("a", **{name: given})


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "word " * 2000,
        {"prompt_token_ids": [4096]},
        {"prompt_token_ids": "hello"},
        {"prompt": [1, 2]},
        {"prompt": {"prompt": "hi", "cache_salt": "s"}},  # whose salt would be lost
        {"cache_salt": "s"},
        b"hello",  # whole numbers to Python
        bytearray(b"hello"),
    ],
)
def test_a_prompt_that_cannot_be_run_is_refused(llm, prompt):
    with pytest.raises(ParameterError, match="prompt"):
        llm.generate(prompt, greedy())


def test_log_probabilities_of_prompt_and_output_are_hugging_faces(llm):
    params = greedy(logprobs=3, prompt_logprobs=0, max_tokens=8)
    (output,) = llm.generate("One day, Tim found a", params)
    told, sample = output.prompt_token_ids, output.outputs[0]
    ids = torch.tensor([[*told, *sample.token_ids]])
    with torch.inference_mode():
        expected = reference.load("storyteller")(ids).logits[0].log_softmax(-1)  # [T, V]
    assert output.prompt_logprobs[0] is None
    for i, token_id in enumerate([*told, *sample.token_ids][1:]):
        scores = [*output.prompt_logprobs[1:], *sample.logprobs][i]
        assert scores[token_id].logprob == pytest.approx(float(expected[i, token_id]), abs=1e-4)
    assert [len(scores) for scores in sample.logprobs] == [3] * 8
    assert sample.cumulative_logprob == pytest.approx(
        sum(scores[id].logprob for id, scores in zip(sample.token_ids, sample.logprobs, strict=True))
    )


@pytest.mark.parametrize("value", [-1, 21, True, "5"])
@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_a_number_of_log_probabilities_that_is_none_is_refused(llm, field, value):
    with pytest.raises(ParameterError, match=rf"{field}=.*from 0 to 20"):
        llm.generate("a", SamplingParams(**{field: value}))


def test_a_seed_gives_the_same_samples_alone_and_in_a_batch(llm):
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=5, n=2, max_tokens=20)
    alone = llm.generate("The dog", params)[0]
    among = llm.generate(["A bird", "The dog"], [greedy(), params])[1]
    assert [sample.text for sample in alone.outputs] == [sample.text for sample in among.outputs]
    assert alone.outputs[0].text != alone.outputs[1].text


def test_streamed_pieces_joined_are_the_generated_text(llm):
    params = greedy(max_tokens=60, stop=["park"])
    text = llm.generate("Once upon a time", params)[0].outputs[0].text
    outputs = list(llm.stream("Once upon a time", params))
    texts = [output.outputs[0].text for output in outputs]
    assert texts[-1] == text
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_requests_do_not_hear_of_each_other(llm):
    alone = llm.generate("The dog", greedy())[0].outputs[0].token_ids
    first, second = llm.stream("The dog", greedy()), llm.stream("A bird", greedy(max_tokens=3))
    for output, _ in zip_longest(first, second):
        if output:
            tokens = output.outputs[0].token_ids
            assert tokens == alone[: len(tokens)]
    assert tokens == alone
    assert not llm.engine.has_unfinished_requests()


def test_a_stream_left_early_leaves_nothing_behind(llm):
    streams = [llm.stream("The dog", greedy(max_tokens=50)) for _ in range(2)]
    for stream in (*streams, *streams):  # a step for one of them is a step for both
        next(stream)
    for stream in streams:
        stream.close()
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.scheduler.cache.usage().num_sequences == 0
    assert not llm._inbox, "an output is kept whose reader has left"


def test_while_steps_run_the_collector_is_asked_less_often_and_then_as_before(llm, monkeypatch):
    """By `generate`, whether it fails or not, and by `stream`, but not while its reader has the word."""
    before, seen, submit = gc.get_threshold(), [], llm.engine.executor.submit

    def submitting(batch):
        seen.append(gc.get_threshold()[0])
        if len(seen) == 9:
            raise OSError("the power is out")
        return submit(batch)

    monkeypatch.setattr(llm.engine.executor, "submit", submitting)
    gc.set_threshold(500, 7, 7)
    try:
        llm.generate(["The dog", "The cat"], greedy(max_tokens=4))
        assert gc.get_threshold() == (500, 7, 7)
        for _ in (streams := [llm.stream("The dog", greedy(max_tokens=9)) for _ in range(2)]):
            next(streams[0]), next(streams[1])
            assert gc.get_threshold() == (500, 7, 7), "two streams at once put it back"
        for stream in streams:
            stream.close()
        with pytest.raises(RuntimeError, match="the power is out"):
            llm.generate("The dog", greedy(max_tokens=9))
        assert gc.get_threshold() == (500, 7, 7)
    finally:
        gc.set_threshold(*before)
    assert len(seen) >= 9
    assert set(seen) == {NEW_OBJECTS}


def test_a_step_that_failed_is_an_error_and_the_next_call_is_answered(llm, monkeypatch):
    def fail(batch):
        raise OSError("the power is out")

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.executor, "submit", fail)
        with pytest.raises(RuntimeError, match=r"request \d+ failed: .*the power is out"):
            llm.generate(["The dog", "The cat"], greedy())
    assert not llm.engine.has_unfinished_requests()
    assert llm.generate("The dog", greedy())[0].finished


def test_a_folder_and_another_tokenizer_may_be_named(tiny_gpt2, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_gpt2 / name, tmp_path)
    llm = LLM(tmp_path, tokenizer="storyteller-draft", dtype="float32", device="cpu")
    assert len(llm.generate("hello", greedy(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids) == 4
    (answer,) = llm.chat([{"role": "user", "content": "hello"}], greedy(max_tokens=1))
    assert "hello" in answer.prompt, "its chat template comes with it"


def test_a_model_that_is_not_there_is_named():
    with pytest.raises(CheckpointError, match="no-such-model"):
        LLM("no-such-model")


def test_one_step_ahead_nothing_is_in_flight_when_an_answer_is_there():
    """A stop string and a reader who leaves are found out one step late."""
    llm = LLM("storyteller", async_scheduling=True, max_num_seqs=2)
    text = llm.generate("The dog", greedy(max_tokens=20))[0].outputs[0].text
    stopped = llm.generate("The dog", greedy(max_tokens=20, stop=(text[10:14],)))[0].outputs[0]
    assert text.startswith(stopped.text)
    assert not llm.engine.has_unfinished_requests(), "a step is still in flight"
    next(stream := llm.stream("The dog", greedy(max_tokens=20)))
    stream.close()
    assert not llm.engine.has_unfinished_requests(), "a step is still in flight"
