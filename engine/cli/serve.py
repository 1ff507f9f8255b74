"""`ruvon serve`: its flags. What is served: engine/cli/serving.py. Part 20's wiring.

Promises that what is wrong with a flag, the port among them, is said before the model is loaded.
"""

import errno
import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from engine.cli.options import refusals, takes_engine_args
from engine.wiring.engine_args import ADAPTERS, EngineArgs

LAST_PORT = 65535
ACCESS = "Who may ask, and where"  # topics of the help
LIMITS = "How much is taken on"
COSTS = "What it costs"


def _flag(topic: str, help: str, *names: str, **settings):
    return typer.Option(*names, help=help, rich_help_panel=topic, **settings)


@takes_engine_args()
def serve(
    args: EngineArgs,
    host: Annotated[str, _flag(ACCESS, "Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, _flag(ACCESS, "0 takes a free one.", min=0, max=LAST_PORT)] = 8000,
    api_key: Annotated[
        str | None, _flag(ACCESS, "Clients must send it; default: RUVON_API_KEY, if set.")
    ] = None,
    allow_priority: Annotated[
        bool, _flag(ACCESS, "Clients may set priority, -2 (first) to 2.", "--allow-priority")
    ] = False,
    served_model_name: Annotated[
        str | None, _flag(ACCESS, "What clients call the model; default: as given, a folder's last name.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None, _flag(ACCESS, "A name clients reach this server by, beside localhost's.")
    ] = None,
    max_num_queued_reqs: Annotated[
        int | None, _flag(LIMITS, "Sequences admitted, waiting and running; default: 16 times the seats.")
    ] = None,
    max_num_queued_tokens: Annotated[
        int | None, _flag(LIMITS, "Their prompts and longest outputs; default: 16 times the cache.")
    ] = None,
    request_timeout: Annotated[
        float | None, _flag(LIMITS, "Seconds for a request, from its arrival; default: no bound.")
    ] = None,
    shutdown_timeout: Annotated[
        float | None,
        _flag(LIMITS, "For answers under way, after Ctrl-C or SIGTERM; default: 10.", min=0, max=3600),
    ] = None,
    lora_modules: Annotated[
        list[str] | None,
        _flag(ADAPTERS, "An adapter from the start: name=folder. May be given several times."),
    ] = None,
    lora_dir: Annotated[
        Path | None,
        _flag(
            ADAPTERS,
            "Clients may load and unload what is in this folder, by name; default: nothing.",
        ),
    ] = None,
    price_per_hour: Annotated[
        str | None, _flag(COSTS, "Dollars for an hour of the device; answers then say what they cost.")
    ] = None,
    api_price: Annotated[
        str | None,
        _flag(COSTS, "To compare: dollars for a million tokens elsewhere, as cached,input,output."),
    ] = None,
    cost_log: Annotated[
        str | None, _flag(COSTS, "A CSV file that gets a line for each request that has ended.")
    ] = None,
    cost_weights: Annotated[
        str | None, _flag(COSTS, "Nanoseconds a token adds to a step, as input,output,held (see Part 19).")
    ] = None,
) -> None:
    """Serve OpenAI's API over HTTP until Ctrl-C, with a chat page at /, /metrics and a live /dashboard."""
    try:
        from engine.cli.serving import Service, allowed_hosts
        from engine.server.limits import SHUTDOWN_SECONDS
        from engine.server.run import serve as run
        from engine.server.shutdown import DrainingServer
        from engine.telemetry.cost_accounting import CostAccounting
    except ModuleNotFoundError as error:
        sys.exit(f"ruvon serve: {error.name} is not installed; pip install 'ruvon[server]'")
    from engine.machine.collector import rare_collections
    from engine.wiring.loading import loading, one_thread_if_small

    with ExitStack() as opened:
        with refusals("serve"):
            one_thread_if_small(args.model)
            key = os.environ.get("RUVON_API_KEY") if api_key is None else api_key
            if key is not None and not key.strip():
                raise ValueError(
                    "the API key is empty; leave out --api-key and RUVON_API_KEY to serve without one"
                )
            costs = CostAccounting.parse(price_per_hour, api_price, cost_log, cost_weights)
            sockets = _listen(host, port)
            for listener in sockets:
                opened.enter_context(listener)
            with loading(args.model):
                service = Service(
                    args,
                    served_model_name,
                    max_num_queued_reqs,
                    max_num_queued_tokens,
                    request_timeout,
                    lora_modules or (),
                    lora_dir,
                )
            app = service.app(allowed_hosts(host, allowed_host or ()), key, allow_priority, costs)
        seconds = SHUTDOWN_SECONDS if shutdown_timeout is None else shutdown_timeout
        if costs:
            opened.callback(costs.end)
        with rare_collections():
            run(
                app,
                host,
                port,
                make_server=lambda config: DrainingServer(config, service.backend, seconds),
                sockets=sockets,
            )


def _listen(host: str, port: int) -> list[socket.socket]:
    """The server's sockets. Raises ValueError, which says what to try: no such host or port is to be had."""
    from engine.server.run import listen

    try:
        return listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            other_port = port + 1 if port < LAST_PORT else port - 1
            message = (
                f"port {port} of {host} is in use: try --port {other_port}, or --port 0 for any that is free"
            )
        elif error.errno == errno.EACCES:  # a port below 1024, which only the system may have
            message = f"port {port}: {os.strerror(error.errno)}; ports from 1024 on are everybody's"
        elif error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            message = f"--host {host}: no address of this machine; 127.0.0.1 is seen by this machine alone, "
            message += "0.0.0.0 by others, too"
        else:
            message = f"--host {host} --port {port}: {error.strerror}"
        raise ValueError(message) from None
