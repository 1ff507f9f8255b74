"""`ruvon serve`: the start of its server. Part 20's wiring.

engine/cli/serve_flags.py declares the flags, and engine/cli/serving.py builds the engine and the HTTP app.
The flags' values are checked, and the port is taken, before the model is loaded. What depends on the model's
size, such as the limits of the queue, is checked after it.
"""

import errno
import os
import socket
import sys
from contextlib import ExitStack

from engine.cli.engine_flags import takes_engine_args
from engine.cli.neutral_flags import takes_neutral_flags
from engine.cli.options import refusals
from engine.cli.serve_flags import LAST_PORT, NEUTRAL_FLAGS, ServeFlags, takes_flags
from engine.wiring.engine_args import EngineArgs


@takes_engine_args()
@takes_neutral_flags("serve", NEUTRAL_FLAGS)
@takes_flags("flags", ServeFlags)
def serve(args: EngineArgs, flags: ServeFlags) -> None:
    """Serve OpenAI's API until Ctrl-C: chat at /, numbers at /dashboard, the engine at work at /engine."""
    try:
        from engine.cli.serving import Service, allowed_hosts
        from engine.server.limits import SHUTDOWN_SECONDS
        from engine.server.run import serve as run
        from engine.server.shutdown import DrainingServer
        from engine.telemetry.cost_accounting import CostAccounting
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "engine":
            raise  # a module of this tree is missing, not a package
        sys.exit(f"ruvon serve: {package} is not installed; pip install 'ruvon[server]'")
    from engine.machine.collector import rare_collections
    from engine.wiring.generation_config import defaults_line
    from engine.wiring.loading import describe_implementation, loading, one_thread_if_small

    with ExitStack() as resources:
        with refusals("serve"):
            one_thread_if_small(args.model, args.model_impl)
            key = flags.key()
            costs = CostAccounting.parse(
                flags.price_per_hour, flags.api_price, flags.cost_log, flags.cost_weights
            )
            defaults = defaults_line(args)  # may refuse generation_config.json
            sockets = listen(flags.host, flags.port)
            for listener in sockets:
                resources.enter_context(listener)
            with loading(args.model):
                service = Service(args, flags)
            hosts = allowed_hosts(flags.host, flags.allowed_host or ())
            app = service.app(
                hosts, key, allow_priority=flags.allow_priority, costs=costs, root_path=flags.root_path
            )
            print(defaults, file=sys.stderr)
            print(f"model: {describe_implementation(service.engine.config)}", file=sys.stderr)
            print("pages: / to chat, /dashboard for numbers, /engine to see it at work", file=sys.stderr)

        if costs:
            resources.callback(costs.end)
        seconds = SHUTDOWN_SECONDS if flags.shutdown_timeout is None else flags.shutdown_timeout
        with rare_collections():
            run(
                app,
                flags.host,
                flags.port,
                make_server=lambda config: DrainingServer(config, service.backend, seconds),
                sockets=sockets,
            )


def listen(host: str, port: int) -> list[socket.socket]:
    """The server's sockets, which listen on `host` and `port`. Raises ValueError if the system refuses the
    host or the port; the message says why, and where it can what to try.
    """
    from engine.server.run import listen as open_sockets

    try:
        return open_sockets(host, port)
    except OSError as error:
        raise ValueError(_why_not_listening(error, host, port)) from None


def _why_not_listening(error: OSError, host: str, port: int) -> str:
    """The message for a user whose host or port the system has refused with `error`."""
    if error.errno == errno.EADDRINUSE:
        other_port = port + 1 if port < LAST_PORT else port - 1
        return f"port {port} of {host} is in use: try --port {other_port}, or --port 0 for any that is free"
    if error.errno == errno.EACCES:  # a port below 1024, which only the system may have
        return f"port {port}: {os.strerror(error.errno)}; ports from 1024 on are everybody's"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return (
            f"--host {host}: no address of this machine; 127.0.0.1 is seen by this machine alone, 0.0.0.0 by "
            "others, too"
        )
    return f"--host {host} --port {port}: {error.strerror}"
