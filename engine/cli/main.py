"""The command `ruvon`. Part 20's wiring."""

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from engine.checkpoint import CheckpointError, embedded_models

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="An LLM inference engine, in twenty parts."
)

LOCAL_NAMES = ["localhost", "127.0.0.1", "[::1]"]

ModelName = Annotated[
    str, typer.Option(help=f"Embedded ({', '.join(embedded_models())}), a folder, or a hub id.")
]
Device = Annotated[str, typer.Option(help="auto (a CUDA GPU, if there is one), cpu, cuda, cuda:1, …")]
DType = Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")]
Attention = Annotated[
    str,
    typer.Option(
        help="How attention is computed: eager, tiled, sdpa, or triton (a CUDA GPU); auto: triton, else sdpa."
    ),
]
LoadFormat = Annotated[str, typer.Option(help="auto, safetensors, pt, or dummy (random weights).")]


def _one_thread_if_small(model: str) -> None:
    """A small model's step is too short to share: its threads would mostly wait for one another."""
    import torch

    from engine.config import ModelConfig

    if ModelConfig.from_pretrained(model).hidden_size <= 512:
        torch.set_num_threads(1)


def _json_mapping(option: str, text: str | None) -> dict | None:
    """Raises ValueError, which names the option."""
    if text is None:
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{option}: not JSON: {error}") from None


def _public_name(model: str) -> str:
    """What clients are told of a model: of a folder, not where it is."""
    folder = Path(model).expanduser()
    return model if model in embedded_models() or not folder.is_dir() else folder.resolve().name


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    model: ModelName = "storyteller",
    max_tokens: Annotated[int, typer.Option(help="At most this many tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Choose among this many tokens; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Choose among the likeliest that reach this probability.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    device: Device = "auto",
    dtype: DType = "auto",
    load_format: LoadFormat = "auto",
    attention: Attention = "auto",
) -> None:
    """Continue PROMPT: the text alone on stdout, as it is generated; everything else on stderr."""
    from engine.decoding.params import SamplingParams
    from engine.llm import LLM

    try:
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
        )
        _one_thread_if_small(model)
        llm = LLM(
            model,
            device=device,
            dtype=dtype,
            load_format=load_format,
            max_num_seqs=1,
            attention=attention,
        )
        shown = 0
        for output in llm.stream(prompt, params):
            text = output.outputs[0].text
            print(text[shown:], end="", flush=True)
            shown = len(text)
    except (CheckpointError, ValueError) as error:
        sys.exit(f"ruvon: {error}")
    print(flush=True)
    completion = output.outputs[0]
    print(f"{len(completion.token_ids)} tokens, finish_reason {completion.finish_reason}", file=sys.stderr)


