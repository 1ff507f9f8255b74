"""`ruvon` takes its arguments as `vllm` does: a model without --model, underscores, 2K, several values."""

import json
import shutil
from pathlib import Path

import httpx
import pytest

import engine.cli.serving
from engine import LLM, EngineArgs
from engine.cli.main import app
from engine.cli.options import whole_number
from engine.cli.serve_flags import NEUTRAL_FLAGS, ServeFlags
from engine.cli.serving import Service
from engine.models.checkpoint import ZOO
from engine.server.app import create_app
from engine.wiring.neutral_options import NEUTRAL
from tests.part04.serving import ScriptedBackend, serve
from tests.system.test_commands import refusal, said

ADAPTERS = Path(__file__).parents[2] / "adapters"
SMALL = EngineArgs(model="storyteller-draft", max_num_seqs=2)
TEMPLATE = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"


def flags_of(monkeypatch, *arguments: str) -> tuple[EngineArgs, ServeFlags]:
    """What a command would have served."""
    got = []

    def service(args: EngineArgs, flags: ServeFlags) -> None:
        got.append((args, flags))
        raise ValueError("enough")

    monkeypatch.setattr(engine.cli.serving, "Service", service)
    assert refusal("serve", "--port", "0", *arguments) == "ruvon serve: enough"
    return got[0]


def built(monkeypatch, *arguments: str) -> EngineArgs:
    """The options with which a command would have made its engine."""
    made = []

    def build(args: EngineArgs) -> None:
        made.append(args)
        raise ValueError("enough")

    monkeypatch.setattr(engine.cli.serving, "build_engine", build)
    assert refusal("serve", "--port", "0", *arguments) == "ruvon serve: enough"
    return made[0]


def test_a_model_is_named_without_a_flag(monkeypatch, capsys):
    assert built(monkeypatch, "storyteller-draft").model == "storyteller-draft"
    assert (
        built(monkeypatch, "storyteller-draft", "--model", "storyteller-draft").model == "storyteller-draft"
    )
    assert built(monkeypatch).model == "storyteller"
    short = ["--max-tokens", "30"]
    expected = said(capsys, "generate", "The dog", "--model", "storyteller-draft", *short)
    assert said(capsys, "generate", "storyteller-draft", "The dog", *short) == expected
    assert said(capsys, "generate", *short, "The dog") != expected, "the default's"
    sizes = ["--input-len", "2", "--output-len", "1", "--num-prompts", "1"]
    assert "Total num prompt tokens:  2" in said(capsys, "bench", "throughput", "storyteller-draft", *sizes)


@pytest.mark.parametrize("other", ["storyteller", "gpt2"])
def test_two_models_are_refused(other):
    message = refusal("serve", "storyteller-draft", "--model", other)
    assert message == f"ruvon serve: MODEL storyteller-draft and --model {other}: one of them is accepted"
    assert "quotation marks" in refusal("generate", "Once", "upon", "a", "time")


def test_flags_may_have_underscores_and_short_names(monkeypatch):
    args = built(monkeypatch, "--max_model_len=100", "--no_enable_prefix_caching", "-q", "int8")
    assert args == EngineArgs(max_model_len=100, enable_prefix_caching=False, quantization="int8")
    assert built(monkeypatch, "-tp", "2").tensor_parallel_size == 2


@pytest.mark.parametrize(
    ("text", "number"),
    [("7", 7), ("-1", -1), ("1k", 1000), ("2K", 2048), ("1.5k", 1500), ("25.6k", 25600), ("1m", 10**6),
     ("3M", 3 << 20), ("1g", 10**9), ("1G", 1 << 30), ("2t", 2 * 10**12), ("1T", 1 << 40)],
)  # fmt: skip
def test_numbers_with_a_letter_are_vllms(text, number):
    assert whole_number(text) == number


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.5K", "1 k", "1kk", "1e3", "0x10", "inf", "1,000"])
def test_other_numbers_are_refused_with_what_is_accepted(text, capsys):
    assert refusal("serve", "--max-model-len", text) == "2"
    words = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "--max-model-len" in words
    assert "2K (2,048) and 1.5k (1,500)" in words


