"""`EngineArgs` is the one place where options are named: flags are made from it, none is written twice."""

import argparse
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from copy import copy
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
import typer

from engine import EngineArgs
from engine.cache.paged import PreemptionMode
from engine.cli import generate, serve
from engine.cli.engine_flags import takes_engine_args
from engine.cli.main import app
from engine.cli.serve_flags import NEUTRAL_FLAGS, ServeFlags
from engine.demo.server import to_flags
from engine.models.loader import DTYPES, LOAD_FORMATS
from engine.utils.argparse_utils import FlexibleArgumentParser
from engine.wiring.argparse_flags import add_flags
from engine.wiring.attention_kernel import NAMES
from engine.wiring.defaults import options_of, with_defaults
from engine.wiring.engine_args import choices, union_members
from engine.wiring.neutral_options import NEUTRAL

COMMANDS = typer.main.get_command(app).commands
FIELDS = {spec.name: spec for spec in fields(EngineArgs)}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


@pytest.mark.parametrize(("module", "name"), [(serve, "serve"), (generate, "generate")])
def test_each_field_is_a_flag_and_each_flag_a_field_or_the_commands_own(module, name):
    flags = {option.name: option for option in COMMANDS[name].params}
    command = inspect.unwrap(getattr(module, name))  # as it is written, with `args`
    own = (
        set(inspect.signature(command).parameters) - {"args"} | {"model_tag"} | set(NEUTRAL)
    )  # the argument MODEL
    if "flags" in own:
        own = own - {"flags"} | {spec.name for spec in fields(ServeFlags)} | set(NEUTRAL_FLAGS)
    assert set(flags) == set(FIELDS) | own, "a flag is a field of EngineArgs, or the command's own"
    assert not own & set(FIELDS), "a command repeats a field of EngineArgs"
    for field in FIELDS:
        assert "--" + field.replace("_", "-") in flags[field].opts, f"{field} has another name as a flag"
        assert FIELDS[field].metadata["help"] in flags[field].help, f"--help does not say what {field} is"


def test_a_flag_left_out_is_the_fields_default():
    for option in COMMANDS["serve"].params:
        if option.name == "model":
            assert (option.default, option.show_default) == (None, FIELDS["model"].default)
        elif option.name in FIELDS:
            assert option.default == FIELDS[option.name].default, option.name


@pytest.mark.parametrize(
    ("options", "seats", "tokens", "attention", "ahead"),
    [
        ({"device": "cpu"}, 16, 512, "sdpa", False),
        ({"device": "cuda"}, 256, 8192, "triton", True),
        ({"device": "cuda:1", "speculative_config": NGRAM}, 256, 8192, "triton", True),
        ({"device": "cpu", "max_num_seqs": 600}, 600, 600, "sdpa", False),
        ({"device": "cpu", "max_num_batched_tokens": 8}, 8, 8, "sdpa", False),
        ({"device": "cuda", "max_num_batched_tokens": 1000}, 256, 1000, "triton", True),
        ({"device": "cpu", "async_scheduling": True, "attention": "tiled"}, 16, 512, "tiled", True),
    ],
    ids=str,
)
def test_what_is_left_open_is_as_the_help_says(options, seats, tokens, attention, ahead):
    """Each running request needs a token in every step, so there are at least as many tokens; and what was
    given is not refused because of another option's default.
    """
    args, sizes = with_defaults(EngineArgs(**options))
    found = sizes.max_num_seqs, sizes.max_num_batched_tokens, args.attention, args.async_scheduling
    assert (args.max_num_seqs, args.max_num_batched_tokens) == found[:2]
    assert found == (seats, tokens, attention, ahead)


def test_what_is_open_can_be_answered_with_no():
    """True, False, or left open: `--no-…` says False; what is off by itself can only be switched on."""
    negative = {option.name: option.secondary_opts for option in COMMANDS["serve"].params}
    assert negative["enable_prefix_caching"] == ["--no-enable-prefix-caching"]
    assert negative["async_scheduling"] == ["--no-async-scheduling"]
    assert negative["enforce_eager"] == []
    own = {option.name: option for option in COMMANDS["bench"].commands["latency"].params}
    assert own["enable_prefix_caching"].default is False, "the command's own default"
    assert own["enable_prefix_caching"].opts == ["--enable-prefix-caching"]
    assert own["enable_prefix_caching"].secondary_opts == ["--no-enable-prefix-caching"]
    assert {option.name: option.default for option in COMMANDS["generate"].params}["max_num_seqs"] == 1


