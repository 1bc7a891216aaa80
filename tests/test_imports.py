"""What import-linter cannot see: vendors' owners, lazy torch, missing extras, shadowed names."""

from __future__ import annotations

import ast
import fnmatch
import json
import statistics
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.commands import PROJECT_ROOT, run_command

PACKAGES = ("configs", "data", "ops", "modules", "model", "training")
ENTRIES = sorted(path.stem for path in PROJECT_ROOT.glob("pretrain_*.py"))

# docs/architecture.md, "Who may use what": vendor -> files that import it.
OWNERS = {
    "gin": ["configs/loader.py"],
    "polars": ["data/raw_lines.py"],
    "torchrec": [
        "data/batch.py",
        "modules/embedding.py",
        "training/sharding.py",
        "training/pipeline.py",
        "training/optimizer.py",
        "training/checkpoint.py",
    ],
    "fbgemm_gpu": ["ops/jagged/*.py", "training/optimizer.py"],
    "hstu": ["ops/hstu_attention/fbgemm_impl.py"],
    "megatron": ["modules/linear/parallel.py", "training/grid.py"],
    "transformer_engine": ["modules/linear/te.py", "training/precision.py"],
}
# What is imported before torch: the settings and everything checked while a user waits.
LIGHT_MODULES = ("configs.schema", "configs.loader", "configs.cli", "data.manifest", *ENTRIES)
HEAVY = ("torch", "torchrec", "fbgemm_gpu", "megatron", "polars", "pyarrow", "tensorboard")


def _source_files() -> list[Path]:
    files = [path for package in PACKAGES for path in (PROJECT_ROOT / package).rglob("*.py")]
    files += [PROJECT_ROOT / f"{entry}.py" for entry in ENTRIES]
    return sorted(files)


def _imported_roots(path: Path) -> set[str]:
    """Top-level names of every import in a file, also those inside functions."""
    roots = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            roots.add(node.module.split(".")[0])
    return roots


def _module_name(path: Path) -> str:
    parts = path.relative_to(PROJECT_ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_by(modules: list[str]) -> set[str]:
    """Names in sys.modules of a fresh interpreter that has imported `modules`."""
    script = (
        "import importlib, json, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    result = run_command([sys.executable, "-c", script], timeout_seconds=120.0)
    assert result.returncode == 0, result.stderr[-3000:]
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.parametrize("vendor", OWNERS)
def test_vendor_is_imported_only_by_its_owners(vendor: str) -> None:
    users = [
        path.relative_to(PROJECT_ROOT).as_posix()
        for path in _source_files()
        if vendor in _imported_roots(path)
    ]
    strangers = [
        user for user in users if not any(fnmatch.fnmatch(user, owner) for owner in OWNERS[vendor])
    ]
    assert strangers == []


def test_ruff_bans_the_same_vendors() -> None:
    with open(PROJECT_ROOT / "pyproject.toml", "rb") as file:
        lint = tomllib.load(file)["tool"]["ruff"]["lint"]
    assert set(lint["flake8-tidy-imports"]["banned-api"]) == set(OWNERS)


def test_settings_are_read_without_heavy_libraries() -> None:
    assert _source_files(), "no source files found"
    loaded = _imported_by(list(LIGHT_MODULES))
    assert set(LIGHT_MODULES) <= loaded
    assert loaded & set(HEAVY) == set()


def test_every_module_imports_without_the_optional_packages() -> None:
    names = [_module_name(path) for path in _source_files()]
    # None in sys.modules makes an import fail as if the package were not installed.
    script = (
        "import importlib, sys\n"
        "for absent in ('transformer_engine', 'hstu'): sys.modules[absent] = None\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(len(sys.modules))"
    )
    result = run_command([sys.executable, "-W", "ignore", "-c", script], timeout_seconds=120.0)
    assert result.returncode == 0, result.stderr[-3000:]


def test_every_source_folder_is_a_package() -> None:
    folders = {path.parent for path in _source_files() if path.parent != PROJECT_ROOT}
    assert {folder for folder in folders if not (folder / "__init__.py").exists()} == set()


def test_no_name_shadows_a_real_package() -> None:
    vendors = {*OWNERS, "triton", "torch", "numpy", "pyarrow", "rich", "torchdata", "torchmetrics"}
    names = {path.stem for path in _source_files()}
    names |= {
        part for path in _source_files() for part in path.relative_to(PROJECT_ROOT).parts[:-1]
    }
    assert names & vendors == set()


def test_files_stay_small() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in _source_files()}
    limits = {path: 1000 if path.stem.endswith("_impl") else 500 for path in lengths}
    assert {path.name: n for path, n in lengths.items() if n > limits[path]} == {}
    assert statistics.median(lengths.values()) <= 200
