"""The engine's public names, resolved when used, so that `import engine` stays light.

One table says where each name lives. The series adds one module at a time: a name whose module is not in this
tree yet is left out of `dir(engine)`, and asking for it says so.
"""

from importlib import import_module
from pathlib import Path

_HOME = {
    "Tokenizer": "text.tokenizer",
    "ModelConfig": "models.config",
    "load_model": "models.loader",
    "CheckpointError": "models.checkpoint",
    "embedded_models": "models.checkpoint",
    "SamplingParams": "decoding.params",
    "RequestOutput": "decoding.outputs",
    "CompletionOutput": "decoding.outputs",
    "Request": "requests.request",
    "LLMEngine": "core.llm_engine",
    "LoRARequest": "lora.request",
    "AsyncLLMEngine": "wiring.async_llm",
    "Listener": "requests.listeners",
    "run_prefill": "layers.prefill",
    "EngineArgs": "wiring.engine_args",
    "LLM": "wiring.llm",
    "AsyncEngineArgs": "wiring.async_llm",
    "TextPrompt": "wiring.llm_prompts",
    "TokensPrompt": "wiring.llm_prompts",
}


def _exists(module: str) -> bool:
    """Whether this tree has the module, such as "text.tokenizer"."""
    return (Path(__file__).parent / (module.replace(".", "/") + ".py")).exists()


__all__ = [name for name, module in _HOME.items() if _exists(module)]


def __getattr__(name: str):
    """A public name, imported from its module. Raises AttributeError for a name that this tree lacks."""
    if name not in _HOME:
        raise AttributeError(
            f"module 'engine' has no attribute {name!r}; its public names are {', '.join(__all__)}"
        )
    if name not in __all__:
        raise AttributeError(
            f"engine.{name} lives in engine/{_HOME[name].replace('.', '/')}.py, which a later part adds"
        )
    return getattr(import_module(f"engine.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
