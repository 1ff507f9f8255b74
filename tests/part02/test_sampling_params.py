"""Which values a request may have, and what is said about the others."""

import copy
import dataclasses
import functools
import inspect
import math
import pickle

import pytest

from engine.decoding.params import ParameterError, RequestOutputKind, SamplingParams
from engine.decoding.refusals import refuse_unknown_tokens, refuse_unsupported
from engine.decoding.structured import StructuredOutputsParams

REFUSED = [
    *[("max_tokens", value) for value in (0, -1, 1.0, "5", True, math.inf)],
    *[("min_tokens", value) for value in (-1, 1.5, False)],
    *[("stop", value) for value in ("", ["a", ""], 5, ["a", 5], {"a"}, b"a")],
    *[("stop_token_ids", value) for value in (5, ["5"], [True], [1.0])],
    *[("ignore_eos", value) for value in (1, "yes")],
    *[("include_stop_str_in_output", value) for value in (0, "")],
    *[("detokenize", value) for value in (0, "no")],
    *[("spaces_between_special_tokens", value) for value in (0, "no")],
    *[("bad_words", value) for value in ("a", [5], ["a", ""], ["  "])],
    *[("allowed_token_ids", value) for value in (5, [], ["5"], [True], [1.0])],
    *[("truncate_prompt_tokens", value) for value in (0, -2, 1.5, True)],
    ("output_kind", RequestOutputKind.DELTA),
    ("structured_outputs", {"choice": ["a"]}),
    ("extra_args", {"a": 1}),
    ("logits_processors", [len]),
    ("logprob_token_ids", [5]),
    ("flat_logprobs", True),
    ("thinking_token_budget", 9),
    *[("skip_special_tokens", value) for value in (1, "no")],
    *[("temperature", value) for value in (-0.1, math.nan, math.inf, "hot", True, 1001)],
    *[("top_k", value) for value in (-2, 1.5)],
    *[("top_p", value) for value in (0, -0.5, 1.1, math.nan)],
    *[("min_p", value) for value in (-0.1, 1.1, math.nan)],
    *[("repetition_penalty", value) for value in (0, -1, math.inf, 1e-320, 101)],
    *[(name, value) for name in ("frequency_penalty", "presence_penalty") for value in (-2.1, 2.1, "1")],
    *[("logit_bias", value) for value in ({"5": 1.0}, {5: 101}, {5: -101}, {5: math.nan}, {5: "1"})],
    *[("logit_bias", value) for value in ([5], {True: 1})],
    *[("seed", value) for value in (1.0, 2**63, -(2**63) - 1, "x", True)],
    *[("n", value) for value in (0, -1, 1.5)],
    *[(name, value) for name in ("logprobs", "prompt_logprobs") for value in (-1, 21, 1.5, True)],
]  # fmt: skip

ACCEPTED = [
    *[("max_tokens", value) for value in (1, 10**6, None)],
    *[("stop", value) for value in ("a", ["a", "bc"], ("a",), [], ["a" * 256] * 16)],
    *[("stop_token_ids", value) for value in ([], [0], (5, 6), [1] * 1024)],
    *[("temperature", value) for value in (0, 0.0, 1, 0.7, 2, None)],
    *[("top_k", value) for value in (-1, 0, 50)],
    *[("top_p", value) for value in (1, 1e-6, 0.9)],
    *[("min_p", value) for value in (0, 0.05, 1)],
    *[("repetition_penalty", value) for value in (0.01, 0.5, 1, 2, 100)],
    *[("frequency_penalty", value) for value in (-2, 0, 2)],
    *[("logit_bias", value) for value in ({}, {5: 100}, {5: -100, 6: 0.5})],
    *[("seed", value) for value in (0, -1, 2**63 - 1)],
    *[("logprobs", value) for value in (0, 20)],
    *[("bad_words", value) for value in ([], [" a"], ["a b"] * 1024)],
    *[("allowed_token_ids", value) for value in ([0], [5, 6])],
    *[("truncate_prompt_tokens", value) for value in (-1, 1, 10**6)],
    *[("spaces_between_special_tokens", value) for value in (True, False)],
    *[("detokenize", value) for value in (True, False)],
    ("output_kind", RequestOutputKind.CUMULATIVE),
    *[("extra_args", {}), ("logits_processors", []), ("logprob_token_ids", [])],
]

