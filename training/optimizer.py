"""Optimizers of a run: one for dense parameters, one inside the backward of sharded tables.

Both follow the same schedule. ``OptimizerArgs`` names are resolved here, once, and logged.
"""

import logging
import math
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import SGD, Adagrad, Adam
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from configs.schema import OptimizerArgs
from model.trunk import Trunk
from modules.embedding import ShardedTables

logger = logging.getLogger(__name__)

_TABLE_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": Adam,
    "adagrad": Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "sgd": SGD,
}
# FBGEMM's CPU kernels refuse every other optimizer inside backward.
CPU_TABLE_OPTIMIZERS = ("adagrad", "rowwise_adagrad", "sgd")


def resolve_table_optimizer(args: OptimizerArgs, device_type: str) -> str:
    """Name of the optimizer that sharded tables run: "auto" is Adam on a GPU and row-wise
    Adagrad on the CPU, whose table kernels have no Adam.

    Raises:
        NotImplementedError: an optimizer that the CPU kernels lack.
    """
    name = args.sparse_optimizer_str
    if name == "auto":
        name = "adam" if device_type == "cuda" else "rowwise_adagrad"
    if device_type == "cpu" and name not in CPU_TABLE_OPTIMIZERS:
        raise NotImplementedError(
            f"OptimizerArgs.sparse_optimizer_str must be one of {', '.join(CPU_TABLE_OPTIMIZERS)} "
            f"on the CPU (FBGEMM has no other table kernel there), got {name!r}; set "
            "OptimizerArgs.sparse_optimizer_str = 'auto'"
        )
    return name


def fuse_table_optimizer(tables: ShardedTables, args: OptimizerArgs, *, device_type: str) -> None:
    """Marks the tables, before they are sharded, to update their rows inside backward."""
    name = resolve_table_optimizer(args, device_type)
    if len(tables.collections) or len(tables.dynamic):
        logger.info("sharded tables run %s inside backward", name)
    settings: dict[str, Any] = {"lr": _table_learning_rate(args)}
    if name != "sgd":
        settings |= {"eps": args.adam_eps, "weight_decay": args.sparse_weight_decay}
    if name == "rowwise_adagrad":
        # L2: added to the gradient of the rows that a batch reads, before the accumulator.
        settings["weight_decay_mode"] = WeightDecayMode.L2
    if name == "adam":
        settings |= {"beta1": args.adam_beta1, "beta2": args.adam_beta2}
    apply_optimizer_in_backward(_TABLE_OPTIMIZERS[name], tables.parameters(), settings)


def learning_rate_factor(args: OptimizerArgs, *, step: int, num_steps: int) -> float:
    """Schedule's factor on the learning rates for a 1-based step: linear warm-up, then constant,
    or towards zero along a cosine or a line, which they would reach one step past the last."""
    if step <= args.warmup_steps:
        return step / args.warmup_steps
    if args.lr_schedule == "constant":
        return 1.0
    progress = (step - 1 - args.warmup_steps) / max(1, num_steps - args.warmup_steps)
    progress = min(progress, 1.0)
    if args.lr_schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0 - progress


class RunOptimizer:
    """Dense and table optimizers under one schedule.

    Args:
        model: the sharded model; parameters under ``trunk`` are the dense ones.
        args: learning rates, decay and schedule.
        num_steps: steps of the whole run, where the schedule ends.
    """

    def __init__(
        self, model: DistributedModelParallel, args: OptimizerArgs, *, num_steps: int
    ) -> None:
        self._args = args
        self._num_steps = num_steps
        self._trunk: Trunk = model.module.trunk
        self.dense = dense_optimizer(self._trunk, args)
        self.tables = model.fused_optimizer
        self.table_kernels = _table_kernels(model.module.tables)

    def begin_step(self, step: int) -> float:
        """Sets the learning rates of a 1-based step, before its backward; returns the dense one."""
        factor = learning_rate_factor(self._args, step=step, num_steps=self._num_steps)
        for group in self.dense.param_groups:
            group["lr"] = factor * self._args.learning_rate
        for group in self.tables.param_groups:
            group["lr"] = factor * _table_learning_rate(self._args)
        # The fused optimizer's step() moves nothing: it hands the rate to the table kernels.
        self.tables.step()
        # A lookup counts one up, in evaluation and in a refused step as well, and no checkpoint
        # holds the count: it is the number of the step that makes it right.
        for kernel in self.table_kernels:
            kernel.iter.fill_(step - 1)
            kernel.iter_cpu.fill_(step - 1)
        return factor * self._args.learning_rate

    def dense_state(self) -> dict[str, Any]:
        """Live state tensors of the dense optimizer by parameter name, zeros before step one."""
        state = get_optimizer_state_dict(self._trunk, self.dense)["state"]
        assert isinstance(state, dict)
        return state

    def load_dense_state(self, state: dict[str, Any]) -> None:
        """Takes over what ``dense_state`` gave, after a checkpoint was read into it."""
        groups = get_optimizer_state_dict(self._trunk, self.dense)["param_groups"]
        set_optimizer_state_dict(self._trunk, self.dense, {"state": state, "param_groups": groups})

    def step(self) -> None:
        """Updates the dense parameters; the tables' rows were updated inside backward."""
        self.dense.step()


def _table_kernels(tables: Any) -> list[Any]:
    """FBGEMM's modules behind the tables; each has a step counter, which Adam's bias correction
    reads. TorchRec keeps them out of the module tree."""
    collections = [*tables.collections, *(d._embedding_module for d in tables.dynamic)]
    return [
        module
        for collection in collections
        for lookup in collection._lookups
        for module in lookup.modules()
        if hasattr(module, "iter_cpu")
    ]


def _table_learning_rate(args: OptimizerArgs) -> float:
    rate = args.sparse_learning_rate
    return args.learning_rate if rate is None else rate


def dense_optimizer(trunk: Trunk, args: OptimizerArgs) -> torch.optim.Optimizer:
    """Matrices decay by weight_decay, replicated tables by their own, vectors not at all."""
    table_decay = args.replicated_weight_decay
    decays = {
        "table": args.weight_decay if table_decay is None else table_decay,
        "matrix": args.weight_decay,
        "vector": 0.0,
    }
    groups: dict[str, dict[str, Any]] = {
        kind: {"params": [], "weight_decay": decay} for kind, decay in decays.items()
    }
    for name, parameter in trunk.named_parameters():
        kind = "matrix" if parameter.ndim >= 2 else "vector"
        kind = "table" if name.startswith("replicated.") else kind
        groups[kind]["params"].append(parameter)
    # One launch for hundreds of tensors, step counts on the device. CPU runs keep the plain loop,
    # whose rounding their recorded figures hang on.
    fused = True if next(trunk.parameters()).device.type == "cuda" else None
    if args.optimizer_str == "sgd":
        return torch.optim.SGD(groups.values(), lr=args.learning_rate, fused=fused)
    adam = torch.optim.AdamW if args.optimizer_str == "adamw" else torch.optim.Adam
    return adam(
        groups.values(),
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_eps,
        fused=fused,
    )
