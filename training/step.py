"""The one train step: forward, two-phase backward, finite check, update.

Sharded tables update their rows inside backward, so a bad step has to be known before that
backward starts. The graph is therefore cut at the embedding output:

    lookup -> [cut] -> trunk -> loss          phase 1: loss.backward() stops at the cut
    flag = finite(loss, dense gradients, cut gradients) on every rank      <- the one wait
    lookup <- [cut]                           phase 2: the cut's gradients enter the tables
    dense optimizer step

A step whose flag is down changes nothing: no row, no parameter, no optimizer state, no FP8 scale.
It ends the run, or is skipped (`training.nonfinite`): its batch is used up, its number is given
away. Maxima of FP8 operands are recorded in phase 1 and become scales after the flag
(`training.fp8_step`). Pipelines decide when a step runs, never what it does.

With gradient accumulation, phase 1 takes the users of the batch in parts, one forward and
backward after the other, so that the activations of one part exist at a time. The lookup, the
number of labels and what all positions share (negatives) belong to the whole batch, so the
gradient does, too.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from data.batch import BatchPart, SequenceBatch
from model.trunk import SequenceModel
from modules.embedding import lookup_results
from modules.linear.parallel import GradientKind, kind_of
from modules.linear.watch import OperandFigures
from training.distributed import gather_rows, sum_over_ranks_
from training.fp8_step import Fp8Step
from training.grid import Grid, SummedGradients
from training.nonfinite import NonFiniteError, SkipBudget
from training.optimizer import RunOptimizer
from training.signals import Request, SaveRequests
from training.trace import WAIT_NAME

logger = logging.getLogger(__name__)

# In the rows of `TrainStep._figures`.
_REQUEST_COLUMN = 7


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Figures of one step over all ranks, on the host.

    Attributes:
        step: number of the step, from 1.
        loss: summed loss over the number of labels of all ranks; NaN, as the norm, if skipped.
        num_labels: labels in the loss.
        grad_norm: L2 norm of dense gradients and gradients at the cut together, unclipped.
        num_tokens, num_samples: tokens and users processed.
        learning_rate: of the dense optimizer in this step.
        num_skipped: steps of the run skipped so far, this one included.
        is_skipped: it was not finite and has changed nothing.
        ideal_seconds: what its matrix products would take at peak, summed over ranks; 0 where
            nobody asked.
        request: the most that was asked of any rank by a signal before this step.
    """

    step: int
    loss: float
    num_labels: int
    grad_norm: float
    num_tokens: int
    num_samples: int
    learning_rate: float
    num_skipped: int = 0
    is_skipped: bool = False
    ideal_seconds: float = 0.0
    request: Request = Request.NONE


