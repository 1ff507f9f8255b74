"""The command `ruvon cluster`, its flags, and the lines of `ruvon doctor` on several devices. Extension A.

A wrong flag, or a port in use, is refused in one line before Ray is started, unless only a replica can tell.
The replicas themselves are in engine/cli/replica.py. Imports no torch at the top, since `ruvon --help` reads
this file.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated

from engine.cli.engine_flags import takes_engine_args
from engine.cli.extensions import Finding
from engine.cli.neutral_flags import takes_neutral_flags
from engine.cli.options import flag, refusals
from engine.cli.serve_flags import NEUTRAL_FLAGS, ServeFlags, takes_flags
from engine.models.checkpoint import embedded_models
from engine.models.config import ModelConfig
from engine.wiring.engine_args import EngineArgs

REPLICAS = "How many replicas"  # a heading in the help


@dataclass(frozen=True)
class ClusterFlags:
    """How many engines there are, how much of a machine each takes, and which engine gets a request. Each
    field is a flag. Raises ValueError for a value out of range, and for fields that need another field.
    """

    replicas: Annotated[int, flag(REPLICAS, "Engines, each with the whole model.", min=1)] = 2
    min_replicas: Annotated[
        int | None, flag(REPLICAS, "With --max-replicas: the fewest there are; default: 1.", min=1)
    ] = None
    max_replicas: Annotated[
        int | None, flag(REPLICAS, "Ray starts and stops replicas by the load, up to these.", min=1)
    ] = None
    target_ongoing_requests: Annotated[
        float | None,
        flag(REPLICAS, "Requests a replica should have, for --max-replicas; default: its seats."),
    ] = None
    num_cpus: Annotated[
        float | None,
        flag(REPLICAS, "Cores a replica takes; default: 1 beside a GPU, else its share of the cores."),
    ] = None
    sticky_sessions: Annotated[
        bool,
        flag(REPLICAS, "Requests with one x-session-id go to one replica; others by chance, not by load."),
    ] = True

    def __post_init__(self) -> None:
        for name in ("replicas", "min_replicas", "max_replicas"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: a whole number from 1 on is accepted")
        for name in ("num_cpus", "target_ongoing_requests"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name}={value}: a number above 0 is accepted")
        if self.max_replicas is None:
            for name in ("min_replicas", "target_ongoing_requests"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}={getattr(self, name)} needs max_replicas; none is given")
        elif not (self.min_replicas or 1) <= self.replicas <= self.max_replicas:
            raise ValueError(
                f"replicas={self.replicas}: from min_replicas={self.min_replicas or 1} to "
                f"max_replicas={self.max_replicas} is accepted"
            )


@takes_engine_args()
@takes_neutral_flags("cluster", NEUTRAL_FLAGS)
@takes_flags("flags", ServeFlags)
@takes_flags("cluster_flags", ClusterFlags)
def cluster(args: EngineArgs, flags: ServeFlags, cluster_flags: ClusterFlags) -> None:
    """Serve with several engines behind one address, on this machine or many (Ray Serve), until Ctrl-C.

    Joins the Ray cluster that `ray start` made, if this machine is in one (or RAY_ADDRESS names one;
    RAY_ADDRESS=local: none); else starts Ray here. SIGHUP restarts the replicas one by one. /metrics shows
    all replicas, by the label engine; /dashboard the first.

    What `ruvon serve` has and this has not: a stream whose replica dies is not resumed, its client gets an
    error. Clients meet Ray's proxy, which has no limits for slow ones. Beside --port, Ray opens some 15
    ports, on every interface: for a private network only.
    """
    try:
        from engine.cli.cluster_run import run
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "engine":
            raise  # a module of this tree is missing, not a package
        sys.exit(f"ruvon cluster: {package} is not installed; pip install 'ruvon[cluster]'")

    with refusals("cluster"):
        run(args, flags, cluster_flags)


def findings() -> Iterator[Finding]:
    """The extension's lines of `ruvon doctor`."""
    import torch  # imported here, since the import takes a second

    from engine.parallel.shards import accepted_sizes

    sizes_by_model = []
    for name in embedded_models():
        sizes = accepted_sizes(ModelConfig.from_pretrained(name))
        sizes_by_model.append(f"{name} on {', '.join(map(str, sizes))}")
    num_gpus = torch.cuda.device_count()
    where = f"{num_gpus} GPUs here" if num_gpus > 1 else "here on the CPU, a process for each"
    yield Finding("several devices", f"--tensor-parallel-size: {'; '.join(sizes_by_model)}; {where}")
    has_ray = find_spec("ray") is not None
    use = "ruvon cluster" if has_ray else "ruvon cluster: ray is missing; pip install 'ruvon[cluster]'"
    yield Finding("extra cluster", use, ok=has_ray)


COMMANDS = (cluster,)