@app.command()
def serve(
    model: ModelName = "storyteller",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None, typer.Option(help="Clients must send it; default: RUVON_API_KEY, if set.")
    ] = None,
    allow_priority: Annotated[
        bool, typer.Option("--allow-priority", help="Clients may set priority, -2 (first) to 2.")
    ] = False,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model; default: as given, a folder's last name.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A name clients reach this server by, beside localhost's.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt plus output, in tokens.")] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Requests running at once; default: 16, on a GPU 256.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens in one step; default: 512, on a GPU 8192.")
    ] = None,
    max_num_queued_reqs: Annotated[
        int | None, typer.Option(help="Sequences admitted, waiting and running; default: 16 times the seats.")
    ] = None,
    max_num_queued_tokens: Annotated[
        int | None, typer.Option(help="Their prompts and longest outputs; default: 16 times the cache.")
    ] = None,
    request_timeout: Annotated[
        float | None, typer.Option(help="Seconds for a request, from its arrival; default: no bound.")
    ] = None,
    shutdown_timeout: Annotated[
        float | None,
        typer.Option(help="For answers under way, after Ctrl-C or SIGTERM; default: 10.", min=0, max=3600),
    ] = None,
    kv_cache: Annotated[str, typer.Option(help="Keys and values: paged, or slots.")] = "paged",
    kv_cache_memory_bytes: Annotated[
        int | None, typer.Option(help="Bytes for them; default: by what is free.")
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens in a block of pages; default: 16.")] = None,
    enable_prefix_caching: Annotated[
        bool | None, typer.Option(help="Compute the beginning of a prompt once; default: with pages.")
    ] = None,
    swap_space: Annotated[float, typer.Option(help="GiB of CPU memory for preempted requests.")] = 0,
    preemption_mode: Annotated[
        str | None, typer.Option(help="recompute, or swap; default: by length.")
    ] = None,
    device: Device = "auto",
    dtype: DType = "auto",
    load_format: LoadFormat = "auto",
    attention: Attention = "auto",
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="Launch each kernel by itself: no CUDA graphs.")
    ] = False,
    async_scheduling: Annotated[
        bool | None,
        typer.Option(help="Launch a step before the last one's tokens are read; default: on a GPU."),
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            help='As JSON: {"model": "storyteller-draft", "num_speculative_tokens": 4}, or a method.'
        ),
    ] = None,
    price_per_hour: Annotated[
        str | None,
        typer.Option(help="Dollars for an hour of the device; answers then say what they cost."),
    ] = None,
    api_price: Annotated[
        str | None,
        typer.Option(help="To compare: dollars for a million tokens elsewhere, as cached,input,output."),
    ] = None,
    cost_log: Annotated[
        str | None, typer.Option(help="A CSV file that gets a line for each request that has ended.")
    ] = None,
    cost_weights: Annotated[
        str | None,
        typer.Option(help="Nanoseconds a token adds to a step, as input,output,held (see Part 19)."),
    ] = None,
) -> None:
    """Serve OpenAI's API over HTTP until Ctrl-C, with a chat page at /, /metrics and a live /dashboard."""
    try:
        from engine.server.admission import Admission
        from engine.server.admission_metrics import AdmissionMetrics
        from engine.server.app import create_app
        from engine.server.chat import Chat, chat
        from engine.server.chat_page import OPEN_PATHS as CHAT_PATHS
        from engine.server.chat_page import chat_page
        from engine.server.deadline import deadlines
        from engine.server.generate import generate as generate_route
        from engine.server.limits import MAX_REQUESTS, SHUTDOWN_SECONDS
        from engine.server.priced import priced
        from engine.server.room import Room, queue_limits
        from engine.server.run import max_connections
        from engine.server.run import serve as run
        from engine.server.scored import ScoredCompletions
        from engine.server.shutdown import DrainingServer
        from engine.server.watch import StepWatch
        from engine.speculation.executor import SpeculativeExecutor
        from engine.speculation.metrics import SpeculationMetrics
        from engine.telemetry.cost_shown import Costs
        from engine.telemetry.metrics import EngineMetrics
        from engine.telemetry.routes import OPEN_PATHS, telemetry
    except ModuleNotFoundError as error:
        sys.exit(f"ruvon serve: {error.name} is not installed; pip install 'ruvon[server]'")
    from engine.async_engine import AsyncLLMEngine
    from engine.chat_template import ChatTemplate
    from engine.llm import EngineArgs, build_engine

    try:
        _one_thread_if_small(model)
        args = EngineArgs(
            model=model,
            device=device,
            dtype=dtype,
            load_format=load_format,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            attention=attention,
            kv_cache=kv_cache,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            swap_space=swap_space,
            preemption_mode=preemption_mode,
            enforce_eager=enforce_eager,
            async_scheduling=async_scheduling,
            speculative_config=_json_mapping("--speculative-config", speculative_config),
        )
        key = os.environ.get("RUVON_API_KEY") if api_key is None else api_key
        if key is not None and not key.strip():
            raise ValueError(
                "the API key is empty; leave out --api-key and RUVON_API_KEY to serve without one"
            )
        template = ChatTemplate.from_pretrained(args.tokenizer or model)
        costs = Costs.parse(price_per_hour, api_price, cost_log, cost_weights)
        engine, name = build_engine(args), served_model_name or _public_name(model)
        running, cache = AsyncLLMEngine(engine, name), engine.scheduler.cache
        limits = queue_limits(
            engine.scheduler.max_num_seqs,
            cache.usage().tokens_total,
            engine.max_model_len,
            max_num_queued_reqs,
            max_num_queued_tokens,
        )
        backend = Admission(running, Room(limits), request_timeout, StepWatch(engine))
    except (CheckpointError, ValueError) as error:
        sys.exit(f"ruvon serve: {error}")
    # A page in a browser may reach this machine under a name of its own, whose address it changes (DNS
    # rebinding): who serves this machine alone is asked for by this machine's names.
    local = host in LOCAL_NAMES or f"[{host}]" in LOCAL_NAMES
    hosts = [*LOCAL_NAMES, *(allowed_host or ())] if local or allowed_host else []
    metrics = EngineMetrics(engine, name)
    metrics.registry.register(AdmissionMetrics(backend, engine.scheduler, name))
    if isinstance(engine.executor, SpeculativeExecutor):
        metrics.registry.register(SpeculationMetrics(engine.executor.tally, name))
    completions, chats = ScoredCompletions, Chat
    if costs:
        costs.begin(engine, metrics)
        completions, chats = (priced(shape, costs.price, costs.api_price) for shape in (completions, chats))
    app = create_app(
        backend,
        extensions=[
            deadlines,
            telemetry(metrics),
            chat(engine.tokenizer, engine.config, template, allow_priority, chats),
            generate_route,
            chat_page,
        ],
        api_key=key,
        open_paths=OPEN_PATHS | CHAT_PATHS,
        allowed_hosts=hosts,
        max_requests=min(MAX_REQUESTS, max_connections() // 2),
        shape=completions(engine.tokenizer, allow_priority),
    )
    grace = SHUTDOWN_SECONDS if shutdown_timeout is None else shutdown_timeout
    try:
        run(app, host, port, make_server=lambda config: DrainingServer(config, backend, grace))
    finally:
        if costs:
            costs.end()


@app.command()
def chat(
    question: Annotated[
        str | None, typer.Argument(help="Ask this and print the answer alone; default: a conversation.")
    ] = None,
    url: Annotated[str, typer.Option(help="Any server with OpenAI's chat API.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the server's first.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Default: RUVON_API_KEY, if set.", envvar="RUVON_API_KEY")
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the server's.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Of an answer, at most; default: the server's.")
    ] = None,
) -> None:
    """Talk to a model: words as they come, Ctrl-C stops an answer. A question may come through a pipe."""
    from rich.console import Console

    from engine.client.stream import ChatClient, ChatFailed
    from engine.client.terminal import Chat

    wishes = {"temperature": temperature, "max_completion_tokens": max_tokens}
    given = {name: value for name, value in wishes.items() if value is not None}
    if question is None and not sys.stdin.isatty():
        question = sys.stdin.read().strip()
    try:
        with closing(ChatClient(url, api_key, model)) as client:
            talk = Chat(client, Console(highlight=False), system, **given)
            if question is None:
                talk.run()
            else:
                talk.ask(question)
    except ChatFailed as error:
        sys.exit(f"ruvon chat: {error}")


@app.command()
def ui(
    url: Annotated[str, typer.Option(help="Any server with OpenAI's chat API.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(help="Default: RUVON_API_KEY, if set.")] = None,
    port: Annotated[int, typer.Option(help="Where the page is.", min=1, max=65535)] = 8501,
) -> None:
    """The chat as a Streamlit page on this machine, until Ctrl-C."""
    if importlib.util.find_spec("streamlit") is None:
        sys.exit("ruvon ui: streamlit is not installed; pip install 'ruvon[ui]'")
    page = Path(__file__).parents[1] / "client" / "streamlit_page.py"
    options = ["--server.address=127.0.0.1", f"--server.port={port}", "--server.headless=true"]
    options += ["--browser.gatherUsageStats=false"]  # else it reports to its makers
    environment = os.environ | {"RUVON_URL": url} | ({"RUVON_API_KEY": api_key} if api_key else {})
    try:
        sys.exit(subprocess.call([sys.executable, "-m", "streamlit", "run", page, *options], env=environment))
    except KeyboardInterrupt:  # Streamlit has had it, too
        pass


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="Where the server is.")] = "http://127.0.0.1:8000",
    once: Annotated[bool, typer.Option("--once", help="Show the board once, and end.")] = False,
) -> None:
    """Watch a running server: tokens per second, latencies, queue and memory, until Ctrl-C."""
    from rich.console import Console

    from engine.telemetry.top import NoAnswer
    from engine.telemetry.top import top as watch

    try:
        watch(url, Console(highlight=False), enough=lambda: once)
    except NoAnswer as error:
        sys.exit(f"ruvon top: {error}")
    except KeyboardInterrupt:
        pass


@app.command()
def demo(model: ModelName = "storyteller", max_tokens: int = 220, attention: Attention = "auto") -> None:
    """The main job: load a model, show tokens and ids, stream a story, show how fast."""
    from engine.cli.demo import run

    try:
        _one_thread_if_small(model)
        run(model, max_tokens, attention)
    except (CheckpointError, ValueError) as error:
        sys.exit(f"ruvon: {error}")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def parts(context: typer.Context) -> None:
    """The series: list, show, run, test, start, history (needs a checkout of the repository)."""
    from engine.cli.series import run

    sys.exit(run(context.args))


if __name__ == "__main__":
    app()
