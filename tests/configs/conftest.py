"""A small valid file, and a way to load it with lines added."""

from collections.abc import Callable
from pathlib import Path

import pytest

from configs.loader import ConfigError, load_experiment
from configs.schema import ExperimentArgs

BASE = """\
TrainerArgs.train_batch_size = 8
TrainerArgs.eval_batch_size = 8
TrainerArgs.max_train_iters = 10
DatasetArgs.dataset_name = "ml-100k"
DatasetArgs.max_history_seqlen = 50
DatasetArgs.max_num_candidates = 5
NetworkArgs.num_layers = 3
NetworkArgs.hidden_size = 32
NetworkArgs.num_attention_heads = 2
NetworkArgs.kv_channels = 16
RankingArgs.prediction_head_arch = [16, 5]
OptimizerArgs.optimizer_str = "adam"
OptimizerArgs.learning_rate = 1e-3
"""
NUM_BASE_LINES = BASE.count("\n")
FILES = Path(__file__).parent / "files"

Load = Callable[..., ExperimentArgs]
Refusal = Callable[..., str]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """load(lines, without=...) -> the experiment of BASE without some fields plus some lines."""

    def run(
        lines: str = "",
        *,
        without: tuple[str, ...] = (),
        bindings: tuple[str, ...] = (),
        task: str = "ranking",
    ) -> ExperimentArgs:
        kept = [line for line in BASE.splitlines() if line.split(" = ")[0] not in without]
        path = tmp_path / "case.gin"
        path.write_text("\n".join([*kept, lines]) + "\n")
        return load_experiment(path, bindings=bindings, task=task)

    return run


@pytest.fixture
def refusal(load: Load) -> Refusal:
    """The same, for text that must be refused: returns the message."""

    def run(lines: str = "", **options: object) -> str:
        with pytest.raises(ConfigError) as refused:
            load(lines, **options)
        return str(refused.value)

    return run