def test_the_names_that_are_accepted_are_those_of_the_parts():
    assert choices(FIELDS["attention"].type) == ("auto", *NAMES)
    assert choices(FIELDS["preemption_mode"].type) == (*get_args(PreemptionMode), None)
    assert FIELDS["dtype"].metadata["completions"] == DTYPES
    assert FIELDS["load_format"].metadata["completions"] == LOAD_FORMATS


@pytest.mark.parametrize(
    "device", ["mps", "mps:0", "tpu", "meta", "ipu", "xpu", "cuda:", "cuda:x", "cpu:0", 0, None]
)
def test_only_a_cpu_and_cuda_gpus_are_devices(device):
    """PyTorch is not asked: its own list has twenty, of which others cannot be used either."""
    with pytest.raises(ValueError, match=f"device='{device}': accepted are cpu, cuda and cuda:N") as caught:
        EngineArgs(device=device)
    assert ("; a Mac runs on cpu" in str(caught.value)) == str(device).startswith("mps")


@pytest.mark.parametrize(
    "device", ["auto", "cpu", "cuda", "cuda:1", torch.device("cpu"), torch.device("cuda", 1)]
)
def test_a_device_is_a_name_or_what_torch_calls_by_it(device):
    assert EngineArgs(device=device).device == device


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_seqs": "3"}, "max_num_seqs='3': at least 1"),
        ({"max_num_seqs": True}, "max_num_seqs=True: at least 1"),
        ({"enforce_eager": "no"}, "enforce_eager='no': accepted are True, False"),
        ({"enable_prefix_caching": "no"}, "accepted are True, False, None"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size=True: at least 1"),
        ({"swap_space": "1"}, "swap_space='1': a number"),
        ({"model": ""}, "model='': a name or a folder"),
        ({"tokenizer": " "}, "tokenizer=' ': a name or a folder"),
        ({"generation_config": ""}, "generation_config='': accepted are auto, vllm, and a folder"),
    ],
)
def test_a_value_of_another_kind_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        EngineArgs(**options)


@pytest.mark.parametrize("name", NEUTRAL)
def test_an_option_of_vllms_is_accepted_with_the_value_that_asks_for_nothing(name):
    assert name not in FIELDS, "an option that is here is no neutral one"
    for value in NEUTRAL[name].values:
        assert EngineArgs(**{name: value}) == EngineArgs(), "it changes nothing"
    for value in ("x", 7, [1]):
        with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: ")) as refusal:
            EngineArgs(**{name: value})
        assert NEUTRAL[name].reason in str(refusal.value)
        assert repr(NEUTRAL[name].values[0]) in str(refusal.value), "it says what is accepted"


def test_a_bool_is_no_number_and_a_number_no_bool():
    for options in ({"pipeline_parallel_size": True}, {"trust_remote_code": 0}):
        with pytest.raises(ValueError, match="is accepted"):
            EngineArgs(**options)


def test_what_is_guessed_for_an_unknown_name_is_much_like_it():
    with pytest.raises(TypeError, match=r"'max_lora': did you mean 'max_loras'\?"):
        EngineArgs(max_lora=1)
    for name in ("max_logits", "kv_connector"):
        with pytest.raises(TypeError) as refusal:
            EngineArgs(**{name: 1})
        assert "did you mean" not in str(refusal.value), f"{name} was no slip of the finger"


@pytest.mark.parametrize(("name", "meant"), [("half", "float16"), ("float", "float32"), ("auto", "auto")])
def test_a_dtype_has_vllms_other_names(name, meant):
    assert EngineArgs(dtype=name) == EngineArgs(dtype=meant)


@pytest.mark.parametrize("value", [0, -3, 2**70])
def test_a_seed_is_any_whole_number(value):
    assert EngineArgs(seed=value).seed == value
    for other in (1.5, True, "1"):
        with pytest.raises(ValueError, match=r"seed=.*: a whole number is accepted"):
            EngineArgs(seed=other)


def parsed(*flags: str) -> EngineArgs:
    parser = FlexibleArgumentParser()
    assert EngineArgs.add_cli_args(parser) is parser
    parser.add_argument("--my_own", type=int)
    return EngineArgs.from_cli_args(parser.parse_args(flags))


