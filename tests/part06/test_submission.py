"""The n samples of one request, put together as one output."""

import os

import pytest
import torch

from engine.core.submission import Submission, make_samples, refuse_forked
from engine.decoding.params import SamplingParams
from tests.part06.fakes import CONFIG, TOKENIZER


def submission(n: int) -> Submission:
    return Submission(None, make_samples("a", [1, 2], SamplingParams(n=n), TOKENIZER, CONFIG))


def test_a_request_has_finished_once_all_of_its_samples_have():
    submitted = submission(n=2)
    assert not submitted.output("a").finished
    submitted.samples[1].output.finish_reason = "length"
    assert not submitted.output("a").finished, "the first sample still grows"
    submitted.samples[0].output.finish_reason = "stop"
    output = submitted.output("a")
    assert output.finished
    assert [sample.finish_reason for sample in output.outputs] == ["stop", "length"], "in their order"


def test_an_error_comes_with_the_field_of_the_sample_that_failed():
    """Each sample fails for a reason of its own; the first one's is told, and no other's field with it."""
    submitted = submission(n=3)
    submitted.samples[1].error = "the model's logits are not finite numbers"
    submitted.samples[2].error, submitted.samples[2].error_field = "no token fits", "structured_outputs"
    output = submitted.output("a")
    assert (output.error, output.error_field) == ("the model's logits are not finite numbers", None)
    submitted.samples[1].error = None
    output = submitted.output("a")
    assert (output.error, output.error_field) == ("no token fits", "structured_outputs")


@pytest.mark.parametrize("threads", [1, 2])
def test_a_fork_computes_with_one_thread_or_is_told_so(monkeypatch, threads):
    """The threads are those that PyTorch would use: a fork has copied none but the one that forked."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    refuse_forked(os.getpid())
    if threads == 1:
        refuse_forked(os.getpid() + 1)
    else:
        with pytest.raises(RuntimeError, match="forked"):
            refuse_forked(os.getpid() + 1)


def test_outputs_come_in_the_order_in_which_their_requests_are_named(fake_engine):
    engine = fake_engine()
    for name in "abc":
        engine.add_request(name, "hello", SamplingParams(temperature=0, max_tokens=1))
    assert [output.request_id for output in engine._outputs(["c", "a", "b"])] == ["c", "a", "b"]
    for name in "abc":
        engine.abort_request(name)
