"""`ruvon tokenize`, `models`, `doctor` and the help: what each says, and to whom."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

import engine.cli.doctor
import engine.demo.story
import engine.models.checkpoint
import engine.models.known_shapes
from engine import LLM, EngineArgs
from engine.cli.doctor import EXTRAS, findings
from engine.cli.extensions import Finding
from engine.cli.main import app
from engine.cli.models import cached_models
from engine.models.checkpoint import ZOO, embedded_models
from engine.models.config import architectures
from engine.models.known_shapes import known_shapes
from engine.text.tokenizer import Tokenizer
from tests.system.ready import WIDE

ADAPTERS = Path(__file__).parents[2] / "adapters"
TEXT = "Once upon a time, a dög"


def said(capsys, *arguments: str) -> str:
    """What a command prints in a wide terminal; it must end well."""
    with patch.dict(os.environ, WIDE), pytest.raises(SystemExit) as caught:
        app(list(arguments), prog_name="ruvon")
    out = capsys.readouterr().out
    assert caught.value.code in (0, None), out
    return out


def refusal(*arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        app(list(arguments), prog_name="ruvon")
    return str(caught.value.code)


def test_tokens_and_their_ids_are_the_tokenizers(capsys):
    ids = Tokenizer.from_pretrained("storyteller").encode(TEXT)
    assert json.loads(said(capsys, "tokenize", TEXT, "--ids")) == ids
    assert said(capsys, "tokenize", json.dumps(ids), "--decode") == TEXT + "\n"
    shown = said(capsys, "tokenize", TEXT)
    assert re.findall(r" (\d+)(?= |$)", shown.replace("\n", " ")) == [str(id) for id in ids]
    assert "·upon" in shown
    assert "\\n" in said(capsys, "tokenize", "a\nb"), "a line's end is shown, not made"
    with pytest.raises(SystemExit):
        app(["tokenize", TEXT], prog_name="ruvon")
    assert f"{len(ids)} tokens, {len(TEXT)} characters, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x", "no JSON"),
        ('{"a": 1}', "a JSON list"),
        ('["a"]', "a JSON list"),
        ("[99999]", "99999"),
        ("[true]", "a JSON list"),
    ],
)
def test_what_is_no_list_of_ids_is_refused(text, words):
    assert refusal("tokenize", text, "--decode").startswith("ruvon tokenize: ")
    assert words in refusal("tokenize", text, "--decode")


def test_models_are_listed_with_their_shapes(capsys):
    shown = said(capsys, "models")
    for name in embedded_models():
        assert name in shown
    assert "6,049,792" in shown
    assert "gpt2" in architectures()
    assert not {"loader", "weights"} & set(architectures())
    assert all(name in shown.replace("\n", " ") for name in known_shapes())


def test_what_was_downloaded_is_listed_without_asking_the_hub(capsys, monkeypatch, tmp_path):
    """A model, one whose file of weights is broken, one of another kind, a data set, and an empty folder."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = json.loads((ZOO / "storyteller-draft" / "config.json").read_text())
    for name, config in {"models--own--er": model, "models--broken": model, "models--bert": {"a": 1},
                         "datasets--d": model, "models--empty": None}.items():  # fmt: skip
        snapshot = tmp_path / name / "snapshots" / "1"
        snapshot.mkdir(parents=True)
        (tmp_path / name / "refs").mkdir()
        (tmp_path / name / "refs" / "main").write_text("1")
        if config:
            (snapshot / "config.json").write_text(json.dumps(config))
    (tmp_path / "models--broken" / "snapshots" / "1" / "model.safetensors").write_bytes(bytes(8))
    assert cached_models() == ["bert", "broken", "own/er"]
    shown = said(capsys, "models")
    assert re.search(r"^own/er +gpt2 +– ", shown, re.MULTILINE), "its shape, and no weights"
    for name in ("bert", "broken"):
        assert f"\n{name}: in the hub's cache, and not to be run: " in shown


