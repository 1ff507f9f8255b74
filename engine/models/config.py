"""The sizes and settings of a model, read from a Hugging Face `config.json`.

Promises one record with the same field names for every architecture. Does not know any architecture: the
module of each architecture translates the names of its config.json in `config_from`. Part 1.
"""

import dataclasses
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

from engine.models.checkpoint import CheckpointError, read_json, resolve

# Whose code computes a model. AUTO: ours if there is a file for the model_type, else that of transformers.
OURS, TRANSFORMERS, AUTO = "ruvon", "transformers", "auto"
ANY_MODEL = "transformers_model"  # the module here that runs a model_type without a file (Extension C)
MAX_SIZE = 2**31 - 1  # the largest value of an integer field; no machine could hold a larger model


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and settings of a decoder-only transformer.

    The letters in the comments are those of tensor shapes throughout the project.
    """

    model_type: str
    vocab_size: int  # V
    hidden_size: int  # D
    num_layers: int  # L
    num_heads: int  # Hq, query heads
    num_kv_heads: int  # Hkv, key and value heads
    head_dim: int  # Dh
    intermediate_size: int  # width of the MLP
    max_positions: int  # tokens of the longest sequence that the model accepts, prompt and output together
    norm_eps: float  # added under the root of a norm
    activation: str  # of the MLP, as Hugging Face names it, e.g. "gelu_new"
    tie_word_embeddings: bool  # the output layer shares the weight of the embedding
    dtype: str | None = None  # of the weights in the checkpoint, e.g. "float16"; None if config.json has none
    eos_token_ids: tuple[int, ...] = ()  # tokens that end a text
    attention_extras: bool = False  # layers want more of `attend` than q, k and v say (Extension C)
    window: int | None = None  # every layer sees only this many last tokens; None: some layer sees all
    raw: dict = field(default_factory=dict, repr=False, compare=False)  # the content of config.json
    model_impl: str = OURS  # whose code computes the model: OURS or TRANSFORMERS

    @property
    def max_model_len(self) -> int:
        """vLLM's name of `max_positions`."""
        return self.max_positions

    @classmethod
    def from_pretrained(cls, name: str | Path, model_impl: str = AUTO) -> "ModelConfig":
        """Read the configuration of an embedded model, a folder or a hub id (see `resolve`). `model_impl` is
        as in `architecture`.

        Raises CheckpointError if there is no such model, if a file is not JSON, if the architecture or a
        setting is not supported, or if a number is missing or out of range.
        """
        folder = resolve(name)
        path = folder / "config.json"
        raw = read_json(path)
        if "model_type" not in raw:
            raise CheckpointError(f"{path}: has no 'model_type'")
        try:
            config = architecture(raw["model_type"], model_impl).config_from(raw)
            config._check_numbers()
        except KeyError as error:
            raise CheckpointError(f"{path}: has no {error}") from None
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        except (TypeError, ValueError, ArithmeticError) as error:  # a size is a string, or 0
            raise CheckpointError(f"{path}: {type(error).__name__}: {error}") from None
        return dataclasses.replace(config, eos_token_ids=eos_token_ids(folder, raw))

    def _check_numbers(self) -> None:
        """Raises CheckpointError if a required integer field is not a whole number from 1 to MAX_SIZE, or if
        a required float field is not a number of at least 0. A field that may be None is not checked.
        """
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if spec.type is int:
                if type(value) is not int or value < 1:
                    raise CheckpointError(f"{spec.name}={value!r}: a whole number from 1 on is accepted")
                if value > MAX_SIZE:
                    raise CheckpointError(f"{spec.name}={value!r:.40}: at most {MAX_SIZE:,} is accepted")
            elif spec.type is float and not (type(value) in (int, float) and value >= 0):
                raise CheckpointError(f"{spec.name}={value!r}: a number from 0 on is accepted")

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """The bytes of one token's keys and values in all layers: 2 · L · Hkv · Dh · bytes_per_value."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value


def architecture(model_type: str, model_impl: str = AUTO) -> ModuleType:
    """The module that computes models of this type: it has Model, config_from, places, PREFIX and REDUNDANT.

    It is `engine.models.<model_type>`, if there is one and `model_impl` is not TRANSFORMERS. Otherwise it is
    the module ANY_MODEL, if this tree has it and `model_impl` is not OURS.

    Raises CheckpointError, which lists the supported model types, if there is neither.
    """
    module = None
    # `model_type` comes from a file: only an identifier may become the name of a module.
    if model_impl != TRANSFORMERS and str(model_type).isidentifier() and model_type != ANY_MODEL:
        module = _architecture_module(model_type)
    if module is None and model_impl != OURS:
        module = _architecture_module(ANY_MODEL)
    if module is None:
        supported = ", ".join(architectures())
        raise CheckpointError(f"model_type {model_type!r} is not supported; supported: {supported}")
    return module


def architectures() -> list[str]:
    """Every `model_type` with a module of its own, sorted."""
    names = sorted(module.name for module in iter_modules([str(Path(__file__).parent)]))
    return [name for name in names if name != ANY_MODEL and _architecture_module(name)]


def _architecture_module(name: str) -> ModuleType | None:
    """The module `engine.models.<name>`, or None if there is no such module, or if it is no architecture."""
    try:
        module = import_module(f"engine.models.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"engine.models.{name}":
            raise  # the module exists, but a module that it imports does not
        return None
    return module if hasattr(module, "config_from") else None


def eos_token_ids(folder: Path, raw: dict) -> tuple[int, ...]:
    """The ids of the tokens that end a text: from generation_config.json, else from config.json, as in
    Hugging Face. Either file may hold one id or a list of ids. `raw` is the content of config.json.

    Raises CheckpointError if the value is neither an id nor a list of ids.
    """
    path = folder / "generation_config.json"
    ids = read_json(path).get("eos_token_id") if path.exists() else None
    if ids is None:
        path = folder / "config.json"
        ids = raw.get("eos_token_id")
    if ids is None:
        return ()
    as_list = ids if isinstance(ids, list) else [ids]
    if not all(type(token_id) is int for token_id in as_list):
        raise CheckpointError(f"{path}: eos_token_id={ids!r}: a token id or a list of them is accepted")
    return tuple(as_list)
