"""The command line of both entries: gin file, overrides, validate, evaluate, resume."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from configs.loader import ConfigError, load_experiment
from configs.schema import DatasetArgs, ExperimentArgs


@dataclass(frozen=True)
class CommandLine:
    """What was asked for beside the experiment."""

    evaluate: str | None = None
    """Checkpoint to evaluate instead of training."""

    validate_only: bool = False
    """The result was printed; there is nothing left to do."""


def parse_arguments(
    task: Literal["ranking", "retrieval"], argv: Sequence[str] | None = None
) -> tuple[ExperimentArgs, CommandLine]:
    """The checked experiment and the rest of the command line; argv None = sys.argv.

    Ends the process with status 2 and one message on stderr when the settings cannot be used.
    --validate-only prints a summary and returns. Imports no torch.
    """
    arguments = _parser(task).parse_args(argv)
    # One process per machine reports warnings; an error is reported by all, since torchrun may
    # stop the others before the first has spoken.
    if os.environ.get("RANK", "0") != "0":
        logging.getLogger("configs").setLevel(logging.ERROR)
    bindings = list(arguments.gin_binding)
    if arguments.resume is not None:
        bindings.append(f"TrainerArgs.resume = {arguments.resume!r}")
    try:
        experiment = load_experiment(arguments.gin_config_file, bindings=bindings, task=task)
        if arguments.evaluate is not None and experiment.trainer.resume is not None:
            raise ConfigError(
                f"--evaluate must not be combined with TrainerArgs.resume = "
                f"{experiment.trainer.resume!r}, got {arguments.evaluate!r}; keep one of them"
            )
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    if arguments.validate_only:
        print(f"{arguments.gin_config_file}: valid\n{summary(experiment)}")
    command = CommandLine(evaluate=arguments.evaluate, validate_only=arguments.validate_only)
    return experiment, command


def summary(experiment: ExperimentArgs) -> str:
    """A few lines that say what would run."""
    network, dataset = experiment.network, experiment.dataset
    if isinstance(dataset, DatasetArgs):
        data = f"{dataset.dataset_name}, split {experiment.split}"
    else:
        data = "synthetic data"
    mask = "causal" if experiment.resolved_disable_contextual_mask else "see the whole history"
    lines = [
        f"{experiment.task} on {data}: {experiment.num_contextuals} contextual features, "
        f"{experiment.max_history_events} history events, {experiment.max_num_candidates} "
        f"candidates, at most {experiment.max_seq_len} tokens per user",
        f"{network.num_layers} layers, hidden {network.hidden_size}, "
        f"{network.num_attention_heads} heads x {network.attention_dim}, {network.dtype_str}, "
        f"kernel {network.kernel_backend}, {_precision(experiment)}",
    ]
    if experiment.num_contextuals > 0:
        lines.append(f"contextual tokens {mask}: {experiment.disable_contextual_mask_reason}")
    return "\n".join(f"  {line}" for line in lines)


def _precision(experiment: ExperimentArgs) -> str:
    precision = experiment.precision
    parts = []
    if precision.has_fp8_linears:
        parts.append(f"FP8 linears ({precision.linear_backend}, {precision.linear_recipe})")
    if precision.has_fp8_attention:
        parts.append(f"FP8 attention ({precision.hstu_attn_quantization_mode})")
    return ", ".join(parts) or "no FP8"


def _parser(task: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=f"Train or evaluate a generative {task} model.", allow_abbrev=False
    )
    parser.add_argument(
        "--gin-config-file",
        required=True,
        metavar="FILE",
        help="settings; looked up as given, then in configs/",
    )
    parser.add_argument(
        "--gin-binding",
        action="append",
        default=[],
        metavar="LINE",
        help="override, such as \"TrainerArgs.pipeline_type = 'none'\"; may be repeated",
    )
    parser.add_argument(
        "--validate-only", action="store_true", help="check the settings and stop; needs no data"
    )
    parser.add_argument(
        "--evaluate", metavar="CKPT", help="evaluate this checkpoint on the held-out folds"
    )
    parser.add_argument(
        "--resume", metavar="CKPT", help='continue a run: a checkpoint, or "latest"'
    )
    return parser
