"""When steps run: one after the other, or overlapped by TorchRec's pipeline.

A pipeline is filled from an iterator that ends at the next evaluation, checkpoint or epoch end.
It drains there, so no batch is ever in flight while the model evaluates or is saved, and what
was fetched is exactly what was trained on.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.pipeline_context import PrefetchTrainPipelineContext
from torchrec.distributed.train_pipeline.runtime_forwards import PrefetchPipelinedForward

from data.batch import SequenceBatch
from training.optimizer import RunOptimizer
from training.step import StepResult

logger = logging.getLogger(__name__)


class StepFunction(Protocol):
    """`training.step.TrainStep`, or what stands for it."""

    def __call__(
        self, batch: SequenceBatch, *, meanwhile: Callable[[], None] | None = None
    ) -> StepResult:
        """See ``TrainStep.__call__``."""


class Pipeline(Protocol):
    """Feeds batches of an iterator to the step function."""

    def progress(self, batches: Iterator[SequenceBatch]) -> StepResult:
        """Runs the next step; raises StopIteration once the iterator's batches are all used."""

    def detach(self) -> object:
        """Gives the model back in its plain form, for evaluation, until the next ``progress``."""


class Segment:
    """The batches of a segment, unless it is cut short: then what a pipeline holds is the rest."""

    def __init__(self, batches: Iterator[SequenceBatch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[SequenceBatch]:
        return self

    def __next__(self) -> SequenceBatch:
        return next(self._batches)

    def cut(self) -> None:
        """Ends it before the next batch."""
        self._batches = iter(())


class SequentialPipeline:
    """``pipeline_type = "none"``: copy a batch to the device, step, repeat."""

    def __init__(self, step: StepFunction, *, device: torch.device) -> None:
        self._step = step
        self._device = device

    def progress(self, batches: Iterator[SequenceBatch]) -> StepResult:
        """See ``Pipeline.progress``."""
        # From page-locked memory the host does not wait for the copy (elsewhere this says nothing).
        return self._step(next(batches).to(self._device, non_blocking=True))

    def detach(self) -> None:
        """Nothing to undo."""


class SparseDistPipeline(TrainPipelineSparseDist[SequenceBatch, StepResult]):
    """``pipeline_type = "native"``: TorchRec's three stages around our step.

    Copy to the device of batch i+2, input distribution of batch i+1 and the step on batch i
    overlap. Only ``progress`` differs from TorchRec's: it calls the one train step, and batch i+2
    is collated while the device works on step i, not before.
    """

    def __init__(
        self,
        step: StepFunction,
        *,
        model: DistributedModelParallel,
        optimizer: RunOptimizer,
        device: torch.device,
        **options: Any,
    ) -> None:
        super().__init__(model, optimizer.dense, device, execute_all_batches=True, **options)
        self._step = step

    def progress(self, batches: Iterator[SequenceBatch]) -> StepResult:
        """See ``Pipeline.progress``."""
        if not self._model_attached:
            self.attach(self._model)
        self.fill_pipeline(batches)
        if not self.batches:
            raise StopIteration
        self._set_module_context(self.contexts[0])
        self._wait_for_batch()
        has_next = len(self.batches) >= 2
        if has_next:
            self.start_sparse_data_dist(self.batches[1], self.contexts[1])

        def prepare() -> None:
            self.enqueue_batch(batches)
            if has_next:
                self.wait_sparse_data_dist(self.contexts[1])
                self._prefetch(self.contexts[1])

        result = self._step(self.batches[0], meanwhile=prepare)
        self.dequeue_batch()
        return result

    def _prefetch(self, context: Any) -> None:
        """What is done ahead of a batch whose ids have been exchanged: nothing here."""


class PrefetchPipeline(SparseDistPipeline):
    """``pipeline_type = "prefetch"``: the rows of batch i+1 enter the caches during step i, too.

    TorchRec has a pipeline of that name, which loads them between forward and backward; here that
    is after phase 1. Its parts are used, not the pipeline: its bookkeeping is another one in each
    version. FBGEMM makes the update of step i find rows that moved into the cache meanwhile.
    """

    _pipelined_forward_type = PrefetchPipelinedForward

    def __init__(
        self,
        step: StepFunction,
        *,
        model: DistributedModelParallel,
        optimizer: RunOptimizer,
        device: torch.device,
    ) -> None:
        super().__init__(
            step,
            model=model,
            optimizer=optimizer,
            device=device,
            context_type=PrefetchTrainPipelineContext,
        )
        self._prefetch_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._table_kernels = optimizer.table_kernels

    def fill_pipeline(self, dataloader_iter: Iterator[SequenceBatch]) -> None:
        """Fetches two batches where there are none, and the rows of the first."""
        is_empty = not self.batches
        for kernel in self._table_kernels if is_empty else ():
            # A lookup locks its cache lines until its update, and evaluation had none.
            if hasattr(kernel, "lxu_cache_locking_counter"):
                kernel.lxu_cache_locking_counter.zero_()
        super().fill_pipeline(dataloader_iter)
        if is_empty and self.batches:
            self._prefetch(self.contexts[0])

    def _wait_for_batch(self) -> None:
        super()._wait_for_batch()
        if self._prefetch_stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._prefetch_stream)

    def _prefetch(self, context: Any) -> None:
        """Loads the rows of a batch into the caches; they stay there until its update."""
        compute = None if self._prefetch_stream is None else torch.cuda.current_stream(self._device)
        for module in self._pipelined_modules:
            name = module.forward._name
            with torch.cuda.stream(self._data_dist_stream):
                ids = context.input_dist_tensors_requests.pop(name).wait()
            module_context = context.module_contexts.pop(name)
            with torch.cuda.stream(self._prefetch_stream):
                if self._prefetch_stream is not None:
                    self._prefetch_stream.wait_stream(self._data_dist_stream)
                    for used in (ids, module_context):
                        used.record_stream(self._prefetch_stream)
                        used.record_stream(compute)
                module.prefetch(ctx=module_context, dist_input=ids, forward_stream=compute)
            context.module_input_post_prefetch[name] = ids
            context.module_contexts_post_prefetch[name] = module_context


def build_pipeline(
    pipeline_type: str,
    step: StepFunction,
    *,
    model: DistributedModelParallel,
    optimizer: RunOptimizer,
    device: torch.device,
) -> Pipeline:
    """The pipeline that ``TrainerArgs.pipeline_type`` names.

    Without sharded tables there is no input distribution to overlap, and TorchRec's pipeline has
    nothing to hold on to: steps then run one after the other, which is said.
    """
    tables = model.module.tables
    has_sharded_tables = len(tables.collections) + len(tables.dynamic) > 0
    if pipeline_type != "none" and not has_sharded_tables:
        logger.info(
            "TrainerArgs.pipeline_type = %r overlaps nothing without sharded tables", pipeline_type
        )
    if pipeline_type == "none" or not has_sharded_tables:
        return SequentialPipeline(step, device=device)
    ahead = PrefetchPipeline if pipeline_type == "prefetch" else SparseDistPipeline
    return ahead(step, model=model, optimizer=optimizer, device=device)
