"""A vLLM general plugin for tests: dummy weights under which the output depends on the KV cache.

vLLM's own dummy weights are so small (norms included) that the output depends on the last token
only: a test of equal outputs would pass over a cache full of zeros. Here matrices are random with
a scale that keeps activations near one, vectors are ones, integers are zeros. They are the same
in every engine and every process: each tensor's numbers come from its name, and those of a shard
from its rank, too, so that ranks hold different parts of the cache wherever they do in earnest.

It works by being on the path: `PYTHONPATH=tests/vllm/plugin`.
"""

from __future__ import annotations

import zlib

import torch

GAIN = 1.5  # Above 1, so that attention is sharp enough to tell one position from another.
_names: dict[int, str] = {}
"""Names of the tensors of the model that is being loaded, by identity."""


@torch.no_grad()
def fill(parameter: torch.Tensor, *_args: object, **_kwargs: object) -> None:
    """Replace one parameter's values in place."""
    fixed = getattr(parameter, "dummy_weight_value", None)
    if parameter.device.type == "meta":
        return
    if fixed is not None:
        parameter.fill_(fixed)
    elif not parameter.is_floating_point():
        parameter.zero_()
    elif parameter.dim() < 2:
        parameter.fill_(1.0)
    else:
        source = torch.Generator().manual_seed(zlib.crc32(_names[id(parameter)].encode()))
        scale = GAIN / parameter.shape[-1] ** 0.5
        parameter.copy_(torch.randn(parameter.shape, generator=source) * scale)


def _shards(model: torch.nn.Module) -> dict[int, str]:
    """Tensors that other ranks hold other parts of, by identity, and what tells this part."""
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    rank = get_tensor_model_parallel_rank()
    kinds = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
    return {
        id(tensor): f"@{rank}"
        for module in model.modules()
        if rank and isinstance(module, kinds) and module.tp_size > 1
        for tensor in module.parameters(recurse=False)
    }


def register() -> None:
    """Called by vLLM once per process."""
    from vllm.model_executor.model_loader import dummy_loader

    def load_weights(self: object, model: torch.nn.Module, model_config: object) -> None:
        named = [*model.named_parameters(), *model.named_buffers()]
        shards = _shards(model)
        _names.update({id(tensor): name + shards.get(id(tensor), "") for name, tensor in named})
        try:
            original(self, model, model_config)
        finally:
            _names.clear()

    original = dummy_loader.DummyModelLoader.load_weights
    dummy_loader.DummyModelLoader.load_weights = load_weights
    dummy_loader.initialize_single_dummy_weight = fill
