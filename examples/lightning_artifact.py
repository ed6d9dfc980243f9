"""A callback of Lightning: the last of N runs writes an artifact of all their modules.

    for fold in range(5):  # or five processes
        save = ModelCheckpoint(monitor="val_loss")
        ensemble = EnsembleArtifact("ens.wide", run=fold, runs=5, inputs=["x=float32[B,16]"])
        Trainer(callbacks=[save, ensemble]).fit(Classifier(), *loaders[fold])

    ens = widepack.load("ens.wide")  # needs neither Lightning nor the code of Classifier
    ens.mean(x, of="softmax")

A member answers what the module's `forward` answers in eval mode, with the best weights that the run's
ModelCheckpoint saved.
"""

from __future__ import annotations

import copy
import fcntl
import shutil
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer  # or from lightning.pytorch

import widepack


class EnsembleArtifact(Callback):
    """Keeps the best checkpoint of a run. When those of all runs are there, builds the artifact.

    The first run already tries to build, without writing, so a wrong option is found early. A run that is
    repeated replaces its member. `forward` must read no hyperparameter that differs between the runs.

    Args:
        artifact: The folder to write. The checkpoints are beside it in the folder `<artifact>.runs`, which
            must be empty when an experiment begins.
        run: The number of this run, from 0.
        runs: The number of runs.
        **options: What `widepack.build` takes, such as `inputs`.
    """

    def __init__(self, artifact: str, *, run: int, runs: int, **options: Any) -> None:
        if not 0 <= run < runs:
            raise ValueError(f"run={run}, but {runs} runs have the numbers 0 to {runs - 1}")
        self.files = [Path(f"{artifact}.runs", f"run{i}.ckpt") for i in range(runs)]
        self.file, self.artifact, self.options = self.files[run], artifact, options

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copies the run's best checkpoint, and builds."""
        if trainer.fast_dev_run or not trainer.is_global_zero:
            return
        best = getattr(trainer.checkpoint_callback, "best_model_path", "")
        if not best:
            raise RuntimeError(f"{self.file.stem} has no checkpoint: give the Trainer a ModelCheckpoint")
        module = copy.deepcopy(pl_module).cpu()
        options = {"model": lambda: copy.deepcopy(module), "force": True, **self.options}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.with_name("lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # runs of other processes that end now wait
            shutil.copyfile(best, self.file.with_suffix(".part")).replace(self.file)
            there = [file for file in self.files if file.exists()]
            widepack.build(there, self.artifact, dry_run=len(there) < len(self.files), **options)
