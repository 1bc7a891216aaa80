#!/usr/bin/env python
"""Which mistake alone turns a build with both FP8 halves to NaN, and which to nonsense?

    python benchmarks/fp8_iteration_64.py --jobs 2

A small ranking model trains on MovieLens-100k on a CPU, once without FP8, once with both halves as
they are here, and once with each ingredient of a naive build (`benchmarks.fp8_ingredients`) added.
Linears (delayed scales) and attention are emulated, rows are FP32; weights, data and order are the
same in all runs, dropout is off.

Written to benchmarks/fp8_iteration_64.md: the first step that is not finite; test loss and AUC;
and, on one batch with the weights at the end of the run as it is here, how far the gradient of the
stack's parameters is from the one without FP8. Needs datasets/ml-100k (data/preprocess.py).
"""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.fp8_ingredients import INGREDIENTS  # noqa: E402
from benchmarks.precision_runs import commit  # noqa: E402
from configs.loader import load_experiment  # noqa: E402
from configs.schema import ExperimentArgs  # noqa: E402

PLAIN, OURS = "no FP8", "as it is here"
_BINDINGS = (
    "TrainerArgs.train_batch_size = 32",
    "TrainerArgs.log_interval = 1",
    "TrainerArgs.ckpt_save_interval = 0",
    "TrainerArgs.num_epochs = None",
    "NetworkArgs.kv_channels = 64",
    "NetworkArgs.hidden_dropout = 0.0",
    "NetworkArgs.kernel_backend = 'pytorch'",
)
_FP8 = (
    "MixedPrecisionArgs.mixed_precision_dtype = 'fp8'",
    "MixedPrecisionArgs.linear_backend = 'emulated'",
    "MixedPrecisionArgs.linear_recipe = 'delayed'",
    "MixedPrecisionArgs.hstu_attn_quantization_mode = 'recommended'",
)

_ABOUT = """\
MovieLens-100k ranking, two layers of hidden size 64, two heads of 64, 32 users a batch; emulated
FP8 linears (delayed scales) and emulated FP8 attention (the recommended mode), rows in FP32,
dropout off. Every run has the same weights, data and order. Gradient error: distance of the
gradient of the stack's parameters from the one without FP8, relative to its norm, on one batch,
with the weights of the run as it is here. Wrong: loss more than 1% off, or more than twice the
gradient error of the build as it is here. A run that is not finite is ended by the guard of the
step; a naive build goes on."""