TOO_MANY = [("stop", ["a"] * 17, "17 entries"), ("stop", "a" * 257, "257 characters"),
            ("stop_token_ids", [1] * 1025, "1025 entries"),
            ("bad_words", ["a"] * 1025, "1025 entries")]  # fmt: skip

LATER = [
    *[("temperature", 0.7, "Part 5"), ("top_k", 50, "Part 5"), ("top_p", 0.9, "Part 5")],
    ("min_p", 0.1, "Part 5"),
    *[("repetition_penalty", 1.1, "Part 5"), ("frequency_penalty", 0.5, "Part 5")],
    *[("presence_penalty", -0.5, "Part 5"), ("logit_bias", {5: 1.0}, "Part 5"), ("seed", 0, "Part 5")],
    ("allowed_token_ids", [5], "Part 5"),
    *[("n", 2, "Part 5"), ("logprobs", 0, "Part 10"), ("prompt_logprobs", 5, "Part 10")],
    ("structured_outputs", StructuredOutputsParams(choice=["yes", "no"]), "Extension B"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_a_value_out_of_range_is_refused_by_field_and_value(field, value):
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{field: value})
    shown = value[1] if field == "stop" and isinstance(value, list) and "" in value else value
    if field == "logit_bias" and isinstance(value, dict):
        shown = next(iter(value.values()))
    assert caught.value.field == field
    assert field in str(caught.value)
    assert str(shown) in str(caught.value)


@pytest.mark.parametrize(("field", "value", "says"), TOO_MANY)
def test_what_each_token_is_compared_with_has_a_bound(field, value, says):
    with pytest.raises(ParameterError, match=says) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(("field", "value"), ACCEPTED)
def test_a_value_in_range_is_kept(field, value):
    kept = getattr(SamplingParams(**{field: value}), field)
    if field == "stop":
        value = [value] if isinstance(value, str) else list(value)
    assert kept == (list(value) if field == "stop_token_ids" else value)


@pytest.mark.parametrize("field", [spec.name for spec in dataclasses.fields(SamplingParams)])
def test_none_means_not_given(field):
    """An optional argument of the caller's can be handed on. None as max_tokens: as many as there is room."""
    kept = SamplingParams(**{field: None})
    if field == "max_tokens":
        assert kept.max_tokens is None
    else:
        assert kept == SamplingParams()


def test_stop_strings_need_text():
    with pytest.raises(ParameterError, match=r"stop=.'a'. needs detokenize=True") as caught:
        SamplingParams(stop="a", detokenize=False)
    assert caught.value.field == "stop"


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(ParameterError, match="min_tokens=6 is more than max_tokens=5"):
        SamplingParams(min_tokens=6, max_tokens=5)
    assert SamplingParams(min_tokens=6, max_tokens=None).min_tokens == 6


def test_an_unknown_field_is_refused_with_the_one_that_was_meant():
    meant = r"SamplingParams has no field 'temprature': did you mean 'temperature'\? Accepted are n, "
    for make in (SamplingParams, functools.partial(dataclasses.replace, SamplingParams())):
        with pytest.raises(TypeError, match=meant):
            make(temprature=1.0)
    with pytest.raises(TypeError, match=r"no field 'use_beam_search': Accepted are n, "):
        SamplingParams(use_beam_search=True)


def test_params_are_copied_pickled_replaced_and_described_as_any_dataclass():
    params = SamplingParams(max_tokens=3, stop="x", temperature=0.5)
    assert [copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))] == [params] * 3
    assert dataclasses.replace(params, n=2) == SamplingParams(max_tokens=3, stop="x", temperature=0.5, n=2)
    assert SamplingParams(2, 0.5) == SamplingParams(n=2, presence_penalty=0.5), "in vLLM's order"
    names = [spec.name for spec in dataclasses.fields(SamplingParams)]
    assert list(inspect.signature(SamplingParams).parameters) == names, "what an editor shows"


