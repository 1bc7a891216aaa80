"""The faults of a soak (`benchmarks/soak.py`): each a function that does it and checks the rest.

A function gets the soak and the largest number of tries it may make in one go; it returns the
seconds of each try, and raises AssertionError where something was lost.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from benchmarks.soak_job import ROOT, Job, records
from configs.loader import load_experiment
from data.manifest import read_manifest
from training.checkpoint import latest_checkpoint, read_state
from training.checkpoint_files import TensorReader
from training.startup import check_data

_NAN_ON_RANK_ONE = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from training.trainer import Trainer
plain = Trainer.fit
def fit(self, requests=None):
    weight = next(self.model.module.trunk.parameters())
    calls = []
    def spoil(gradient):
        calls.append(gradient)
        bad = self.world.rank == 1 and len(calls) == int(os.environ["BAD_STEP"])
        return gradient * float("nan") if bad else gradient
    weight.register_hook(spoil)
    return plain(self, requests)
Trainer.fit = fit
from pretrain_gr_ranking import main
main()
"""


class Soak:
    """A folder for runs, chance, and runs that nobody disturbs, to compare with.

    Args:
        num_steps: of jobs that are disturbed by the clock.
        options: of all jobs (`Job`): processes, gin_file, bindings.
    """

    def __init__(
        self, folder: Path, chance: random.Random, *, num_steps: int = 300, **options: Any
    ) -> None:
        self.num_steps = num_steps
        self.options = options
        self.folder = folder
        self.chance = chance
        self._undisturbed: dict[int, Path] = {}
        self._count = 0

    def job(self, name: str, num_steps: int, **options: Any) -> Job:
        """A job in a folder of its own."""
        self._count += 1
        values = {"TrainerArgs.max_train_iters": num_steps} | options.pop("values", {})
        folder = self.folder / f"{name.replace(' ', '-')}-{os.getpid()}-{self._count}"
        return Job(folder, values=values, **self.options, **options)

    def undisturbed(self, num_steps: int) -> Path:
        """The folder of a run of so many steps that went well."""
        if num_steps not in self._undisturbed:
            with self.job("undisturbed", num_steps) as job:
                assert job.end() == 0, job.text()[-3000:]
            self._undisturbed[num_steps] = job.folder
        return self._undisturbed[num_steps]

    def assert_as_undisturbed(self, run: Path, num_steps: int) -> None:
        """Records and final checkpoint are those of a run that nobody disturbed."""
        straight = self.undisturbed(num_steps)
        assert records(run) == records(straight), f"{run}: other records"
        last = f"checkpoints/step-{num_steps:08d}"
        here, there = tensors(run / last), tensors(straight / last)
        assert here.keys() == there.keys()
        different = [name for name in here if not torch.equal(here[name], there[name])]
        assert not different, f"{run}: other values of {different}"


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint, whole tensors by name."""
    read_state(checkpoint)
    reader = TensorReader(checkpoint)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def newest_whole(run: Path) -> Path:
    """The newest checkpoint of a run; it is read in full, and finite."""
    while True:
        newest = latest_checkpoint(run / "checkpoints")
        assert newest is not None, f"{run}: no checkpoint is left"
        try:
            values = tensors(newest).values()
        except (OSError, CheckpointException, RuntimeError):
            if newest.exists():
                raise
            continue  # the job has gone on, and dropped it for newer ones
        floats = [value for value in values if value.is_floating_point()]
        assert all(bool(value.isfinite().all()) for value in floats), f"{newest}: not finite"
        return newest


def _last_run(folder: Path) -> Path:
    """Where a job that was restarted before its first checkpoint has gone on."""
    return max(folder.parent.glob(f"{folder.name}*/"), key=lambda path: (len(path.name), path.name))


def _kills(soak: Soak, tries: int, *, name: str, wait: Callable[[Job], object]) -> list[float]:
    """Up to 25 kills of one job, which then finishes."""
    tries = min(tries, 25)
    seconds = []
    with soak.job(name, soak.num_steps, max_restarts=10 * tries) as job:
        # From the first checkpoint on, there is one to lose.
        job.until("checkpoint", lambda: "saved " in job.text())
        for _ in range(tries):
            wait(job)
            before = job.num_restarts()
            victims = job.workers()
            if job.process.poll() is not None or not victims:
                break
            os.kill(soak.chance.choice(victims), signal.SIGKILL)
            seconds.append(job.until_restarted(before))
            newest_whole(_last_run(job.folder))
        assert job.end() == 0, job.text()[-3000:]
    assert seconds, "the job was done before the first kill"
    soak.assert_as_undisturbed(_last_run(job.folder), soak.num_steps)
    return seconds


def kill(soak: Soak, tries: int) -> list[float]:
    """kill -9 of a rank at any moment of training."""
    return _kills(
        soak, tries, name="kill", wait=lambda job: time.sleep(soak.chance.uniform(0.2, 1.5))
    )


def kill_while_saving(soak: Soak, tries: int) -> list[float]:
    """kill -9 of a rank while a checkpoint is being written."""

    def wait(job: Job) -> None:
        checkpoints = _last_run(job.folder) / "checkpoints"
        job.until("save", lambda: any(checkpoints.glob(".writing-step-*")), poll_seconds=0.0005)
        time.sleep(soak.chance.uniform(0.0, 0.03))

    return _kills(soak, tries, name="kill saving", wait=wait)


def cut_or_missing(soak: Soak, tries: int) -> list[float]:
    """A file of the newest checkpoint is cut or gone; the one before is found instead."""
    copy = soak.folder / "cut"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(soak.undisturbed(40) / "checkpoints", copy)
    before, newest = sorted(copy.glob("step-*"))
    file = soak.chance.choice(sorted(newest.iterdir()))
    begin = time.monotonic()
    if soak.chance.random() < 0.5:
        file.unlink()
    else:
        os.truncate(file, soak.chance.randrange(file.stat().st_size))
    assert latest_checkpoint(copy) == before, f"{file.name} was cut, {before} not found"
    tensors(before)
    return [time.monotonic() - begin]


def full_disk(soak: Soak, tries: int) -> list[float]:
    """A small tmpfs fills up; without the right to mount one, a limit on the size of files."""
    disk = soak.folder / "disk"
    disk.mkdir(exist_ok=True)
    size = soak.chance.randrange(3_000, 12_000)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(disk)], capture_output=True
    )
    is_mounted = mounted.returncode == 0
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        values = {"TrainerArgs.ckpt_save_dir": str(disk), "TrainerArgs.ckpt_keep_last": 100}
        job = soak.job("full", soak.num_steps, values=values)
        if not is_mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
        with job:
            job.until_training()
            seconds = job.until("end", lambda: False)
            text = job.text()
            assert job.process.wait() != 0
        assert "could not be written" in text and "TrainerArgs.ckpt_save_dir" in text, text[-3000:]
        newest = latest_checkpoint(disk / job.folder.name)
        if is_mounted:
            assert newest is not None, "no checkpoint is left"
            tensors(newest)
        return [seconds]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if is_mounted:
            subprocess.run(["umount", str(disk)], check=True)


def data_damaged(soak: Soak, tries: int) -> list[float]:
    """Bytes of a data file are changed, or its end is cut off: refused before training."""
    from data.preprocess import main as preprocess  # needs polars, which training does not

    good, bad = soak.folder / "data", soak.folder / "data-damaged"
    if not good.exists():
        source = str(ROOT / "tests/fixtures/ml-100k")
        preprocess(["--dataset", "ml-100k", "--source", source, "--output", str(good)])
    shutil.rmtree(bad, ignore_errors=True)
    shutil.copytree(good, bad)
    facts = soak.chance.choice(list(read_manifest(good).files.values()))
    file = bad / facts.name
    content = bytearray(file.read_bytes())
    if soak.chance.random() < 0.5:
        content = content[: soak.chance.randrange(len(content))]
    else:
        begin = soak.chance.randrange(len(content))
        for place in range(begin, min(begin + 8, len(content))):
            content[place] ^= 1 + soak.chance.randrange(255)
    file.write_bytes(content)
    bindings = [f"DatasetArgs.dataset_path = {str(bad)!r}"]
    experiment = load_experiment("movielens_ranking.gin", bindings=bindings, task="ranking")
    started = time.monotonic()
    try:
        check_data(experiment)
    except ValueError as error:
        assert facts.name in str(error), error
        return [time.monotonic() - started]
    raise AssertionError(f"damage in {file} went unseen")


def nan_gradient(soak: Soak, tries: int) -> list[float]:
    """A NaN in a gradient of one rank: both stop at that step, the checkpoint before is whole."""
    step = soak.chance.randrange(6, 35)
    script = soak.folder / "nan.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(_NAN_ON_RANK_ONE)
    os.environ["BAD_STEP"] = str(step)
    with soak.job("nan", 40, script=str(script)) as job:
        job.until_training()
        seconds = job.until("end", lambda: False)
        assert job.process.wait() != 0
    assert f"step {step} is not finite (rank 1: the gradient of" in job.text(), job.text()[-3000:]
    saved = int(newest_whole(job.folder).name.removeprefix("step-"))
    assert saved == (step - 1) // 5 * 5, f"step {saved} is the newest, NaN at {step}"
    return [seconds]


def stopped_for_good(soak: Soak, tries: int) -> list[float]:
    """A rank hangs: the others give up after the time set, the launcher starts all anew."""
    with soak.job("hung", 40, max_restarts=1) as job:
        job.until("records", lambda: job.num_records() > 12)
        os.kill(soak.chance.choice(job.workers()), signal.SIGSTOP)
        seconds = job.until_restarted(0)
        assert job.end() == 0, job.text()[-3000:]
    assert list((job.folder / "stacks").iterdir()), "no stacks were written"
    soak.assert_as_undisturbed(job.folder, 40)
    return [seconds]


def stopped_for_a_while(soak: Soak, tries: int) -> list[float]:
    """A rank is slow for some seconds: the job goes on."""
    with soak.job("slow", 40) as job:
        job.until("records", lambda: job.num_records() > 5)
        victim = soak.chance.choice(job.workers())
        os.kill(victim, signal.SIGSTOP)
        time.sleep(8.0)
        os.kill(victim, signal.SIGCONT)
        begin, count = time.monotonic(), job.num_records()
        job.until("record", lambda: job.num_records() > count)
        seconds = time.monotonic() - begin
        assert job.end() == 0, job.text()[-3000:]
    assert "TrainerArgs.slow_step_seconds" in job.text()
    soak.assert_as_undisturbed(job.folder, 40)
    return [seconds]


def _signalled(soak: Soak, name: str, number: signal.Signals) -> tuple[Path, str]:
    with soak.job(name, soak.num_steps) as job:
        job.until_training()
        time.sleep(soak.chance.uniform(0.5, 2.0))
        job.process.send_signal(number)
        assert job.end() != 0
    return job.folder, job.text()


def _resumed(soak: Soak, run: Path) -> list[float]:
    values = {
        "TrainerArgs.max_train_iters": soak.num_steps,
        "TrainerArgs.output_dir": str(run),
    }
    begin = time.monotonic()
    with Job(run, values=values, flags=("--resume", "latest"), **soak.options) as job:
        told = job.num_records()
        job.until("record", lambda: job.num_records() > told)
        seconds = time.monotonic() - begin
        assert job.end() == 0, job.text()[-3000:]
    soak.assert_as_undisturbed(run, soak.num_steps)
    return [seconds]


def interrupted(soak: Soak, tries: int) -> list[float]:
    """Ctrl-C, then a resume from the newest checkpoint."""
    run, text = _signalled(soak, "interrupted", signal.SIGINT)
    assert "error: interrupted" in text, text[-3000:]
    newest_whole(run)
    return _resumed(soak, run)


def terminated(soak: Soak, tries: int) -> list[float]:
    """SIGTERM to the launcher: the present step is saved; then a resume."""
    run, text = _signalled(soak, "terminated", signal.SIGTERM)
    assert "ended by SIGTERM after step" in text, text[-3000:]
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    saved = int(newest_whole(run).name.removeprefix("step-"))
    assert saved == last, f"step {last} was done, {saved} is saved"
    return _resumed(soak, run)


def asked_to_save(soak: Soak, tries: int) -> list[float]:
    """SIGUSR1 to one rank: a checkpoint more, and the run as if nobody had asked."""
    values = {"TrainerArgs.ckpt_save_interval": 1000}
    with soak.job("asked", soak.num_steps, values=values) as job:
        job.until_training()
        os.kill(soak.chance.choice(job.workers()), signal.SIGUSR1)
        seconds = job.until("save", lambda: "saved " in job.text())
        assert job.end() == 0, job.text()[-3000:]
    soak.assert_as_undisturbed(job.folder, soak.num_steps)
    return [seconds]


FAULTS: dict[str, Callable[[Soak, int], list[float]]] = {
    "kill": kill,
    "kill while saving": kill_while_saving,
    "file cut or missing": cut_or_missing,
    "full disk": full_disk,
    "data damaged": data_damaged,
    "NaN in a gradient": nan_gradient,
    "rank stopped for good": stopped_for_good,
    "rank stopped for a while": stopped_for_a_while,
    "Ctrl-C": interrupted,
    "SIGTERM": terminated,
    "SIGUSR1": asked_to_save,
}
