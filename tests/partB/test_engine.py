"""Outputs that fit, from a whole engine: the same whatever else it does, and nobody else's concern."""

import gc
import json
import re
import weakref

import pytest

from engine import EngineArgs, SamplingParams
from engine.decoding.params import ParameterError
from engine.decoding.structured import StructuredOutputsParams
from engine.lora.adapter import read_adapter
from engine.speculation.measuring import ALWAYS_DRAFT
from engine.structured import automaton
from engine.wiring.compose import build_engine
from tests.system.ready import ROOT

ALWAYS = {"num_speculative_tokens": 3, "step_times": ALWAYS_DRAFT.as_dict()}
NGRAM = {"method": "ngram", "prompt_lookup_min": 1} | ALWAYS
DRAFT = {"model": "storyteller-draft"} | ALWAYS
PROMPT = "Once upon a time, there was a dog and a dog"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"enum": [1, 22, 333]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
STORY = " (The|A) [a-z]{2,8} (was|and) [a-z ]{5,30}\\."


def fits(**constraint) -> StructuredOutputsParams:
    return StructuredOutputsParams(**constraint)


CHOICE = ["yes", "no", " a cat", " a dog"]
LARK = """start: (" b" | " c") " a" " dog"?"""
ASKED = {
    "three": (
        {"structured_outputs": fits(choice=CHOICE), "n": 4, "temperature": 1.5, "seed": 3},
        "yes|no| a cat| a dog",
    ),
    "greedy": ({"structured_outputs": fits(regex=STORY), "temperature": 0, "logprobs": 2}, STORY),
    "schema": (
        {"structured_outputs": fits(json=PERSON, disable_any_whitespace=True), "seed": 3},
        r'\{"name":"(\\?.){0,6}","age":(1|22|333)\}',
    ),
    "grammar": ({"structured_outputs": fits(grammar=LARK), "seed": 1}, " [bc] a( dog)?"),
    "continued": (
        {"structured_outputs": fits(regex=STORY, prefix=" The dog wa"), "seed": 5, "temperature": 0.8},
        "s [a-z ]{5,30}\\.",
    ),
    "poetry": ({"structured_outputs": fits(regex=STORY), "temperature": 0.7, "seed": 2}, STORY),
    "words": (
        {"structured_outputs": fits(choice=[" a dog", " a cat"]), "temperature": 0, "bad_words": ["dog"]},
        " a cat",
    ),
    "penalties": (
        {"structured_outputs": fits(regex="[ab]{10}"), "temperature": 0, "frequency_penalty": 1.5},
        "[ab]{10}",
    ),
    "free": ({"temperature": 0, "logprobs": 1, "ignore_eos": True}, None),
    "free, drawn": ({"temperature": 0.8, "seed": 4}, None),
}


def engine_of(**options):
    args = {
        "model": "storyteller",
        "device": "cpu",
        "max_num_seqs": 12,
        "max_num_batched_tokens": 24,
    } | options
    return build_engine(EngineArgs(**args))


def ask(engine, name, prompt=PROMPT, **params):
    adapter = name if name == "poetry" else None
    engine.add_request(name, prompt, SamplingParams(**{"max_tokens": 40} | params), adapter=adapter)


def ends(engine) -> dict:
    """Each request's last output."""
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return done


def told(names=tuple(ASKED), **options) -> dict:
    engine = engine_of(enable_lora=True, **options)
    engine.adapters.load("poetry", read_adapter(ROOT / "adapters" / "poetry", engine.config))
    for name in names:
        ask(engine, name, **ASKED[name][0])
    return ends(engine)


def one(engine, **params):
    """The output of a request alone."""
    ask(engine, "one", **params)
    return ends(engine)["one"]


@pytest.fixture(scope="module")
def plain() -> dict:
    return told()


@pytest.fixture(scope="module")
def engine():
    return engine_of()


def test_what_must_fit_fits(plain):
    for name, (_, pattern) in ASKED.items():
        assert plain[name].error is None
        for sample in plain[name].outputs:
            if pattern is not None:
                assert sample.finish_reason == "stop", f"{name}: {sample.text!r}"
                assert re.fullmatch(pattern, sample.text), f"{name}: {sample.text!r}"
    assert len({sample.text for sample in plain["three"].outputs}) > 1, "samples have seeds of their own"
    assert json.loads(plain["schema"].outputs[0].text)["age"] in (1, 22, 333)


def test_others_in_the_batch_say_what_they_say_alone(plain):
    alone = told([name for name in ASKED if name.startswith("free")])
    for name, output in alone.items():
        assert output.outputs[0].token_ids == plain[name].outputs[0].token_ids


@pytest.mark.parametrize("ahead", [False, True], ids=["one at a time", "one ahead"])
@pytest.mark.parametrize("speculative", [None, NGRAM, DRAFT], ids=["plain", "n-grams", "draft model"])
def test_steps_ahead_drafts_scores_and_adapters_change_nothing(plain, ahead, speculative):
    for name, output in told(async_scheduling=ahead, speculative_config=speculative).items():
        for sample, wanted in zip(output.outputs, plain[name].outputs, strict=True):
            assert sample.token_ids == wanted.token_ids, name
            for score, other in zip(sample.logprobs or (), wanted.logprobs or (), strict=True):
                assert score.logprob == pytest.approx(other.logprob, abs=1e-4), "raw: before the mask"


def test_both_backends_say_the_same():
    """Draws are a function of a row's probabilities, so equal masks give equal tokens."""
    names = ("three", "greedy", "continued", "poetry", "words", "penalties")
    ours, theirs = (
        told(names, structured_outputs_config={"backend": backend}) for backend in ("ruvon", "guidance")
    )
    for name in names:
        assert [s.token_ids for s in ours[name].outputs] == [s.token_ids for s in theirs[name].outputs], name