def main() -> None:
    """Runs all cells and writes the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="+", help="names of ingredients")
    parser.add_argument("--report", type=Path, default=ROOT / "benchmarks", help="folder")
    arguments = parser.parse_args()
    os.chdir(ROOT)  # the gin file names its data from here
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = [PLAIN, OURS, *(arguments.only or INGREDIENTS)]
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        runs = pool.map(_train, names, [arguments.steps] * len(names))
        errors = pool.submit(_gradient_errors, names[1:], arguments.steps)
        results = dict(zip(names, runs, strict=True))
        for name, error in errors.result().items():
            results[name]["gradient_error"] = error
    text = _table(results, num_steps=arguments.steps)
    arguments.report.mkdir(parents=True, exist_ok=True)
    (arguments.report / "fp8_iteration_64.md").write_text(text, encoding="utf-8")
    print(text)


def _experiment(name: str, folder: str, num_steps: int) -> ExperimentArgs:
    return load_experiment(
        "movielens_ranking.gin",
        bindings=[
            *_BINDINGS,
            *(() if name == PLAIN else _FP8),
            f"TrainerArgs.max_train_iters = {num_steps}",
            f"TrainerArgs.output_dir = {folder!r}",
        ],
        task="ranking",
    )


def _context(name: str) -> AbstractContextManager[None]:
    return INGREDIENTS[name].context() if name in INGREDIENTS else nullcontext()


def _train(name: str, num_steps: int) -> dict[str, Any]:
    """Train one cell; figures of the test fold, or why there are none."""
    from training.distributed import process_group
    from training.nonfinite import NonFiniteError
    from training.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder, _silent(), process_group() as world:
        trainer = Trainer(_experiment(name, f"{folder}/run", num_steps), world=world)
        try:
            with _context(name):
                return {"test": trainer.fit()}
        except NonFiniteError as error:
            message = str(error)
        step = int(re.findall(r"step (\d+)", message)[0])
        return {"step": step, "message": message}


def _silent() -> AbstractContextManager[Any]:
    import logging

    logging.disable(logging.WARNING)
    return nullcontext()


def _gradient_errors(names: Sequence[str], num_steps: int) -> dict[str, float]:
    """Relative distance of the stack's gradient from that without FP8, at the end of a run."""
    from training.distributed import process_group
    from training.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder, _silent(), process_group() as world:
        ours = Trainer(_experiment(OURS, f"{folder}/run", num_steps), world=world)
        ours.fit()
        ours.model.train()
        plain = Trainer(_experiment(PLAIN, f"{folder}/plain", num_steps), world=world)
        plain.model.load_state_dict(ours.model.state_dict())
        plain.model.train()
        loader = ours.loaders["train"]
        batches = [next(iter(loader.epoch(epoch, 0))) for epoch in (1000, 1001)]
        expected = gradient_of_stack(plain.model.module, batches[1])
        state, found = ours.model.module.trunk.fp8_state, {}
        before = {key: value.clone() for key, value in state.named_buffers()}
        for name in names:
            with _context(name):
                # what memory and the history of maxima then hold
                gradient_of_stack(ours.model.module, batches[0])
                state.commit()
                gradient = gradient_of_stack(ours.model.module, batches[1])
            for key, value in state.named_buffers():
                value.copy_(before[key])
            found[name] = float((gradient - expected).norm() / expected.norm())
    return found


def gradient_of_stack(model: Any, batch: Any) -> torch.Tensor:
    """Return the gradient of all parameters of the stack, in one vector; maxima are recorded."""
    from modules.embedding import lookup_results

    parameters = list(model.trunk.stack.parameters())
    rows = {
        name: values.detach()
        for name, values in lookup_results(model.tables(batch.features)).items()
    }
    output = model.trunk(batch, rows)
    loss = output.loss_sum / output.num_labels
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = zip(gradients, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in pairs])


def _table(results: dict[str, dict[str, Any]], *, num_steps: int) -> str:
    plain = results[PLAIN]["test"]
    lines = [
        "# Iteration 64: what a naive build of both FP8 halves does wrong, one thing at a time",
        "",
        f"`python benchmarks/fp8_iteration_64.py --steps {num_steps}`, commit {commit()}, CPU, "
        f"torch {torch.__version__}.",
        "",
        _ABOUT,
        "",
        "| added to a build as it is here | what | not finite from step | test loss | change "
        "| AUC | gradient error | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    usual = results[OURS]["gradient_error"]
    for name, result in results.items():
        what = INGREDIENTS[name].what if name in INGREDIENTS else "-"
        error = result.get("gradient_error", 0.0)
        figures = result.get("test")
        if figures is None:
            shown, verdict = f"{result['step']} | - | - | -", "**NaN**"
        else:
            change = figures["loss"] / plain["loss"] - 1
            shown = f"- | {figures['loss']:.4f} | {100 * change:+.2f}% | {figures['auc']:.4f}"
            is_wrong = abs(change) > 0.01 or not error <= 2 * usual
            verdict = "**wrong**" if is_wrong else "holds"
        lines.append(f"| {name} | {what} | {shown} | {error:.3g} | {verdict} |")
    told = [f"- {name}: {r['message']}" for name, r in results.items() if "message" in r]
    return "\n".join(
        [*lines, "", *(["What the guard of a step said:", "", *told, ""] if told else [])]
    )


if __name__ == "__main__":
    main()
