"""`_transformed`: what is done to a loaded model's linear layers, in which order, and with what.

The model here is a list of what was done to it: each function adds its name, and no layer is computed.
"""

from types import SimpleNamespace

import pytest

from engine.wiring import devices
from engine.wiring.compose_cache import Sizes
from engine.wiring.engine_args import EngineArgs

SIZES = Sizes(max_num_seqs=7, max_num_batched_tokens=64, max_model_len=128)
SLOTS = SimpleNamespace(wrap=lambda model: [*model, "wrap"])
RANK = SimpleNamespace(join=lambda model: [*model, "join"], row_max="the rank's")


@pytest.fixture
def done(monkeypatch):
    """done(method, slots, rank, graphs, **options): the names of what was done, in order, and `given`,
    the arguments by name.
    """
    given = {}

    def quantize(model, method, group_size=None, row_max=None):
        given["quantize"] = method, row_max
        return [*model, "quantize"]

    def pack_linears(model, rows=1):
        given["rows"] = rows
        return [*model, "pack_linears"]

    monkeypatch.setattr(devices, "quantize", quantize)
    monkeypatch.setattr(devices, "pack_linears", pack_linears)
    monkeypatch.setattr(devices, "pack_quantized", lambda model: [*model, "pack_quantized"])
    monkeypatch.setattr(devices, "_refuse_large_adapters", lambda slots, model, args: None)

    def run(method=None, slots=None, rank=None, graphs=False, **options):
        monkeypatch.setattr(devices, "runs_graphs", lambda args: graphs)
        args = EngineArgs(model="storyteller", **options)
        return devices._transformed([], args, SIZES, method, slots, rank)

    run.given = given
    return run


def test_quantized_then_wrapped_then_summed_then_packed(done):
    names = done("int8", SLOTS, RANK, quantization="int8")
    at = {name: names.index(name) for name in set(names)}
    assert {"quantize", "wrap", "join", "pack_linears", "pack_quantized"} == set(at), "all that is asked for"
    assert at["quantize"] < at["wrap"], (
        "quantize, then wrap: a wrapper holds the layer that it wraps, and what is wrapped is not found"
    )
    assert at["wrap"] < at["join"], "wrap, then join: an adapter's product belongs into the sum over ranks"
    assert at["join"] < min(at["pack_linears"], at["pack_quantized"]), (
        "packing is last: what is packed is no linear layer any more"
    )
    assert len(names) == len(at), "each of them once"


def test_what_is_not_asked_for_is_not_done(done):
    assert done() == ["pack_linears", "pack_quantized"], "a plain model is packed, and no more"


def test_the_draft_model_comes_through_here_too(done):
    names = done(None, quantization="int8")
    assert "quantize" not in names, (
        "the draft model's `quantization` is None, whatever args.quantization says"
    )
    done("int4")
    assert done.given["quantize"][0] == "int4", "the method is the argument `quantization`"


def test_layouts_are_chosen_for_a_full_step(done):
    done()
    assert done.given["rows"] == 7, "a full step has max_num_seqs rows, and layouts are chosen for these"


def test_graphs_read_plain_weights(done):
    names = done(graphs=True)
    assert "pack_linears" not in names, "the kernels of graphs read plain weights, and no packed ones"
    assert done("int8", graphs=True)[-1] == "pack_quantized", "codes are packed, with graphs and without"


def test_a_rank_knows_the_largest_weight_of_a_whole_row(done):
    done("int8", rank=RANK)
    assert done.given["quantize"] == ("int8", "the rank's"), (
        "a rank may have part of a row: the scale is the whole row's, so row_max is the rank's"
    )
    done("int8")
    assert done.given["quantize"] == ("int8", None), "without a rank, a row is whole"


def test_adapters_that_do_not_fit_are_refused_before_they_take_memory(done, monkeypatch):
    def refuse(slots, model, args):
        raise ValueError("too large")

    monkeypatch.setattr(devices, "_refuse_large_adapters", refuse)
    wrapped = []
    slots = SimpleNamespace(wrap=lambda model: wrapped.append(model) or model)
    try:
        done(slots=slots)
    except ValueError:
        pass
    assert not wrapped, "_refuse_large_adapters is asked before anything is wrapped"
