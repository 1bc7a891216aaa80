"""The tensors of a checkpoint: read with what became wrong told, FP8 state taken or left.

Weights have the same names in every precision, so a checkpoint loads into any. Scales and history
of FP8 linears lie beside them, under names of their own, and are asked for only where they are.
"""

import logging
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from model.trunk import Trunk
from modules.linear.engine import LinearEngine
from modules.linear.parallel import split_dim_of
from modules.linear.state import fp8_state_dict, load_fp8_state_dict
from training.checkpoint_files import TensorReader
from training.sharding import drop_cached_rows

logger = logging.getLogger(__name__)

_FP8 = "fp8"


def fp8_tensors(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """What a checkpoint of the model holds beside weights: nothing where there is no FP8 state."""
    state = fp8_state_dict(model)
    return {_FP8: state} if state else {}


def as_whole(model: nn.Module, tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors with this rank's parts of parameters named as parts: a checkpoint then holds
    whole ones, for any number of ranks that share a model. They are filled in place.

    Args:
        model: a DistributedModelParallel.
        tensors: "model" by name, "dense_optimizer" by name in the trunk and entry.
    """
    trunk = cast(Any, model).module.trunk
    assert isinstance(trunk, Trunk)
    parallel = trunk.stack.config.parallel
    if parallel is None:
        return tensors
    device = next(trunk.parameters()).device
    mesh = DeviceMesh.from_group(parallel.group, device.type)
    whole = dict(tensors)
    for name, parameter in trunk.named_parameters():
        dim = split_dim_of(parameter)
        if dim is None:
            continue
        key = f"trunk.{name}"
        whole["model"] = whole["model"] | {
            key: DTensor.from_local(whole["model"][key], mesh, [Shard(dim)])
        }
        if "dense_optimizer" in whole:
            entries = {
                entry: DTensor.from_local(value, mesh, [Shard(dim)])
                if value.shape == parameter.shape
                else value
                for entry, value in whole["dense_optimizer"].get(name, {}).items()
            }
            whole["dense_optimizer"] = whole["dense_optimizer"] | {name: entries}
    return whole


def load_with_fp8(model: nn.Module, tensors: dict[str, Any], checkpoint: Path) -> None:
    """Fills ``tensors``, and sets the model's FP8 state to the checkpoint's; collective.

    An FP8 linear that the checkpoint has no state of starts afresh; state of others is left out.

    Raises:
        RuntimeError: a tensor is missing or has another shape, or a file is damaged.
    """
    try:
        reader = TensorReader(checkpoint)
        state = _fp8_of(reader)
        whole = as_whole(model, tensors)
        dcp.load(whole | ({_FP8: state} if state else {}), storage_reader=reader)
    except (OSError, CheckpointException, RuntimeError, ValueError, EOFError) as error:
        raise RuntimeError(
            f"{checkpoint} cannot be loaded ({cause_of(error)}); its files are damaged or belong "
            "to another model; name another checkpoint"
        ) from error
    drop_cached_rows(model)
    load_fp8_state_dict(model, state)
    _tell(model, state, checkpoint)


def _fp8_of(reader: TensorReader) -> dict[str, Tensor]:
    """Empty tensors for all FP8 state that a checkpoint holds."""
    saved = reader.read_metadata().state_dict_metadata
    return {
        name.removeprefix(f"{_FP8}."): torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved.items()
        if name.startswith(f"{_FP8}.") and isinstance(entry, TensorStorageMetadata)
    }


def _tell(model: nn.Module, state: dict[str, Tensor], checkpoint: Path) -> None:
    engines = [module for module in model.modules() if isinstance(module, LinearEngine)]
    delayed = [engine for engine in engines if engine.recipe.scaling == "delayed"]
    fresh = [one.name for one in delayed if f"{one.name}.{one.scale_entry}" not in state]
    if fresh:
        logger.info(
            "%s has no scales of %d of %d FP8 linears, the first %s: they start afresh",
            checkpoint,
            len(fresh),
            len(delayed),
            fresh[0],
        )
    elif state and not delayed:
        logger.info("%s holds FP8 scales, which nothing here uses", checkpoint)


def cause_of(error: BaseException) -> str:
    """What went wrong, out of torch's collection of what went wrong on which rank."""
    if isinstance(error, CheckpointException):
        for failure, _ in error.failures.values():
            if isinstance(failure, KeyboardInterrupt):
                raise failure
            return f"{type(failure).__name__}: {failure}".splitlines()[0]
    return f"{type(error).__name__}: {error}"