def test_a_preempted_request_goes_on_where_it_was(plain):
    engine = engine_of(kv_cache_memory_bytes=1_600_000, max_model_len=128)
    long = {"structured_outputs": fits(regex="( [a-z]{2,9}){25}\\."), "temperature": 0, "max_tokens": 100}
    requests = [engine.make_requests(f"r{i}", PROMPT + " ." * i, SamplingParams(**long))[0] for i in range(6)]
    alone = [one(engine, prompt=PROMPT + " ." * i, **long).outputs[0].token_ids for i in range(6)]
    for request in requests:
        engine.add(request.request_id, [request], PROMPT)
    done = ends(engine)
    assert any(request.num_preemptions for request in requests), "no memory was short: nothing was tried"
    assert [done[f"r{i}"].outputs[0].token_ids for i in range(6)] == alone


def test_a_cached_prefix_changes_nothing(engine):
    asked = {"structured_outputs": fits(regex=STORY), "temperature": 0}
    prompt = f"{PROMPT} and a cat. They went to the park and saw a bird. The bird was blue, and"
    first, second = one(engine, prompt=prompt, **asked), one(engine, prompt=prompt, **asked)
    assert second.num_cached_tokens > 0
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_what_max_tokens_cuts_off_could_still_fit(engine):
    (sample,) = one(engine, structured_outputs=fits(choice=[" a dog and a cat"]), max_tokens=3).outputs
    assert sample.finish_reason == "length"
    assert " a dog and a cat".startswith(sample.text)


def test_a_stop_string_ends_the_output_before_it_fits(engine):
    (sample,) = one(engine, structured_outputs=fits(choice=[" a dog and a cat"]), stop=" and").outputs
    assert (sample.text, sample.finish_reason, sample.stop_reason) == (" a dog", "stop", " and")


def test_with_ignore_eos_nothing_but_the_end_follows_the_end(engine):
    asked = {"structured_outputs": fits(choice=[" a dog"]), "ignore_eos": True, "max_tokens": 9}
    (sample,) = one(engine, **asked).outputs
    assert (sample.text, sample.finish_reason) == (" a dog", "length")
    assert sample.token_ids[-3:] == [engine.config.eos_token_ids[0]] * 3


def test_allowed_token_ids_and_the_constraint_both_hold(engine):
    token_ids = [engine.tokenizer.encode(text)[0] for text in ("a", "c")] + [*engine.config.eos_token_ids]
    asked = {"structured_outputs": fits(regex="[ab]{4}"), "allowed_token_ids": token_ids}
    assert one(engine, **asked).outputs[0].text == "aaaa"


@pytest.mark.parametrize(
    "other", [{"min_tokens": 30}, {"allowed_token_ids": [7]}, {"bad_words": ["yes"], "temperature": 0}]
)
def test_a_request_whose_fields_leave_no_token_fails_alone_and_says_so(engine, other):
    ask(engine, "contradicts itself", structured_outputs=fits(choice=["yes"]), **other)
    ask(engine, "free", temperature=0)
    done = ends(engine)
    assert (
        "no token fits structured_outputs that the other parameters allow" in done["contradicts itself"].error
    )
    assert done["free"].error is None


def test_a_constraint_that_grows_too_large_fails_its_request_alone(monkeypatch):
    monkeypatch.setattr(automaton, "MAX_STATES", 30)
    engine = engine_of(structured_outputs_config={"backend": "ruvon"})
    ask(engine, "large", structured_outputs=fits(regex="x{200}y"))
    ask(engine, "free", temperature=0)
    done = ends(engine)
    assert "needs more than 30 states" in done["large"].error
    assert done["free"].error is None


def test_an_aborted_request_leaves_nothing_behind(engine):
    (request,) = engine.make_requests("gone", PROMPT, SamplingParams(structured_outputs=fits(regex="a+")))
    engine.add("gone", [request], PROMPT)
    for _ in range(3):
        engine.step()
    constraint = weakref.ref(request.constraint)
    engine.abort_request("gone")
    del request
    while engine.has_unfinished_requests():
        engine.step()
    gc.collect()
    assert constraint() is None


def test_a_model_without_an_end_is_refused():
    engine = engine_of()
    engine.capabilities[-1]._eos_ids = ()
    with pytest.raises(ParameterError, match="needs a token that ends an output, and this model has none"):
        one(engine, structured_outputs=fits(regex="a"))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"backend": "xgrammar"}, "backend='xgrammar': accepted are auto, guidance, ruvon"),
        ({"x": 1}, "structured_outputs_config.x is unknown"),
        ({"disable_any_whitespace": 1}, "disable_any_whitespace=1: true or false"),
    ],
)
def test_a_wrong_option_is_refused_by_name(config, says):
    with pytest.raises(ValueError, match=says):
        engine_of(structured_outputs_config=config)


def test_our_own_backend_refuses_what_it_lacks_by_name():
    engine = engine_of(structured_outputs_config={"backend": "ruvon"})
    for constraint in ({"json": {}}, {"json_object": True}, {"grammar": 'start: "a"'}):
        with pytest.raises(
            ParameterError, match=r"needs llguidance .*choice and regex are accepted"
        ) as caught:
            one(engine, structured_outputs=fits(**constraint))
        assert caught.value.field == "structured_outputs"


def test_an_engine_may_leave_out_whitespace_for_all():
    engine = engine_of(structured_outputs_config={"disable_any_whitespace": True})
    text = one(engine, structured_outputs=fits(json=PERSON), temperature=0.9, seed=1).outputs[0].text
    assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