def test_lengths_take_letters_wherever_they_are_given(monkeypatch):
    assert built(monkeypatch, "--max-model-len", "1K", "--kv-cache-memory-bytes", "2M") == EngineArgs(
        max_model_len=1024, kv_cache_memory_bytes=2 << 20
    )
    _, flags = flags_of(monkeypatch, "--max-num-queued-tokens", "4k")
    assert flags.max_num_queued_tokens == 4000


def test_an_option_takes_several_values_up_to_the_next_option(monkeypatch):
    lists = ["--lora_modules", "a=b", "c=d", "--served-model-name", "x", "y", "--served-model-name=z"]
    args, flags = flags_of(monkeypatch, "storyteller-draft", *lists, "--allowed-host", "one", "two")
    assert args.model == "storyteller-draft"
    assert flags == ServeFlags(
        port=0, lora_modules=["a=b", "c=d"], served_model_name=["x", "y", "z"], allowed_host=["one", "two"]
    )
    words = refusal("bench", "serve", "--goodput", "ttft:500", "tpot:x")
    assert words.startswith("ruvon bench serve: --goodput ttft:500 tpot:x: ")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"served_model_name": "x"}, "served_model_name='x': a list"),
        ({"lora_modules": "a=b"}, "lora_modules='a=b': a list"),
        ({"root_path": "llm"}, "root_path='llm': a path such as /llm"),
        ({"root_path": "/llm/"}, "root_path='/llm/'"),
    ],
)
def test_flags_of_a_file_are_checked_too(flags, words):
    """Ray Serve's configuration gives them as YAML."""
    with pytest.raises(ValueError, match=words):
        ServeFlags(**flags)


def test_all_names_answer_and_metrics_have_the_first():
    args = EngineArgs(model="storyteller-draft", enable_lora=True)
    modules = [f"poetry={ADAPTERS / 'poetry'}"]
    with pytest.raises(ValueError, match="lora_name='two': that is the base model"):
        Service(
            args, ServeFlags(served_model_name=["one", "two"], lora_modules=[f"two={ADAPTERS / 'poetry'}"])
        )
    args = EngineArgs(model="storyteller", enable_lora=True)
    service = Service(args, ServeFlags(served_model_name=["one", "two", "one"], lora_modules=modules))
    app = service.app([], None, False, None)
    with serve(app) as url, httpx.Client(base_url=url, timeout=240) as client:
        cards = client.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["one", "two", "poetry"]
        assert [card.get("parent") for card in cards] == [None, None, "one"]
        ask = {"prompt": "Once upon", "max_tokens": 4, "temperature": 0}
        answers = [
            client.post("/v1/completions", json=ask | {"model": name}).json()
            for name in ("one", "two", "poetry")
        ]
        texts = [answer["choices"][0]["text"] for answer in answers]
        assert [answer["model"] for answer in answers] == ["one", "one", "poetry"], "the first, as in vLLM"
        assert texts[0] == texts[1] != texts[2]
        assert client.post("/v1/completions", json=ask | {"model": "three"}).status_code == 404
        metrics = client.get("/metrics").text
    assert 'model_name="one"' in metrics
    assert 'model_name="two"' not in metrics


@pytest.mark.parametrize("kind", ["file", "text"])
def test_a_chat_template_may_be_given_as_a_file_or_as_text(kind, tmp_path):
    """Its special tokens are the model's, though this model has no template of its own."""
    folder = Path(shutil.copytree(ZOO / "storyteller", tmp_path / "model"))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = folder / "tokenizer_config.json"
    config.write_text('{"eos_token": "<|endoftext|>"}')
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    given = str(tmp_path / "own.jinja") if kind == "file" else TEMPLATE
    args = EngineArgs(model=folder)
    assert Service(args).template is None
    service = Service(args, ServeFlags(chat_template=given))
    assert service.template.render([{"role": "user", "content": "Hi"}]) == "Hi<|endoftext|>"
    with serve(service.app([], None, False, None)) as url:
        ask = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        ask["model"] = "model"
        answer = httpx.post(f"{url}/v1/chat/completions", json=ask, timeout=240).json()
    assert answer["usage"]["prompt_tokens"] == len(LLM(folder).tokenizer.encode("Hi")) + 1
    message = refusal("serve", str(folder), "--port", "0", "--chat-template", "nowhere.jinja")
    assert message == "ruvon serve: nowhere.jinja: no such file"