def test_a_parser_of_pythons_own_gives_the_same_options():
    assert parsed() == EngineArgs()
    flags = [
        *("--model=x", "--max_num_seqs", "3", "--no-enable-prefix-caching", "--enforce-eager"),
        *("--swap-space=0.5", "--preemption-mode", "swap", "--speculative_config", json.dumps(NGRAM)),
        *("--trust-remote-code", "--no-trust_remote_code", "--pipeline-parallel-size=1", "--my-own", "2"),
    ]
    assert parsed(*flags) == EngineArgs(
        model="x", max_num_seqs=3, enable_prefix_caching=False, enforce_eager=True, swap_space=0.5,
        preemption_mode="swap", speculative_config=NGRAM,
    )  # fmt: skip
    with pytest.raises(ValueError, match="trust_remote_code=True: False is accepted"):
        parsed("--trust-remote-code")
    with pytest.raises(ValueError, match="pipeline_parallel_size=2: 1 is accepted"):
        parsed("--pipeline-parallel-size", "2")


def test_a_parser_takes_a_switch_whose_neutral_values_are_not_all_bools():
    """`--enable-chunked-prefill` is vLLM's form; the option may also be None."""
    assert parsed("--enable-chunked-prefill") == EngineArgs()
    with pytest.raises(ValueError, match="enable_chunked_prefill=False: None and True are accepted"):
        parsed("--no-enable-chunked-prefill")


def test_a_parser_shows_the_engines_options_and_not_those_that_only_vllm_has(capsys):
    with pytest.raises(SystemExit):
        parsed("--help")
    said = capsys.readouterr().out
    assert "--max-num-seqs" in said
    assert "--trust-remote-code" not in said


def test_help_comes_without_torch():
    code = "import sys, engine.cli.main, engine.wiring.engine_args; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0, "the flags' module imports torch"


def test_a_mapping_is_given_as_json():
    made = []

    @takes_engine_args()
    def command(args: EngineArgs) -> None:
        made.append(args.speculative_config)

    given = {name: spec.default for name, spec in FIELDS.items()}
    command(**given | {"speculative_config": '{"num_speculative_tokens": 2}'})
    assert made == [{"num_speculative_tokens": 2}]
    with pytest.raises(SystemExit, match=r"ruvon command: --speculative-config: not JSON: .*"):
        command(**given | {"speculative_config": "{2}"})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model": "x", "max_num_seqs": 3, "enforce_eager": True, "enable_prefix_caching": False},
        {"async_scheduling": True, "swap_space": 0.5, "preemption_mode": "swap", "kv_cache": "paged"},
        {"speculative_config": NGRAM},
    ],
    ids=str,
)
def test_flags_made_from_arguments_mean_them(options):
    made = []
    other = typer.Typer()

    @other.command()
    @takes_engine_args()
    def command(args: EngineArgs) -> None:
        made.append(args)

    args = EngineArgs(**options)
    assert len(to_flags(args)) <= 2 * len(options), "what is as by default is left out"
    with pytest.raises(SystemExit):
        other(to_flags(args), prog_name="x")
    assert made == [args]


@pytest.mark.parametrize("kind", [Mapping[str, Any], Mapping[str, Any] | None])
def test_a_parser_reads_a_mapping_as_json_whether_or_not_its_type_allows_none(kind):
    spec = copy(FIELDS["speculative_config"])
    spec.type = kind
    given = add_flags(argparse.ArgumentParser(), [spec]).parse_args(["--speculative-config", '{"a": 1}'])
    assert given.speculative_config == {"a": 1}


def test_the_members_of_a_union_are_its_types_and_another_types_arguments_are_no_members():
    assert union_members(int | None) == (int, type(None))
    assert union_members(Mapping[str, int]) == (Mapping[str, int],)
    assert union_members(Literal["a", "b"]) == (Literal["a", "b"],)


def test_options_as_json_have_a_dtypes_name_and_a_model_keeps_its_own():
    options = options_of(
        EngineArgs(model="torch.models/story", tokenizer=Path("torch.x"), dtype=torch.float16)
    )
    assert options["model"] == "torch.models/story", "only a dtype loses the word torch"
    assert (options["tokenizer"], options["dtype"]) == ("torch.x", "float16")
    assert options_of(EngineArgs(device=torch.device("cuda:1")))["device"] == "cuda:1"
