"""One rank's part of a model: some of the heads, and some of the MLP's width. Extension A.

The cut is Megatron's (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053). The first linear layer of
attention and of the MLP is cut by its outputs, the second by its inputs. So a rank computes its heads and its
share of the MLP without the other ranks, and the second layer's result is one term of a sum over the ranks
(layers.py). Embeddings and norms are whole on every rank. Only rank 0 keeps the output layer, whole.

A model that is built from the divided config has the sizes of one rank's part, and so has its KV cache. This
module knows no process: `rank` and `size` are numbers.
"""

from dataclasses import replace

import torch
from torch import Tensor

from engine.lora.adapter import Adapter, Factors
from engine.models.checkpoint import CheckpointError
from engine.models.config import OURS, ModelConfig, architecture
from engine.models.weights import Place

DIVIDED = ("num_heads", "num_kv_heads", "intermediate_size")  # the config's fields that `size` divides
# Ends of the names of layers that are cut by their inputs: the second linear layer of attention and of the
# MLP, and Extension C's name for such a layer. A block's other linear layers are cut by their outputs.
CUT_BY_INPUTS = ("attention.proj", "mlp.down", "rowwise")
MAX_SIZE = 64  # the largest number of ranks that an error message lists


def divide(config: ModelConfig, size: int) -> ModelConfig:
    """The config of one rank's part, where `size` ranks share the model.

    Raises CheckpointError if `size` does not divide a field of DIVIDED. The message names the field and the
    sizes that are accepted. If another library computes the model, the model's module may raise it as well.
    """
    if config.model_impl != OURS:
        config = architecture(config.model_type, config.model_impl).for_ranks(config, size)
    for name in DIVIDED:
        if getattr(config, name) % size:
            raise CheckpointError(
                f"tensor_parallel_size={size} does not divide {name}={getattr(config, name)}; accepted for "
                f"this model are {', '.join(map(str, accepted_sizes(config)))}"
            )
    return replace(config, **{name: getattr(config, name) // size for name in DIVIDED})


def accepted_sizes(config: ModelConfig) -> list[int]:
    """The numbers of ranks, up to MAX_SIZE, that can share this model."""
    sizes = range(1, MAX_SIZE + 1)
    return [size for size in sizes if not any(getattr(config, name) % size for name in DIVIDED)]


def cut(tensor: Tensor, dim: int, rank: int, size: int, matrices: int = 1) -> Tensor:
    """Rank `rank`'s part of a tensor that is divided among `size` ranks along `dim`.

    Along `dim` the tensor is `size` runs of neighbours of equal length. Rank 0 has the first run, rank 1 the
    next. Other dimensions stay whole.

    `matrices`: how many matrices of equal size lie side by side along `dim`. Each of them is cut so, and the
    parts lie side by side in the same order: with queries, keys and values in one tensor, a rank gets some
    queries, then some keys, then some values. `matrices` · `size` must divide the length of `dim`. If there
    is one matrix, the result is a view of `tensor`: of a file that is mapped into memory, only this part is
    read.
    """
    runs = tensor.unflatten(dim, (matrices, size, -1))
    return runs.select(dim + 1, rank).flatten(dim, dim + 1)


class Shards:
    """Cuts rank `rank`'s parts of a model's weights and of its adapters.

    For `load_model(sharding=)` and `AdapterSlots(shard=)`. `config` must be called before `adapter`.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._matrices: dict[str, int] = {}  # by our parameter's name: matrices side by side in one tensor

    def config(self, config: ModelConfig) -> ModelConfig:
        """The config of this rank's part. Remembers which parameters hold several matrices, for `adapter`.
        Raises CheckpointError, as `divide` does.
        """
        places = architecture(config.model_type, config.model_impl).places(config)
        self._matrices = {place.parameter: place.matrices for place in places.values()}
        return divide(config, self.size)

    def shard(self, tensor: Tensor, place: Place, shape: tuple[int, ...]) -> Tensor:
        """This rank's part of a checkpoint's tensor. `shape` is what this rank's model needs of it, in
        the checkpoint's order of dimensions.

        A tensor that is `size` times as long as `shape` in one dimension, and the same in the others, is cut
        along that dimension, as `place.matrices` says. Any other tensor is returned as it is: either every
        rank has it whole, as a norm's weight, or its shape is wrong, and the loader refuses it.

        In a layer that is cut by its inputs, the bias is added before the sum over the ranks, and must count
        once: rank 0 has the bias, and the other ranks have zeros. Such a layer's name, `place.parameter`
        without `.bias`, ends as CUT_BY_INPUTS says. Other biases are treated as any tensor.
        """
        layer, _, leaf = place.parameter.rpartition(".")
        if self.rank and leaf == "bias" and layer.endswith(CUT_BY_INPUTS):
            return torch.zeros_like(tensor)
        if tensor.dim() != len(shape):
            return tensor
        dims = [dim for dim, n in enumerate(shape) if tensor.shape[dim] != n]
        if len(dims) != 1 or tensor.shape[dims[0]] != self.size * shape[dims[0]]:
            return tensor
        return cut(tensor, dims[0], self.rank, self.size, place.matrices)

    def adapter(self, adapter: Adapter) -> Adapter:
        """This rank's part of an adapter. In a layer that is cut by its inputs, A[r, in] is cut, and the sum
        over the ranks adds up the adapter's terms with the layer's own. In a layer that is cut by its
        outputs, B[out, r] is cut.
        """
        layers = {
            name: tuple(self._shard_factors(name, factors) for factors in parts)
            for name, parts in adapter.layers.items()
        }
        return replace(adapter, layers=layers)

    def _shard_factors(self, layer: str, factors: Factors) -> Factors:
        """This rank's part of the factors A and B of one layer, as `adapter` says."""
        if layer.endswith(CUT_BY_INPUTS):
            return replace(factors, A=cut(factors.A, dim=1, rank=self.rank, size=self.size))
        rows = factors.rows
        if rows is not None:  # the rows of the whole layer; this rank's layer has a `size`-th of them
            rows = slice(rows.start // self.size, rows.stop // self.size)
        matrices = self._matrices[f"{layer}.weight"]
        B = cut(factors.B, dim=0, rank=self.rank, size=self.size, matrices=matrices)
        return replace(factors, B=B, rows=rows)
