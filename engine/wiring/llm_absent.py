"""vLLM's methods that `LLM` does not have, and why. Part 20."""

NO_VECTORS = "models here generate text, and give no vectors or scores of texts"
MEMORY_STAYS = "an engine keeps its memory until the process ends"
NO_FUNCTIONS = "a rank takes steps and adapters, and runs no function of yours"
PROFILER = "torch.profiler, around generate, records a call"
ABSENT = {  # method -> reason
    "embed": NO_VECTORS,
    "encode": NO_VECTORS,
    "classify": NO_VECTORS,
    "reward": NO_VECTORS,
    "score": NO_VECTORS,
    "sleep": MEMORY_STAYS,
    "wake_up": MEMORY_STAYS,
    "collective_rpc": NO_FUNCTIONS,
    "apply_model": NO_FUNCTIONS,
    "start_profile": PROFILER,
    "stop_profile": PROFILER,
}