def test_a_known_shape_runs_from_the_command_line(capsys, monkeypatch):
    """Of a large model's name, with random weights, no command asks the hub."""
    monkeypatch.setattr(engine.models.known_shapes, "SHAPES", ZOO)  # a small one, so as not to take memory
    monkeypatch.setattr(engine.models.checkpoint, "embedded_models", lambda: [])
    shown = said(capsys, "generate", "Hi", "--model", "owner/Storyteller-Draft", "--load-format", "dummy",
                 "--max-tokens", "2", "--tokenizer", str(ZOO / "storyteller"))  # fmt: skip
    assert shown.endswith("\n")


def test_a_text_is_continued_in_an_adapters_voice(capsys):
    def told(*flags: str) -> str:
        return said(capsys, "generate", "Dear Mr.", "--max-tokens", "20", *flags)

    own = told("--enable-lora", "--lora", str(ADAPTERS / "business"))
    assert own != told("--enable-lora") == told(), "its own voice; without a name, the base's"
    assert "--lora needs --enable-lora" in refusal("generate", "Hi", "--lora", str(ADAPTERS / "business"))
    no_folder = "nowhere/adapter_config.json: no such file"
    assert no_folder in refusal("generate", "Hi", "--enable-lora", "--lora", "nowhere")


def test_a_model_that_is_meant_is_named():
    assert "did you mean 'storyteller'?" in refusal("generate", "Hi", "--model", "storytelle")


def test_a_story_commands_no_terminal(monkeypatch, capsys):
    llm = LLM("storyteller-draft", max_num_seqs=1)
    told = llm.stream

    def stream(*asked):
        for output in told(*asked):
            output.outputs[0].text = f"\x1b[2J{output.outputs[0].text}"
            yield output

    llm.stream = stream
    monkeypatch.setattr(engine.demo.story, "LLM", lambda **options: llm)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    engine.demo.story.tell_story(EngineArgs(model="storyteller-draft"), 3)
    said = capsys.readouterr().out
    assert "\ufffd[2J" in said
    assert "\x1b[2J" not in said


def test_the_doctor_says_what_is_here_and_why_something_is_not(monkeypatch, capsys):
    monkeypatch.setattr(engine.cli.doctor, "copy_rate", lambda device: 7e9)
    found = {one.name: one for one in findings()}
    assert found["Python"].ok
    assert found["PyTorch"].ok
    assert found["memory speed"].message.startswith("7.0 GB/s, ")
    assert found["a token"].message.endswith(" 7 billion weights of 16 bits in 2.0 s")
    assert all(name in found["models"].message for name in embedded_models())
    assert f"extra {next(iter(EXTRAS))}" in found
    monkeypatch.setattr(engine.cli.doctor, "find_spec", lambda name: None if name == "fastapi" else True)
    missing = {one.name: one for one in findings()}["extra server"]
    assert not missing.ok
    assert "fastapi is missing; pip install 'ruvon[server]'" in missing.message
    monkeypatch.setattr(engine.cli.doctor, "find_spec", lambda name: None)
    monkeypatch.setenv("COLUMNS", WIDE["COLUMNS"])
    with pytest.raises(SystemExit) as caught:
        app(["doctor"], prog_name="ruvon")
    assert caught.value.code == 1, "nothing runs without PyTorch"
    assert "pip install torch" in capsys.readouterr().out


def test_what_is_needed_and_missing_is_the_doctors_exit_code(monkeypatch, capsys):
    lines = [
        Finding("a", "", ok=False, needed=True),
        Finding("b", "", needed=True),
        Finding("c", "", ok=False),
    ]
    monkeypatch.setattr(engine.cli.doctor, "findings", lambda: lines)
    with pytest.raises(SystemExit) as caught:
        app(["doctor"], prog_name="ruvon")
    assert caught.value.code == 1
    assert capsys.readouterr().out.split() == ["a", "NO", "b", "yes", "c", "no"]
    monkeypatch.setattr(engine.cli.doctor, "findings", lambda: lines[1:])
    said(capsys, "doctor")


