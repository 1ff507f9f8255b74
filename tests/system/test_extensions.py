"""What a lettered extension brings is used where its files are, and refused by name where they are not.

The extension is a fake that many devices (A) stand for: two modules that are found as its own would be.
"""

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from engine import LLM, EngineArgs, SamplingParams
from engine.cli.engine_flags import takes_engine_args
from engine.cli.main import add_commands_of_extensions
from engine.wiring.devices import load_one_device
from engine.wiring.extensions import EXTENSIONS, is_here, optional_module

SMALL = {"model": "storyteller-draft", "device": "cpu"}
GREEDY = SamplingParams(temperature=0, max_tokens=8)


class CountingExecutor:
    """Has one runner compute, and counts the steps."""

    def __init__(self, runner):
        self.runner, self.num_steps = runner, 0

    def submit(self, batch):
        self.num_steps += 1
        return self.runner.submit(batch)

    def on_lost(self, callback):
        """It cannot be lost."""

    def shutdown(self):
        """It has no process of its own."""


def load_devices(args):
    """As many devices' loader would: the leader's own, and an executor that has all of them compute."""
    devices = load_one_device(args)
    return replace(devices, executor=CountingExecutor(devices.runner))


def count_devices() -> None:
    """Say how many."""
    print("two devices")


@pytest.fixture
def absent(monkeypatch):
    """Extension A's files are not here."""
    monkeypatch.setitem(EXTENSIONS, "A", "no_such_extension")


@pytest.fixture
def present(monkeypatch):
    """Extension A's files are here."""
    monkeypatch.setitem(EXTENSIONS, "A", "fake_extension")
    brings = {"wiring": {"load_devices": load_devices}, "cli": {"COMMANDS": (count_devices,)}}
    for room, names in brings.items():
        name = f"engine.{room}.fake_extension"
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)


def run(*flags: str):
    """A command with a flag for each field of EngineArgs, and one beside it."""
    app = typer.Typer()

    @app.command()
    @takes_engine_args()
    def show(args: EngineArgs) -> None:
        print(f"size {args.tensor_parallel_size}")

    app.command()(lambda: None)
    add_commands_of_extensions(app)
    return CliRunner().invoke(app, flags, env={"COLUMNS": "200"})


def test_an_option_of_an_absent_extension_is_refused_by_name(absent):
    assert not is_here("A")
    assert EngineArgs(tensor_parallel_size=1).tensor_parallel_size == 1, "what has no effect is no request"
    words = r"tensor_parallel_size=2: comes with Extension A \(no_such_extension\), .*; 1 is accepted"
    with pytest.raises(ValueError, match=words):
        LLM(**SMALL, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="tensor_parallel_size=0: at least 1"):
        EngineArgs(tensor_parallel_size=0)


def test_its_flag_is_refused_in_these_words_and_not_shown(absent):
    done = run("show", "--tensor-parallel-size", "2")
    assert done.exit_code == 1
    assert "tensor_parallel_size=2: comes with Extension A" in f"{done.exception} {done.output}"
    shown = run("show", "--help").output
    assert "--max-num-seqs" in shown
    assert "--tensor-parallel-size" not in shown
    assert "count-devices" not in run("--help").output


def test_its_flag_is_taken_where_it_is_here(present):
    assert run("show", "--tensor-parallel-size", "2").output == "size 2\n"
    assert "--tensor-parallel-size" in run("show", "--help").output


def test_its_commands_are_among_the_others(present):
    assert run("count-devices").output == "two devices\n"
    assert "Say how many." in run("--help").output


NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}


@pytest.mark.parametrize("more", [{}, NGRAM], ids=["plain", "n-grams"])
def test_its_executor_computes_every_step(present, more):
    alone = LLM(**SMALL).generate("Once upon a time", GREEDY, use_tqdm=False)
    llm = LLM(**SMALL, tensor_parallel_size=2, **more)
    measured = llm.engine.executor.num_steps
    assert (measured > 0) == bool(more), "a trial engine measures drafts with the same executor"
    (output,) = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == alone[0].outputs[0].token_ids
    assert llm.engine.executor.num_steps > measured


def test_one_device_asks_no_extension(present):
    assert not isinstance(LLM(**SMALL).engine.executor, CountingExecutor)


def test_beam_search_is_refused_where_no_extension_brings_it(monkeypatch):
    monkeypatch.setattr("engine.wiring.llm.optional_module", lambda name: None)
    with pytest.raises(AttributeError, match="'beam_search': beam search comes with Extension B"):
        LLM(**SMALL).beam_search("a", None)


def test_beam_search_is_done_by_the_module_of_its_name(monkeypatch):
    room = "wiring"  # written so, since an import of an extension's module may not stand here
    name = f"engine.{room}.beam_search"
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.beam_search = lambda engine, prompts, params, *options: (len(prompts), params, options)
    monkeypatch.setitem(sys.modules, name, module)
    assert optional_module("beam_search") is module
    assert LLM(**SMALL).beam_search(["a", "b"], "params", concurrency_limit=2) == (2, "params", (False, 2))
    assert optional_module("no_such_module") is None