def test_behind_a_proxys_path_both_paths_answer_and_the_key_guards_the_same():
    app = create_app(ScriptedBackend(), api_key="secret", root_path="/llm")
    key = {"Authorization": "Bearer secret"}
    with serve(app) as url, httpx.Client(base_url=url, timeout=240) as client:
        for prefix in ("", "/llm"):
            assert client.get(f"{prefix}/health").status_code == 200
            assert client.get(f"{prefix}/v1/models").status_code == 401
            assert client.get(f"{prefix}/v1/models", headers=key).status_code == 200
        assert client.get("/llm/llm/health", headers=key).status_code == 404
        assert client.get("/other/health", headers=key).status_code == 404
        assert client.get("/openapi.json", headers=key).json()["servers"] == [{"url": "/llm"}]


def test_the_flag_gives_the_path_to_the_app(monkeypatch):
    made = {}
    monkeypatch.setattr(engine.cli.serving, "create_app", lambda backend, **settings: made.update(settings))
    monkeypatch.setattr("engine.server.run.serve", lambda *_, **settings: None)
    with pytest.raises(SystemExit):
        app(["serve", "storyteller-draft", "--port", "0", "--root-path", "/llm"], prog_name="ruvon")
    assert made["root_path"] == "/llm"


@pytest.mark.parametrize("flag", [*NEUTRAL_FLAGS, *NEUTRAL])
def test_a_flag_of_vllms_is_accepted_where_it_asks_for_nothing(flag, monkeypatch):
    for value in (NEUTRAL_FLAGS | NEUTRAL)[flag][0]:
        name = flag.replace("_", "-")
        if isinstance(value, bool):
            flags_of(monkeypatch, f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            flags_of(monkeypatch, f"--{name}", value if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tool_parser_plugin", "x.py"], "is accepted: no code is run that a flag names"),
        (["--ssl-keyfile", "key.pem"], "--ssl-keyfile key.pem is not accepted: a proxy in front"),
        (["--allowed-origins", '["*"]'], "pages of other sites may not"),
        (["--api-server-count", "2"], "--api-server-count 2: 1 is accepted: one process"),
        (["--chat-template-content-format", "openai"], "openai: auto, string is accepted"),
        (["--uvicorn-log-level", "debug"], "debug: info is accepted"),
        (["--disable-uvicorn-access-log"], "each request has a line"),
        (["--trust-remote-code"], "--trust-remote-code is not accepted: no code of a model's is run here"),
        (["--no-enable-chunked-prefill"], "computed in chunks"),
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype fp8: auto is accepted"),
        (["--pipeline_parallel_size", "2"], "--pipeline-parallel-size 2: 1 is accepted"),
    ],
)
def test_another_value_is_refused_with_the_reason(arguments, words):
    message = refusal("serve", "--port", "0", *arguments)
    assert message.startswith("ruvon serve: ")
    assert words in message


@pytest.mark.parametrize("adapters", [False, True])
def test_a_streams_interval_reaches_the_engines_thread(adapters):
    args = EngineArgs(model="storyteller-draft", max_num_seqs=2, enable_lora=adapters)
    service = Service(args, ServeFlags(stream_interval=5))
    assert service.engine_thread.stream_interval == 5


def test_a_neutral_number_may_have_a_point_on_the_command_line_as_in_python(monkeypatch):
    assert built(monkeypatch, "--cpu-offload-gb", "0.0", "--max-logprobs=20.0") == EngineArgs(
        cpu_offload_gb=0.0, max_logprobs=20.0
    )
    with pytest.raises(ValueError, match=r"trust_remote_code=0\.0: False is accepted"):
        EngineArgs(trust_remote_code=0.0)