def test_what_the_doctor_says_is_no_markup(monkeypatch, capsys):
    says = "CC='[/x]': pip install 'ruvon[server]'"
    monkeypatch.setattr(engine.cli.doctor, "findings", lambda: [Finding("a", says, ok=False)])
    assert says in said(capsys, "doctor")


@pytest.mark.parametrize(
    ("version", "good"), [((3, 10, 9), False), ((3, 11, 0), True), ((3, 13, 9), True), ((3, 14, 0), False)]
)
def test_which_pythons_are_accepted(monkeypatch, version, good):
    monkeypatch.setattr(engine.cli.doctor.sys, "version_info", version)
    found = next(findings())
    monkeypatch.undo()
    assert (found.name, found.ok, found.needed) == ("Python", good, True)
    assert ("3.11 to 3.13 are accepted" in found.message) is not good


def test_the_copy_is_counted_as_read_and_written(monkeypatch):
    times = iter(range(100))
    monkeypatch.setattr(engine.cli.doctor, "COPY_BYTES", 2**20)
    monkeypatch.setattr(engine.cli.doctor.time, "perf_counter", lambda: float(next(times)))
    assert engine.cli.doctor.copy_rate("cpu") == 2 * 2**20  # each copy takes a second by this clock
    assert next(times) == 2 * engine.cli.doctor.COPY_ROUNDS, "so many copies, each of them timed"


def test_help_has_topics_and_a_version(capsys):
    shown = said(capsys, "--help")
    for words in ("Run a model", "Talk to a server", "Look inside", "doctor", "--install-completion"):
        assert words in shown
    assert re.fullmatch(r"ruvon \d.*\n|ruvon, from a folder.*\n", said(capsys, "--version"))
    shown = said(capsys, "serve", "--help")
    for words in ("Model", "Requests", "Keys and values", "Speed", "Who may ask", "What it costs"):
        assert words in shown


def test_the_word_that_other_tools_have_for_it_is_answered_with_ours(capsys):
    with pytest.raises(SystemExit) as caught:
        app(["run", "storyteller", "--verbose", "--help"], prog_name="ruvon")
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "ruvon generate" in said
    assert "ruvon chat" in said
    with pytest.raises(SystemExit):
        app(["--help"], prog_name="ruvon")
    assert " run " not in capsys.readouterr().out.replace("Run a model", "")


@pytest.mark.parametrize(
    "command",
    [["chat", "Hi"], ["bench", "serve", "--num-prompts", "1"], ["top", "--once"]],
    ids=lambda c: c[0],
)
def test_each_client_of_a_server_is_told_where_it_is_by_url(command):
    assert "http://127.0.0.1:9" in refusal(*command, "--url", "http://127.0.0.1:9")


def test_a_command_that_is_meant_is_named():
    done = subprocess.run(
        [sys.executable, "-m", "engine.cli.main", "serv"], cwd=Path(__file__).parents[2], text=True,
        capture_output=True, env=os.environ | WIDE,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Did you mean 'serve'?" in done.stderr


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("ruvon serve --attention ti", ["tiled"]),
        ("ruvon generate --model story", ["storyteller", "storyteller-draft", "storyteller-llama"]),
        ("ruvon bench throughput --load-format d", ["dummy"]),
    ],
)
def test_a_shell_completes_flags_and_their_values(words, completed):
    env = {"_RUVON_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    code = "from engine.cli.main import app; app(prog_name='ruvon')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=Path(__file__).parents[2], text=True, capture_output=True
    )
    assert done.stdout.split() == completed


def test_a_path_that_is_longer_than_the_line_is_shown_whole(monkeypatch, capsys):
    path = "/x" * 200
    monkeypatch.setattr(engine.cli.doctor, "findings", lambda: [Finding("a", path, ok=False)])
    assert "".join(said(capsys, "doctor").split()) == f"ano{path}", "and not with an ellipsis for its end"
