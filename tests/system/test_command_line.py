"""`ruvon`: the text alone on stdout, everything else on stderr, one clear line for an error."""

import re
import shutil
import subprocess
import sys

import pytest

import engine.cli.main
from engine import LLM, SamplingParams
from engine.cli.main import app
from engine.demo.story import PROMPT
from engine.models.checkpoint import ZOO
from tests.system.ready import ruvon

ROOT = ZOO.parents[1]


def refusal(capsys, *arguments: str) -> str:
    """What Python will print on stderr, exiting with 1, for a SystemExit that holds a text."""
    with pytest.raises(SystemExit) as caught:
        app(["generate", *arguments], prog_name="ruvon")
    assert isinstance(caught.value.code, str)
    assert capsys.readouterr().out == ""
    return caught.value.code


def test_generate_prints_the_text_alone_and_the_rest_on_stderr():
    done = ruvon("generate", "Once upon a time", "--max-tokens", "25", "--temperature", "0")
    expected = LLM("storyteller", max_num_seqs=1).generate(
        "Once upon a time", SamplingParams(temperature=0, max_tokens=25)
    )
    assert done.returncode == 0
    assert done.stdout == expected[0].outputs[0].text + "\n"
    assert "25 tokens" in done.stderr


def test_each_flag_of_the_text_reaches_the_engine(capsys):
    given = {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "seed": 5, "max_tokens": 12}
    flags = [part for name, value in given.items() for part in ("--" + name.replace("_", "-"), str(value))]
    (expected,) = LLM("storyteller", max_num_seqs=1).generate("The dog", SamplingParams(**given))
    with pytest.raises(SystemExit):
        app(["generate", "The dog", *flags], prog_name="ruvon")
    assert capsys.readouterr().out == expected.outputs[0].text + "\n"


def test_an_error_is_one_line_on_stderr_and_a_status_that_is_not_zero():
    done = ruvon("generate", "Hi", "--temperature", "-0.7")
    assert done.returncode != 0
    assert done.stdout == ""
    assert re.fullmatch(r"ruvon generate: temperature=-0\.7: a number .*\n", done.stderr)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["Hi", "--model", "no-such-model"], ["no-such-model", "storyteller"]),
        (["Hi", "--model", "./no/such/folder"], ["no/such/folder"]),
        (["Hi", "--top-p", "0"], ["top_p=0"]),
        (["Hi", "--temperature", "-1"], ["temperature=-1"]),
        (["Hi", "--max-tokens", "-5"], ["max_tokens=-5"]),
        (["Hi", "--max-tokens", "0"], ["max_tokens=0"]),
        (["word " * 2000], ["tokens; accepted are 1 to 1023"]),
        ([""], ["0 tokens"]),
        (["Hi", "--dtype", "int3"], ["dtype='int3'", "float16"]),
        (["Hi", "--load-format", "gguf"], ["load_format='gguf'", "dummy"]),
        (["Hi", "--device", "warp"], ["warp"]),
        (["Hi", "--device", "mps"], ["device='mps': accepted are cpu, cuda and cuda:N; a Mac runs on cpu"]),
        (["a\udcff"], ["U+DCFF", "position 1"]),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(capsys, arguments, named):
    message = refusal(capsys, *arguments)
    assert message.startswith("ruvon generate: ")
    assert "\n" not in message
    assert all(part in message for part in named)


def test_a_folder_without_a_tokenizer_says_what_was_looked_for_and_how_to_take_anothers(capsys, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(ZOO / "storyteller-draft" / name, tmp_path)
    asked = ["Hi", "--model", str(tmp_path), "--max-tokens", "1"]
    looked_for = "no tokenizer; looked for tokenizer.json, and for vocab.json and merges.txt"
    message = refusal(capsys, *asked)
    assert message == f"ruvon generate: {tmp_path}: {looked_for}; --tokenizer takes another folder"
    (tmp_path / "empty").mkdir()
    message = refusal(capsys, *asked, "--tokenizer", str(tmp_path / "empty"))
    assert message == f"ruvon generate: {tmp_path / 'empty'}: {looked_for}", "the option is known already"


def test_an_option_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        app(["generate", "Hi", "--nonsense"], prog_name="ruvon")
    assert caught.value.code == 2


def test_the_embedded_model_is_the_default_and_dummy_weights_can_be_asked_for(capsys):
    for arguments in ([], ["--model", "storyteller-draft", "--load-format", "dummy"]):
        with pytest.raises(SystemExit) as caught:
            app(["generate", "Once", "--max-tokens", "3", *arguments], prog_name="ruvon")
        assert caught.value.code in (0, None)
        assert "3 tokens, finish_reason length" in capsys.readouterr().err


def test_parts_hands_its_arguments_to_the_series_tool(monkeypatch):
    calls = []

    def run(command, **settings):
        calls.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(engine.cli.main.subprocess, "run", run)
    with pytest.raises(SystemExit) as caught:
        app(["parts", "test", "2", "-k", "stop", "--help"], prog_name="ruvon")
    assert caught.value.code == 3
    assert calls == [[sys.executable, "-m", "parts", "test", "2", "-k", "stop", "--help"]]


def test_parts_lists_the_series():
    done = ruvon("parts", "list")
    assert done.returncode == 0
    assert "kv_cache" in done.stdout.lower() or "kv cache" in done.stdout.lower()


def test_parts_in_an_installed_package_says_what_it_needs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(engine.cli.main, "ROOT", tmp_path)
    with pytest.raises(SystemExit) as caught:
        app(["parts", "list"], prog_name="ruvon")
    assert caught.value.code == 2
    assert "Clone the repository" in capsys.readouterr().err


def test_a_story_is_told_with_its_speed_and_ends():
    done = ruvon("demo", "--story", "--max-tokens", "30")
    assert done.returncode == 0
    (expected,) = LLM("storyteller", max_num_seqs=1).generate(
        PROMPT, SamplingParams(temperature=0, max_tokens=30)
    )
    assert PROMPT.split()[-1] + expected.outputs[0].text in done.stdout, "each piece is shown once"
    assert "tokens/s" in done.stdout
    assert "time to first token" in done.stdout
