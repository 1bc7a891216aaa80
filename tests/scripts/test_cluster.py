"""Cluster scripts: what they hand to torchrun, here a stand-in that repeats its arguments."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.commands import PROJECT_ROOT, CommandResult, run_command

ENTRY = ["pretrain_gr_ranking.py", "--gin-config-file", "a file.gin"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with the scripts and no environment of its own; stand-ins lie in bin/."""
    shutil.copytree(PROJECT_ROOT / "scripts" / "cluster", tmp_path / "scripts" / "cluster")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    _stand_in(bin_folder / "torchrun", 'printf "%s|" "$OMP_NUM_THREADS" "$@"')
    return tmp_path


def _stand_in(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/bash\n{line}\n")
    path.chmod(0o755)


def _node(tree: Path, *, path: str | None = None, **environment: str) -> CommandResult:
    found = f"{tree / 'bin'}:{os.environ['PATH']}" if path is None else path
    return run_command(
        ["bash", "scripts/cluster/node.sh", *ENTRY], cwd=tree, env={"PATH": found, **environment}
    )


def test_one_node_has_a_process_for_each_gpu_or_one(tree: Path) -> None:
    _stand_in(tree / "bin" / "nvidia-smi", "echo GPU 0; echo GPU 1")
    result = _node(tree)
    assert result.stdout == "1|--standalone|--nproc_per_node|2|" + "|".join(ENTRY) + "|"
    _stand_in(tree / "bin" / "nvidia-smi", "exit 9")
    assert "|--nproc_per_node|1|" in _node(tree).stdout
    assert "|--nproc_per_node|4|" in _node(tree, NPROC_PER_NODE="4").stdout


def test_several_nodes_need_the_first_ones_address(tree: Path) -> None:
    result = _node(tree, NNODES="2")
    assert result.returncode != 0 and "MASTER_ADDR must name node 0" in result.stderr
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "first", "NPROC_PER_NODE": "8"}
    expected = "1|--nnodes|2|--node_rank|1|--nproc_per_node|8|--master_addr|first|"
    assert _node(tree, **nodes).stdout == (
        f"{expected}--master_port|29500|" + "|".join(ENTRY) + "|"
    )


def test_no_torchrun_is_told(tree: Path) -> None:
    bare = tree / "bare"
    bare.mkdir()
    for tool in ("bash", "dirname", "wc"):
        (bare / tool).symlink_to(shutil.which(tool) or "")
    result = _node(tree, path=str(bare))
    assert result.returncode == 1 and "run scripts/setup.sh" in result.stderr
