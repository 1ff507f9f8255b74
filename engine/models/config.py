"""A model's sizes and settings, read from a Hugging Face `config.json`.

Promises one record with the same field names for every architecture. Does not know any architecture: each
model file translates the names in its config.json (`config_from`). Part 1.
"""

import dataclasses
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

from engine.models.checkpoint import CheckpointError, read_json, resolve

MAX_SIZE = 2**31 - 1  # of a field that is a size: no machine could hold more


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and settings of a decoder-only transformer, with the letters that shapes have in this project."""

    model_type: str
    vocab_size: int  # V
    hidden_size: int  # D
    num_layers: int  # L
    num_heads: int  # Hq, query heads
    num_kv_heads: int  # Hkv, key and value heads
    head_dim: int  # Dh
    intermediate_size: int  # width of the MLP
    max_positions: int  # the longest sequence the model can see, in tokens
    norm_eps: float
    activation: str
    tie_word_embeddings: bool
    dtype: str | None = None  # the checkpoint's own, e.g. "float16"
    eos_token_ids: tuple[int, ...] = ()
    raw: dict = field(default_factory=dict, repr=False, compare=False)  # config.json as it is

    @classmethod
    def from_pretrained(cls, name: str | Path) -> "ModelConfig":
        """Read the configuration of an embedded model, a folder or a hub id.

        Raises CheckpointError: no such model, a file that is not JSON, an architecture or a setting that is
        not supported, a field that should be a number and is not.
        """
        folder = resolve(name)
        path = folder / "config.json"
        raw = read_json(path)
        if "model_type" not in raw:
            raise CheckpointError(f"{path}: has no 'model_type'")
        try:
            config = architecture(raw["model_type"]).config_from(raw)
            config._check_numbers()
        except KeyError as error:
            raise CheckpointError(f"{path}: has no {error}") from None
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        except (TypeError, ValueError, ArithmeticError) as error:  # a text for a number, or 0
            raise CheckpointError(f"{path}: {type(error).__name__}: {error}") from None
        return dataclasses.replace(config, eos_token_ids=_eos_token_ids(folder, raw))

    def _check_numbers(self) -> None:
        """Raises CheckpointError: a size is not a whole number from 1 to MAX_SIZE, or a float field is
        negative or not a number.
        """
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if spec.type is int and not (type(value) is int and value > 0):
                raise CheckpointError(f"{spec.name}={value!r}: a whole number from 1 on is accepted")
            if spec.type is int and value > MAX_SIZE:
                raise CheckpointError(f"{spec.name}={value!r:.40}: at most {MAX_SIZE:,} is accepted")
            if spec.type is float and not (type(value) in (int, float) and value >= 0):
                raise CheckpointError(f"{spec.name}={value!r}: a number from 0 on is accepted")

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of keys and values one token needs: 2 · L · Hkv · Dh · bytes per value."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value


def architecture(model_type: str) -> ModuleType:
    """The module `engine.models.<model_type>`: its `Model`, `config_from` and `places`, found by its name.

    Raises CheckpointError, which lists the supported ones.
    """
    module = _architecture(model_type) if str(model_type).isidentifier() else None
    if module is None:
        supported = ", ".join(architectures())
        raise CheckpointError(f"model_type {model_type!r} is not supported; supported: {supported}")
    return module


def architectures() -> list[str]:
    """Every `model_type` that is supported."""
    names = sorted(module.name for module in iter_modules([str(Path(__file__).parent)]))
    return [name for name in names if _architecture(name)]


def _architecture(name: str) -> ModuleType | None:
    """`engine.models.<name>`; None if there is no such module, or it is no architecture."""
    try:
        module = import_module(f"engine.models.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"engine.models.{name}":
            raise  # the module is there; another one, which it imports, is not
        return None
    return module if hasattr(module, "config_from") else None


def _eos_token_ids(folder: Path, raw: dict) -> tuple[int, ...]:
    """generation_config.json wins over config.json, as in Hugging Face; either may hold one id or several.

    Raises CheckpointError: it is neither an id nor a list of ids.
    """
    path = folder / "generation_config.json"
    ids = read_json(path).get("eos_token_id") if path.exists() else None
    if ids is None:
        path, ids = folder / "config.json", raw.get("eos_token_id")
    as_list = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(id) is int for id in as_list):
        raise CheckpointError(f"{path}: eos_token_id={ids!r}: a token id or a list of them is accepted")
    return tuple(as_list)