class TrainStep:
    """Runs steps on a sharded model; calling it with a batch is one of them.

    Args:
        model: a ranking or retrieval model, its tables already sharded.
        optimizer: dense and table optimizers with their schedule.
        clip_grad: largest allowed gradient norm (as in ``StepResult.grad_norm``), or None.
        num_parts: parts in which the users of a batch are computed; divides the batch size.
        num_steps: steps already done, after a resume.
        budget: steps that may be skipped; None = the first one that is not finite ends the run.
        fp8_watch_interval: steps between looks at the operands of FP8 linears, None = never.
        ideal_seconds: of this rank's share of a batch, at the device's peak; None = not counted.
        grid: how ranks share a model; None = each has its own. The ranks of a group get the same
            batch, and each counts for 1 / size of it.
        requests: what signals ask of this process.

    After a step that was watched, ``fp8_operands`` says what the cast did to them over all ranks.
    """

    def __init__(
        self,
        model: SequenceModel,
        optimizer: RunOptimizer,
        *,
        clip_grad: float | None = None,
        num_parts: int = 1,
        num_steps: int = 0,
        budget: SkipBudget | None = None,
        fp8_watch_interval: int | None = None,
        ideal_seconds: Callable[[SequenceBatch], float] | None = None,
        grid: Grid | None = None,
        requests: SaveRequests | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._clip_grad = clip_grad
        self._num_parts = num_parts
        self._dense: dict[str, nn.Parameter] = dict(self._model.trunk.named_parameters())
        self._kinds = [kind_of(parameter) for parameter in self._dense.values()]
        self._grid = grid
        self._num_copies = 1 if grid is None else grid.tensor_size
        self._fp8 = Fp8Step(model.trunk, watch_interval=fp8_watch_interval)
        self._ideal_seconds = ideal_seconds
        self._requests = requests or SaveRequests()
        self.budget = budget or SkipBudget()
        self.num_steps = num_steps
        self.fp8_operands: tuple[OperandFigures, ...] = ()

    def __call__(
        self, batch: SequenceBatch, *, meanwhile: Callable[[], None] | None = None
    ) -> StepResult:
        """One step on this rank's batch; every rank calls it, with an empty batch if need be.

        Args:
            meanwhile: work of the host that this step need not wait for, such as collating the next
                batch and, with several processes, agreeing on its exchange; called once all of
                phase 1 is queued, right before the wait.

        Raises:
            NonFiniteError: on every rank, naming the step, the ranks and the first bad tensor;
                not while the budget lasts.
        """
        step = self.num_steps + 1
        learning_rate = self._optimizer.begin_step(step)
        for parameter in self._dense.values():
            parameter.grad = None
        rows = lookup_results(self._model.tables(batch.features))
        cut = {name: values.detach().requires_grad_() for name, values in rows.items()}
        with self._fp8.phase_one(step):
            loss_sum, num_labels, own_square = self._backward_to_cut(batch, cut)

        dense = [_gradient(parameter) for parameter in self._dense.values()]
        at_cut = [_gradient(values) for values in cut.values()]
        summed = SummedGradients(dense, kinds=self._kinds, grid=self._grid)
        rows_of_ranks = self._figures(
            batch,
            loss_sum,
            num_labels,
            own_square=own_square,
            dense=dense,
            at_cut=at_cut,
            summed=summed,
        )
        if meanwhile is not None:
            meanwhile()
        figures = finite_flag_wait(rows_of_ranks)
        loss, _, cut_square, labels, tokens, samples, _, *ideal = (
            sum(column) for column in zip(*(row[1:] for row in figures), strict=True)
        )
        is_skipped = not all(math.isfinite(value) for row in figures for value in row)
        if is_skipped:
            self._give_up(self._cause(step, figures, loss_sum, cut))
            loss = grad_norm = math.nan
        else:
            grad_norm = math.sqrt(figures[0][2] + cut_square)
            summed.write_back()
            self._update(rows, at_cut, dense, grad_norm=grad_norm)
            self._fp8.commit(num_labels=labels)
        self.num_steps = step
        self.fp8_operands = self._fp8.figures()
        return StepResult(
            step=step,
            loss=loss / max(labels, 1),
            num_labels=int(labels) // self._num_copies,
            grad_norm=grad_norm,
            num_tokens=int(tokens) // self._num_copies,
            num_samples=int(samples) // self._num_copies,
            learning_rate=learning_rate,
            num_skipped=self.budget.num_skipped,
            is_skipped=is_skipped,
            ideal_seconds=float(sum(ideal)),
            request=Request(int(max(row[_REQUEST_COLUMN] for row in figures))),
        )

    def _update(
        self,
        rows: dict[str, Tensor],
        at_cut: list[Tensor],
        dense: list[Tensor],
        *,
        grad_norm: float,
    ) -> None:
        """Phase 2: clips, sends the cut's gradients into the tables, steps."""
        if self._clip_grad is not None and grad_norm > self._clip_grad:
            torch._foreach_mul_(dense + at_cut, self._clip_grad / grad_norm)
        if rows:
            torch.autograd.backward(list(rows.values()), at_cut)
        self._optimizer.step()

    def _give_up(self, cause: str) -> None:
        """Puts FP8 state back; skips the step with a message while the budget lasts.

        Raises:
            NonFiniteError: it does not.
        """
        self._fp8.undo()
        if not self.budget.take():
            raise NonFiniteError(f"{cause}; {self.budget.advice(self.num_steps)}")
        if dist.get_rank() == 0:
            logger.warning(
                "%s: skipped (%d of TrainerArgs.nonfinite_budget = %d), nothing has changed",
                cause,
                self.budget.num_skipped,
                self.budget.size,
            )

    def _backward_to_cut(
        self, batch: SequenceBatch, cut: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Phase 1, part after part: gradients of dense parameters and of the cut.

        Returns this rank's summed loss, its number of labels and, where ranks share rows, the
        squared norm of its gradients before those of other ranks came in. The loss is divided by
        the labels of all ranks and parts, so that a label weighs the same wherever it lands.
        """
        trunk = self._model.trunk
        own_labels = trunk.num_labels(batch)
        num_labels = sum_over_ranks_(own_labels.clone())
        shared = trunk.shared(batch, cut)
        loss_sum = torch.zeros((), device=own_labels.device)
        in_parts = self._num_parts > 1
        for values in cut.values() if in_parts else ():
            values.grad = torch.zeros_like(values)
        for part in batch.split(self._num_parts):
            # A whole batch uses the cut itself: its gradients need no zeros and no addition.
            with self._fp8.region():
                output = trunk(part.batch, _rows_of(part, cut) if in_parts else cut, shared)
            (output.loss_sum / num_labels.clamp(min=1)).backward()
            loss_sum += output.loss_sum.detach()
        if shared is None:
            return loss_sum, own_labels, None
        leaves = [*self._dense.values(), *cut.values(), shared.rows_MD]
        own = [leaf.grad for leaf in leaves if leaf.grad is not None]
        own_square = _square_sum(own, like=loss_sum.double())
        shared.backward()
        return loss_sum, own_labels, own_square

    def _figures(
        self,
        batch: SequenceBatch,
        loss_sum: Tensor,
        num_labels: Tensor,
        *,
        own_square: Tensor | None,
        dense: list[Tensor],
        at_cut: list[Tensor],
        summed: SummedGradients,
    ) -> Tensor:
        """What the step is judged by, still on the device: a row from every rank, float64.

        Columns: own health (not finite if this rank's loss, gradients or FP8 maxima are not,
        before any mixing of ranks), loss sum, squared norm of the summed dense gradients that all
        ranks have, this rank's share of the other squares (gradients at the cut, parts of dense
        ones), labels, tokens, samples, request, ideal seconds if they are counted.
        """
        loss_sum = loss_sum.double()
        cut_square = _square_sum(at_cut, like=loss_sum)
        dense_square = _square_sum(dense, like=loss_sum)
        if own_square is None:
            own_square = dense_square + cut_square
        is_mixed = summed.gradients is not dense
        summed_square = dense_square
        if is_mixed:
            common, parts = self._by_owner(summed.gradients)
            summed_square = _square_sum(common, like=loss_sum)
            if parts:
                # Ranks of a group have cut gradients of 1 / size each; replicas have equal parts.
                num_replicas = dist.get_world_size() // self._num_copies
                part_square = _square_sum(parts, like=loss_sum)
                cut_square = cut_square * self._num_copies + part_square / num_replicas
        counts: list[float] = [batch.num_tokens, batch.num_samples, self._requests.take()]
        if self._ideal_seconds is not None:
            counts.append(self._ideal_seconds(batch))
        row = torch.stack(
            [
                self._fp8.with_health(loss_sum + own_square),
                loss_sum,
                summed_square,
                cut_square,
                num_labels.double(),
                *(loss_sum.new_full((), count) for count in counts),
            ]
        )
        return gather_rows(row)

    def _by_owner(self, gradients: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients that all ranks have, and those of this rank's parts of parameters."""
        owned = [kind is GradientKind.PART for kind in self._kinds]
        common = [one for one, is_part in zip(gradients, owned, strict=True) if not is_part]
        return common, [one for one, is_part in zip(gradients, owned, strict=True) if is_part]

    def _cause(
        self,
        step: int,
        figures: list[list[float]],
        loss_sum: Tensor,
        cut: dict[str, Tensor],
    ) -> str:
        """What is wrong with a bad step; collective, like every path that all ranks take."""
        firsts: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(firsts, self._first_bad(loss_sum, cut))
        bad_ranks = [r for r, row in enumerate(figures) if not math.isfinite(row[0])]
        where = (
            "; ".join(f"rank {rank}: {firsts[rank]}" for rank in bad_ranks)
            or "overflow in the sum over ranks"
        )
        return f"step {step} is not finite ({where})"

    def _first_bad(self, loss_sum: Tensor, cut: dict[str, Tensor]) -> str:
        """What is not finite on this rank: the first of loss and gradients, and the first operand
        of an FP8 linear, in the order they run."""
        gradients = list(self._dense.items()) + [
            (f"embeddings of {name}", values) for name, values in cut.items()
        ]
        first_bad = ""
        if not torch.isfinite(loss_sum):
            first_bad = "the loss"
        else:
            for name, tensor in gradients:
                if tensor.grad is not None and not torch.isfinite(tensor.grad).all():
                    first_bad = f"the gradient of {name}"
                    break
        operand = self._fp8.first_bad()
        if operand is not None:
            named = f"FP8 operand {operand}"
            return f"{first_bad}, first in {named}" if first_bad else named
        return first_bad or "the sum over ranks"


def finite_flag_wait(rows_of_ranks: Tensor) -> list[list[float]]:
    """The figures on the host: the one place where the step of a single process waits.

    Nothing else on the step path may read a tensor of the device, copy to it from memory that is
    not page-locked, or wait for a stream: benchmarks/training_step.py counts that from a trace.
    With several processes, TorchRec also reads how many ids it exchanges.
    """
    with record_function(WAIT_NAME):
        return rows_of_ranks.tolist()


def _rows_of(part: BatchPart, cut: dict[str, Tensor]) -> dict[str, Tensor]:
    """A part's rows of the cut: leaves whose gradients are views of the cut's own.

    Backward adds to a gradient that is there in place, so nothing of the whole batch's size is
    made for each part.
    """
    rows: dict[str, Tensor] = {}
    for name, where in part.rows.items():
        if name in cut:
            rows[name] = cut[name].detach()[where].requires_grad_()
            gradient = cut[name].grad
            assert gradient is not None
            rows[name].grad = gradient[where]
    return rows


def _gradient(tensor: Tensor) -> Tensor:
    """The gradient of a leaf; zero where it took no part, so that all ranks reduce alike."""
    if tensor.grad is None:
        tensor.grad = torch.zeros_like(tensor)
    return tensor.grad


def _square_sum(tensors: list[Tensor], *, like: Tensor) -> Tensor:
    if not tensors:
        return torch.zeros_like(like)
    return torch.stack(torch._foreach_norm(tensors)).double().square().sum()