def test_the_description_is_vllms_for_what_has_an_effect_here():
    shown = repr(SamplingParams(stop="x", max_tokens=3))
    assert shown.startswith("SamplingParams(n=1, presence_penalty=0.0, frequency_penalty=0.0, ")
    assert "temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=None, stop=['x'], stop_token_ids=[]" in shown
    assert "structured_outputs=None" in shown
    assert "extra_args" not in shown
    assert "\n" not in shown
    assert "temperature=0," in repr(SamplingParams(temperature=0))


def test_a_field_can_be_changed_and_a_clone_is_checked():
    params = SamplingParams()
    params.temperature, params.stop = 0, "x"
    copied = params.clone()
    assert copied == SamplingParams(temperature=0, stop=["x"])
    params.temperature = 2000
    with pytest.raises(ParameterError, match=r"temperature=2000: a number from 0\.0 to 1000") as caught:
        params.clone()
    assert caught.value.field == "temperature"
    with pytest.raises(AttributeError):
        params.temprature = 0


@pytest.mark.parametrize("field", ["stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids"])
def test_neither_the_callers_list_nor_the_originals_is_a_clones(field):
    value = {"stop": ["a"], "bad_words": ["a"], "logit_bias": {5: 1.0}}.get(field, [5])
    params = SamplingParams(**{field: value})
    copied, before = params.clone(), copy.deepcopy(value)
    value.clear()
    assert getattr(params, field) == before
    getattr(params, field).clear()
    assert getattr(copied, field) == before


@pytest.mark.parametrize(("field", "value", "part"), LATER)
def test_a_field_without_its_part_is_refused_naming_the_part(field, value, part):
    with pytest.raises(ParameterError, match=rf"{field}=.* is not supported here: {part} ") as caught:
        refuse_unsupported(SamplingParams(**{field: value}), frozenset())
    assert caught.value.field == field
    refuse_unsupported(SamplingParams(**{field: value}), frozenset({field}))


@pytest.mark.parametrize(
    "settings",
    [
        *[{}, {"temperature": 0}, {"temperature": None}, {"top_k": -1}, {"top_k": 0}, {"top_p": 1}, {"n": 1}],
        {"max_tokens": 3, "stop": "x", "min_tokens": 1, "stop_token_ids": [5], "ignore_eos": True},
    ],
)
def test_fields_that_have_no_effect_or_belong_to_this_part_are_not_refused(settings):
    assert refuse_unsupported(SamplingParams(**settings), frozenset()) is None


def test_every_field_of_a_later_part_is_in_the_table_above():
    later = {spec.name for spec in dataclasses.fields(SamplingParams) if "part" in spec.metadata}
    assert later == {field for field, _, _ in LATER}


@pytest.mark.parametrize(
    "setting",
    [
        {"stop_token_ids": [5, 300]},
        {"stop_token_ids": [-1]},
        {"logit_bias": {300: 1}},
        {"allowed_token_ids": [5, 300]},
        {"allowed_token_ids": [-1]},
    ],
)
def test_a_token_id_that_the_model_does_not_have_is_refused(setting):
    ((field, _),) = setting.items()
    with pytest.raises(
        ParameterError, match=rf"{field} has token id (300|-1); accepted are 0 to 299"
    ) as caught:
        refuse_unknown_tokens(SamplingParams(**setting), 300)
    assert caught.value.field == field


def test_token_ids_that_the_model_has_are_not_refused():
    params = SamplingParams(stop_token_ids=[0, 299], logit_bias={299: 1.0})
    assert refuse_unknown_tokens(params, 300) is None
