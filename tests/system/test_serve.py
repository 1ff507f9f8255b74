"""`ruvon serve` as a user meets it: a process, a port, the official client."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest

import engine.cli.serving
import engine.server.run
from engine import LLM, EngineArgs, SamplingParams
from engine.cli.main import app
from engine.models.checkpoint import ZOO
from engine.wiring.loading import public_name
from tests.part04.serving import lasting_port
from tests.system.ready import Popen

ROOT = Path(__file__).parents[2]
DEADLINE = 240.0  # seconds after which what we wait for will never come: not a promise about speed
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


SERVE = [sys.executable, "-m", "engine.cli.main", "serve"]
OUTPUT = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def start(*arguments: str) -> subprocess.Popen:
    return Popen([*SERVE, *arguments], cwd=ROOT, env=ENVIRONMENT, **OUTPUT)


@pytest.fixture(scope="module")
def address():
    """A server on a free port, with a key, stopped as Ctrl-C stops it."""
    process = start("--port", "0", "--api-key", "secret", "--max-num-seqs", "4")
    log = []
    for line in process.stdout:
        log.append(line)
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        if found:
            break
    else:
        pytest.fail("the server did not start:\n" + "".join(log))
    yield f"http://127.0.0.1:{found[1]}"
    process.send_signal(2)
    rest = process.communicate(timeout=DEADLINE)[0]
    assert process.returncode == 0, rest
    assert "Traceback" not in rest


@pytest.fixture(scope="module")
def client(address) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0)


def test_completion_and_stream_are_the_offline_engines_text(client):
    expected = LLM("storyteller").generate("Once upon a time", SamplingParams(temperature=0, max_tokens=30))
    text = expected[0].outputs[0].text
    ask = {"model": "storyteller", "prompt": "Once upon a time", "max_tokens": 30, "temperature": 0}
    whole = client.completions.create(**ask)
    assert whole.choices[0].text == text
    assert whole.usage.completion_tokens == 30
    chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == text
    assert chunks[-1].usage == whole.usage


def test_samples_are_seeded(client):
    ask = {
        "model": "storyteller",
        "prompt": "The dog",
        "max_tokens": 12,
        "temperature": 0.9,
        "seed": 3,
        "n": 2,
    }
    first, second = (client.completions.create(**ask) for _ in range(2))
    assert [choice.text for choice in first.choices] == [choice.text for choice in second.choices]


def test_errors_name_the_field(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="storyteller", prompt="x", max_tokens=-1)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError, match="storyteller"):
        client.completions.create(model="gpt-4", prompt="x")


def test_log_probabilities_and_echo_come_as_openais_client_expects_them(client):
    expected = LLM("storyteller").generate(
        "Once upon a", SamplingParams(temperature=0, max_tokens=6, logprobs=2)
    )
    sample = expected[0].outputs[0]
    ask = {"model": "storyteller", "prompt": "Once upon a", "temperature": 0, "max_tokens": 6, "echo": True}
    (whole,) = client.completions.create(**ask, logprobs=2).choices
    assert whole.text == "Once upon a" + sample.text
    assert "".join(whole.logprobs.tokens) == whole.text
    assert whole.logprobs.token_logprobs[0] is None
    shown = whole.logprobs.token_logprobs[-6:]
    scores = zip(sample.token_ids, sample.logprobs, strict=True)
    assert shown == pytest.approx([own[id].logprob for id, own in scores], abs=1e-4)
    (scored,) = client.completions.create(**ask | {"max_tokens": 0}, logprobs=2).choices
    assert (scored.text, scored.finish_reason) == ("Once upon a", "length")
    assert scored.logprobs.token_logprobs == pytest.approx(whole.logprobs.token_logprobs[:-6], abs=1e-4)


def test_more_output_than_the_model_sees_is_refused_with_both_numbers(client):
    """Offline it is shortened, as in vLLM."""
    length = LLM("storyteller").config.max_positions
    ask = {"model": "storyteller", "temperature": 0, "max_tokens": length + 1}
    says = f"max_tokens={length + 1} is more than max_model_len={length}"
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        client.completions.create(**ask, prompt="Once upon a time")
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError, match=says):
        client.chat.completions.create(**ask, messages=[{"role": "user", "content": "Hi"}])
    answer = client.completions.create(**ask | {"max_tokens": length}, prompt="Once upon a time", stop=".")
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"allowed_token_ids": [16, 265, 267]}, ". and the the the the the the the the the the"),
        ({"truncate_prompt_tokens": 2}, ", there was a little girl named Lily. She loved to"),
        ({"bad_words": ["Lily", "dog"]}, ", there was a little girl named Lucy. She was three"),
        ({"spaces_between_special_tokens": False}, ", there was a little girl named Lily. She loved to"),
    ],
)
def test_what_vllm_says(client, fields, text):
    """The answers of vLLM 0.32 with the same model. (To ["Lily", "girl"] it says " girl": it leaves out the
    spelling behind a space if the other has another number of tokens.)
    """
    ask = {"model": "storyteller", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
    answer = client.completions.create(**ask, extra_body=fields)
    assert answer.choices[0].text == text
    assert answer.usage.prompt_tokens == (2 if "truncate_prompt_tokens" in fields else 4)
    girl = client.completions.create(**ask, extra_body={"bad_words": ["Lily", "girl"]}).choices[0].text
    assert "girl" not in girl


def test_the_end_of_sequence_shows_only_if_it_is_asked_for(client):
    ask = {"model": "storyteller", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 400}
    shown = {}
    for include in (False, True):
        body = {"skip_special_tokens": False, "include_stop_str_in_output": include}
        answer = client.completions.create(**ask, extra_body=body)
        shown[include] = answer.choices[0].text
        assert answer.usage.completion_tokens == 143
    assert shown[False].endswith("to listen to her mom and dad.")
    assert shown[True] == shown[False] + "<|endoftext|>"


@pytest.mark.parametrize(
    ("value", "says"), [(-1, "from 0 to 20"), (21, "from 0 to 20"), (True, "integer"), ("5", "integer")]
)
def test_a_number_of_log_probabilities_that_is_none_is_a_400(client, value, says):
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        client.completions.create(model="storyteller", prompt="x", logprobs=value)
    assert caught.value.param == "logprobs"


def test_without_the_key_only_health_answers(address):
    with httpx.Client(base_url=address, timeout=DEADLINE, trust_env=False) as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/v1/models").status_code == 401


def test_a_server_that_cannot_start_says_why_in_one_line():
    command = [*SERVE, "--model", "no-such-model"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, timeout=DEADLINE, **OUTPUT)
    assert done.returncode == 1
    assert done.stdout.startswith("ruvon serve: model 'no-such-model' is neither")


def refusal(*arguments: str) -> str:
    """What Python will print on stderr, exiting with 1, for a SystemExit that holds a text."""
    with pytest.raises(SystemExit) as caught:
        app(["serve", "--port", "0", *arguments], prog_name="ruvon")
    assert isinstance(caught.value.code, str)
    return caught.value.code


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--api-key", ""], "API key is empty"),
        (["--api-key", "  "], "API key is empty"),
        (["--max-model-len", "0"], "max_model_len=0: at least 1"),
        (["--max-model-len", "-1"], "max_model_len=-1: at least 1"),
        (["--max-model-len", "100000"], "max_model_len=100000"),
        (["--max-num-seqs", "-5"], "max_num_seqs=-5: at least 1"),
        (["--max-num-batched-tokens", "0"], "max_num_batched_tokens=0: at least 1"),
        (["--max-num-seqs", "1000", "--max-num-batched-tokens", "10"], "max_num_seqs=1000 is more than"),
        (["--model", "./no/such/folder"], "no/such/folder"),
        (["--served-model-name", ""], "served_model_name='': 1 to 256"),
        (["--served-model-name", "a" * 257], "served_model_name='aaaa"),
        (["--served-model-name", "m" + " " * 300], "1 to 256 printable characters"),
        (["--served-model-name", "a\nb"], r"served_model_name='a\nb'"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_what_an_operator_gets_wrong_is_said_in_one_line_at_once(arguments, named, monkeypatch):
    monkeypatch.delenv("RUVON_API_KEY", raising=False)
    message = refusal(*arguments)
    assert message.startswith("ruvon serve: ")
    assert named in message
    assert "\n" not in message


def loads_nothing(args):
    raise AssertionError("the model is loaded, though nobody could reach it")


def test_a_port_in_use_is_said_before_the_model_is_loaded(monkeypatch):
    monkeypatch.setattr(engine.cli.serving, "build_engine", loads_nothing)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        hint = f"try --port {port + 1 if port < 65535 else port - 1}, or --port 0 for any that is free"
        assert refusal("--port", str(port)) == f"ruvon serve: port {port} of 127.0.0.1 is in use: {hint}"


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_host_that_is_not_this_machines_is_said_before_the_model_is_loaded(monkeypatch, host):
    monkeypatch.setattr(engine.cli.serving, "build_engine", loads_nothing)
    message = refusal("--host", host)
    assert message.startswith(f"ruvon serve: --host {host}: no address of this machine; 127.0.0.1 ")
    assert "\n" not in message


def test_nobody_takes_the_port_while_the_model_is_loaded_and_it_is_free_after_a_failure(monkeypatch):
    def load(args):
        with pytest.raises(OSError, match="in use"):
            engine.server.run.listen("127.0.0.1", port)
        raise ValueError("enough")

    monkeypatch.setattr(engine.cli.serving, "build_engine", load)
    port = lasting_port()
    assert refusal("--port", str(port)) == "ruvon serve: enough"
    for listener in engine.server.run.listen("127.0.0.1", port):
        listener.close()


OPTIONS = {
    "max_model_len": 100, "max_num_seqs": 3, "max_num_batched_tokens": 30, "kv_cache_memory_bytes": 1 << 20,
    "block_size": 8, "enable_prefix_caching": False, "swap_space": 0.5, "preemption_mode": "swap",
    "device": "cpu", "dtype": "float16", "load_format": "dummy", "attention": "tiled", "enforce_eager": True,
    "async_scheduling": False,
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, OPTIONS, {"kv_cache": "slots", "async_scheduling": True}])
def test_each_option_reaches_the_engine_and_what_is_left_out_is_the_engines_default(options, monkeypatch):
    built = []

    def build(args):
        built.append(args)
        raise ValueError("enough")

    monkeypatch.setattr(engine.cli.serving, "build_engine", build)
    arguments = []
    for name, value in options.items():
        flag = ("--" if value is not False else "--no-") + name.replace("_", "-")
        arguments += [flag] if isinstance(value, bool) else [flag, str(value)]
    assert refusal(*arguments) == "ruvon serve: enough"
    assert built == [EngineArgs(**options)]


def test_a_key_of_the_environment_may_not_be_empty_either(monkeypatch):
    monkeypatch.setenv("RUVON_API_KEY", "")
    assert "API key is empty" in refusal()


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_file_that_cannot_be_read_is_said_in_one_line(tmp_path, file):
    folder = Path(shutil.copytree(ZOO / "storyteller-draft", tmp_path / "model"))
    (folder / file).unlink()
    (folder / file).mkdir()
    message = refusal("--model", str(folder))
    assert message.startswith(f"ruvon serve: {folder}")
    assert "\n" not in message


@pytest.mark.parametrize(("host", "extra", "checked"), [
    ("127.0.0.1", [], ["localhost", "127.0.0.1", "[::1]"]),
    ("localhost", ["--allowed-host", "x.example"], ["localhost", "127.0.0.1", "[::1]", "x.example"]),
    ("::1", [], ["localhost", "127.0.0.1", "[::1]"]),
    ("0.0.0.0", [], []),
    ("0.0.0.0", ["--allowed-host", "x.example"], ["localhost", "127.0.0.1", "[::1]", "x.example"]),
])  # fmt: skip
def test_which_names_it_answers_to_follows_from_where_it_listens(monkeypatch, host, extra, checked):
    made = {}
    monkeypatch.delenv("RUVON_API_KEY", raising=False)
    monkeypatch.setattr(engine.cli.serving, "create_app", lambda backend, **settings: made.update(settings))
    monkeypatch.setattr(engine.cli.serving, "max_connections", lambda: 60)
    monkeypatch.setattr(engine.server.run, "serve", lambda app, host, port, **_: made.update(host=host))
    monkeypatch.setattr(engine.server.run, "listen", lambda host, port: [])  # not every machine has IPv6
    with pytest.raises(SystemExit) as caught:
        app(["serve", "--model", "storyteller-draft", "--host", host, *extra], prog_name="ruvon")
    assert caught.value.code in (0, None)
    assert (made["host"], made["allowed_hosts"]) == (host, checked)
    assert made["api_key"] is None
    assert made["max_requests"] == 30, "half of the connections are left for other requests"


def test_the_environments_key_and_a_patience_of_nothing_are_taken(monkeypatch):
    made = {}
    monkeypatch.setenv("RUVON_API_KEY", "secret")
    monkeypatch.setattr(engine.cli.serving, "create_app", lambda backend, **settings: made.update(settings))
    monkeypatch.setattr("engine.server.shutdown.DrainingServer", lambda config, backend, grace: grace)
    monkeypatch.setattr(engine.cli.serving, "max_connections", lambda: 1)
    run = lambda app, host, port, make_server, sockets: made.update(grace=make_server(None))  # noqa: E731
    monkeypatch.setattr("engine.server.run.serve", run)
    flags = ["--model", "storyteller-draft", "--shutdown-timeout", "0", "--port", "0"]
    with pytest.raises(SystemExit):
        app(["serve", *flags], prog_name="ruvon")
    assert (made["api_key"], made["grace"]) == ("secret", 0)
    assert made["max_requests"] == 1, "however few files the system lends, one is answered"


def test_what_clients_are_told_of_a_folder_is_its_name_alone(tmp_path, monkeypatch):
    """An embedded model's name means that model, whatever lies here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "storyteller").symlink_to("mine")
    names = {given: public_name(given) for given in ("storyteller", "./storyteller", "mine", "owner/other")}
    assert list(names.values()) == ["storyteller", "mine", "mine", "owner/other"]
    assert public_name(tmp_path / "mine") == "mine"


def test_the_chat_template_comes_with_the_tokenizer(tmp_path):
    shutil.copy(ZOO / "storyteller-draft" / "config.json", tmp_path)
    args = EngineArgs(model=tmp_path, tokenizer="storyteller", load_format="dummy")
    assert engine.cli.serving.Service(args).template is not None


def test_a_module_of_this_tree_that_is_missing_is_no_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "engine.server.shutdown", None)
    with pytest.raises(ModuleNotFoundError, match=r"engine\.server\.shutdown"):
        app(["serve"], prog_name="ruvon", standalone_mode=False)
