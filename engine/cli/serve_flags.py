"""The flags of the commands that start a server, in addition to those of `EngineArgs`. Part 20's wiring.

`ServeFlags` declares each flag once, as a field: its type, its help and its default. `takes_flags` gives a
command all flags of such a class. NEUTRAL_FLAGS lists flags of vLLM's server that do not exist here.
"""

import inspect
import os
import re
from collections.abc import Callable
from dataclasses import Field, dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

from engine.cli.options import flag, refusals, set_parameters, whole_number
from engine.wiring.engine_args import ADAPTERS
from engine.wiring.extensions import EXTENSIONS, STRUCTURED_OUTPUT, is_here
from engine.wiring.neutral_options import Neutral

LAST_PORT = 65535
ACCESS = "Who may ask, and where"  # headings in the help
LIMITS = "How much is taken on"
STREAMS = "How answers are streamed"
TOOLS = "Tools and thoughts"
LOG = "What it says of itself"
COSTS = "What it costs"


@dataclass(frozen=True)
class ServeFlags:
    """The flags of `ruvon serve` beside those of the engine. Each field is a flag. Raises ValueError for a
    text where a list is expected, for Extension B's flags without its files, and if `root_path` is no path.
    """

    host: Annotated[str, flag(ACCESS, "Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, flag(ACCESS, "Port to listen on; 0: any free one.", min=0, max=LAST_PORT)] = 8000
    api_key: Annotated[
        str | None, flag(ACCESS, "Key that clients must send; default: RUVON_API_KEY, if set.")
    ] = None
    allow_priority: Annotated[
        bool, flag(ACCESS, "Clients may set priority, -2 (first) to 2.", "--allow-priority")
    ] = False
    served_model_name: Annotated[
        list[str] | None,
        flag(
            ACCESS,
            "What clients call the model, one name or several; default: --model, of a path its end.",
        ),
    ] = None
    chat_template: Annotated[
        str | None, flag(ACCESS, "A file with a chat template, or its text; default: the model's own.")
    ] = None
    root_path: Annotated[
        str, flag(ACCESS, "The path under which a proxy shows this server, such as /llm.")
    ] = ""
    allowed_host: Annotated[
        list[str] | None, flag(ACCESS, "A name clients reach this server by, beside localhost's.")
    ] = None
    max_num_queued_reqs: Annotated[
        int | None,
        flag(
            LIMITS, "Sequences admitted, waiting and running; default: 16 times --max-num-seqs, at least 256."
        ),
    ] = None
    max_num_queued_tokens: Annotated[
        int | None,
        flag(
            LIMITS,
            "Tokens of their prompts and longest outputs (vLLM counts prompts alone); default: 16 times the "
            "cache, at least 128 times --max-model-len.",
            parser=whole_number,
            metavar="INTEGER",
        ),
    ] = None
    request_timeout: Annotated[
        float | None, flag(LIMITS, "Seconds for a request, from its arrival; default: no bound.")
    ] = None
    shutdown_timeout: Annotated[
        float | None,
        flag(LIMITS, "Seconds for answers under way, after Ctrl-C or SIGTERM; default: 10.", min=0, max=3600),
    ] = None
    stream_interval: Annotated[
        int, flag(STREAMS, "Tokens from one event of a stream to the next; the first comes at once.", min=1)
    ] = 1
    lora_modules: Annotated[
        list[str] | None,
        flag(ADAPTERS, "Adapters from the start, each as name=folder."),
    ] = None
    lora_dir: Annotated[
        Path | None,
        flag(ADAPTERS, "Clients may load and unload adapters in this folder, by name; default: none."),
    ] = None
    enable_auto_tool_choice: Annotated[
        bool,
        flag(
            TOOLS,
            "The model may choose to call a request's tools; needs --tool-call-parser.",
            "--enable-auto-tool-choice",
            hidden=not is_here(STRUCTURED_OUTPUT),
        ),
    ] = False
    tool_call_parser: Annotated[
        str | None,
        flag(
            TOOLS,
            "How the model writes calls: hermes, llama3_json or json.",
            hidden=not is_here(STRUCTURED_OUTPUT),
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        flag(
            TOOLS,
            "How the model writes thoughts: qwen3; default: they are content.",
            hidden=not is_here(STRUCTURED_OUTPUT),
        ),
    ] = None
    disable_log_stats: Annotated[
        bool, flag(LOG, "No line of what the engine did, every ten seconds of work.", "--disable-log-stats")
    ] = False
    price_per_hour: Annotated[
        str | None, flag(COSTS, "Dollars for an hour of the device; answers then say what they cost.")
    ] = None
    api_price: Annotated[
        str | None,
        flag(COSTS, "To compare: dollars for a million tokens elsewhere, as cached,input,output."),
    ] = None
    cost_log: Annotated[
        str | None, flag(COSTS, "A CSV file that gets a line for each request that has ended.")
    ] = None
    cost_weights: Annotated[
        str | None, flag(COSTS, "Nanoseconds a token adds to a step, as input,output,held (see Part 19).")
    ] = None

    def __post_init__(self) -> None:
        # Ray Serve's configuration may give a text. It would be read as a list of its characters.
        for name in ("served_model_name", "lora_modules", "allowed_host"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name}={getattr(self, name)!r}: a list is accepted")
        for name in ("enable_auto_tool_choice", "tool_call_parser", "reasoning_parser"):
            if getattr(self, name) and not is_here(STRUCTURED_OUTPUT):
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: comes with Extension B "
                    f"({EXTENSIONS[STRUCTURED_OUTPUT]}), whose files are not here"
                )
        if self.root_path and not re.fullmatch(r"(/[\w.~%-]+)+", self.root_path):
            raise ValueError(f"root_path={self.root_path!r}: a path such as /llm is accepted")

    def key(self) -> str | None:
        """The API key, from the flag or from RUVON_API_KEY; None if neither is set. Raises ValueError if the
        key is empty.
        """
        key = os.environ.get("RUVON_API_KEY") if self.api_key is None else self.api_key
        if key is not None and not key.strip():
            raise ValueError(
                "the API key is empty; leave out --api-key and RUVON_API_KEY to serve without one"
            )
        return key


NOT_LOGGED = "no request and no answer is logged"
PROXY = "a proxy in front of the server does this; --root-path and --allowed-host name where it shows it"
# vLLM's flags that do not exist here. An accepted value asks for nothing, or for what is always done.
NEUTRAL_FLAGS: dict[str, Neutral] = {
    "tool_parser_plugin": Neutral((None, ""), "no code is run that a flag names"),
    "reasoning_parser_plugin": Neutral((None, ""), "no code is run that a flag names"),
    "enable_request_id_headers": Neutral((False, True), "each answer has X-Request-Id"),
    "enable_prompt_tokens_details": Neutral((False, True), "each answer's usage says it"),
    "enable_force_include_usage": Neutral(
        (False,), "a stream's usage is asked for by stream_options.include_usage"
    ),
    "return_tokens_as_token_ids": Neutral((False,), "a request asks for it by the field of this name"),
    "trust_request_chat_template": Neutral(
        (False,), "the operator's --chat-template is the only other template"
    ),
    "chat_template_content_format": Neutral(("auto", "string"), "contents are texts"),
    "response_role": Neutral(("assistant",), "answers are the assistant's"),
    "api_server_count": Neutral((1,), "one process serves; ruvon cluster starts several (Extension A)"),
    "uvicorn_log_level": Neutral(("info",), "the log is written to stderr, from level info on"),
    "disable_uvicorn_access_log": Neutral((False,), "each request has a line in the log"),
    "enable_log_outputs": Neutral((False,), NOT_LOGGED),
    "disable_log_requests": Neutral((False, True), NOT_LOGGED),
    "max_log_len": Neutral((None,), NOT_LOGGED),
    "disable_fastapi_docs": Neutral((False,), "no page of the server loads anything from another host"),
    "enable_server_load_tracking": Neutral((False,), "/metrics has vllm:num_requests_running and _waiting"),
    "allowed_origins": Neutral((None,), f"pages of other sites may not use this server; {PROXY}"),
    "allow_credentials": Neutral((False,), PROXY),
    "ssl_keyfile": Neutral((None,), PROXY),
    "ssl_certfile": Neutral((None,), PROXY),
    "ssl_ca_certs": Neutral((None,), PROXY),
    "middleware": Neutral((None, []), "no code is run that a flag names"),
    "config": Neutral((None,), "flags are given on the command line"),
}


def takes_flags(parameter: str, record: type) -> Callable[[Callable], Callable]:
    """Decorate `command(parameter: record, …)`: the command gets a flag for each field of the dataclass
    `record`, in place of `parameter`. A ValueError that `record` raises ends the command with exit status 1
    and its message.
    """

    def decorate(command: Callable) -> Callable:
        @wraps(command)
        def from_flags(**flag_values: Any) -> None:
            record_values = {}
            for spec in fields(record):
                record_values[spec.name] = flag_values.pop(spec.name)
            with refusals(command.__name__):
                flag_values[parameter] = record(**record_values)
            command(**flag_values)

        parameters: list[inspect.Parameter] = []
        for other in inspect.signature(command).parameters.values():
            if other.name == parameter:
                parameters += [_parameter(spec) for spec in fields(record)]
            else:
                parameters.append(other.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        set_parameters(from_flags, parameters)
        return from_flags

    return decorate


def _parameter(spec: Field) -> inspect.Parameter:
    """The parameter from which typer makes the flag of a field, which must have a default."""
    return inspect.Parameter(
        spec.name, inspect.Parameter.KEYWORD_ONLY, default=spec.default, annotation=spec.type
    )
