"""The command line, as its own process: quick, without torch, one message on failure."""

import sys
from pathlib import Path

import pytest

from configs.cli import parse_arguments
from tests.configs.conftest import BASE, FILES
from tests.support.commands import PROJECT_ROOT, CommandResult, run_command

CODE = """\
import sys
sys.path.insert(0, {root!r})
from configs.cli import parse_arguments
try:
    experiment, command = parse_arguments({task!r})
    print(command, experiment.trainer.seed)
finally:
    assert "torch" not in sys.modules and "numpy" not in sys.modules
"""


def run(
    *flags: object, task: str = "ranking", cwd: Path = PROJECT_ROOT, **env: str
) -> CommandResult:
    code = CODE.format(root=str(PROJECT_ROOT), task=task)
    return run_command([sys.executable, "-c", code, *map(str, flags)], cwd=cwd, env=env)


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("movielens_ranking.gin", "ranking"),
        (FILES / "film_retrieval.gin", "retrieval"),
        (FILES / "longtail_events.gin", "ranking"),
    ],
)
def test_validate_only_is_quick_from_any_folder(name, task: str, tmp_path) -> None:
    done = run("--gin-config-file", name, "--validate-only", task=task, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{name}: valid\n  {task} on ")
    assert "validate_only=True" in done.stdout
    assert done.seconds < 3


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--gin-binding", "TrainerArgs.sed = 1"], ["TrainerArgs.sed", "did you mean 'seed'?"]),
        (["--gin-binding", "TrainerArgs.seed = '1'"], ["without quotes"]),
        (["--resume", "a", "--evaluate", "b"], ["--evaluate", "TrainerArgs.resume"]),
        (["--gin-config-file", "none.gin"], ["none.gin", "no such file"]),
    ],
)
def test_refusal_is_one_line_and_status_2(tmp_path, flags: list[str], parts: list[str]) -> None:
    (tmp_path / "base.gin").write_text(BASE)
    done = run("--gin-config-file", "base.gin", *flags, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    for part in parts:
        assert part in done.stderr
    assert done.seconds < 5


@pytest.mark.parametrize(
    ("recipe", "hidden_size", "multiple"), [("delayed", 100, 16), ("mxfp8", 80, 32)]
)
def test_fp8_widths_that_cannot_run_are_not_valid(
    recipe: str, hidden_size: int, multiple: int
) -> None:
    lines = {
        "NetworkArgs.hidden_size": hidden_size,
        "MixedPrecisionArgs.linear_recipe": repr(recipe),
        "MixedPrecisionArgs.linear_backend": "'te'",
    }
    flags = [f"--gin-binding={field} = {value}" for field, value in lines.items()]
    done = run("--gin-config-file", "movielens_ranking_fp8.gin", *flags, "--validate-only")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"--gin-binding 'NetworkArgs.hidden_size = {hidden_size}': ")
    told = f"width {hidden_size} is not divisible by {multiple}"
    for part in ("stack.layers.0.input.uvqk", told, "linear_recipe = None"):
        assert part in done.stderr


def test_warnings_come_from_rank_0_only(tmp_path) -> None:
    path = tmp_path / "noisy.gin"
    path.write_text(BASE + "TrainerArgs.max_train_iters = 10\n")
    first = run("--gin-config-file", path, "--validate-only", RANK="0")
    second = run("--gin-config-file", path, "--validate-only", RANK="1")
    assert "repeats the equal line" in first.stderr and len(first.stderr.splitlines()) == 1
    assert second.stderr == ""


def test_flags_reach_the_experiment(tmp_path) -> None:
    path = tmp_path / "base.gin"
    path.write_text(BASE)
    flags = ["--gin-config-file", str(path)]
    experiment, command = parse_arguments(
        "ranking",
        [*flags, "--gin-binding", "TrainerArgs.seed = 1", "--gin-binding", "TrainerArgs.seed = 2"],
    )
    assert experiment.trainer.seed == 2
    assert (command.evaluate, command.validate_only) == (None, False)
    experiment, _ = parse_arguments("ranking", [*flags, "--resume", "it's/here"])
    assert experiment.trainer.resume == "it's/here"
    _, command = parse_arguments("ranking", [*flags, "--evaluate", "runs/x"])
    assert command.evaluate == "runs/x"


def test_config_file_is_required(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments("ranking", [])
    assert ended.value.code == 2
    assert "--gin-config-file" in capsys.readouterr().err
