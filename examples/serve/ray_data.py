"""Scores a data set with Ray Data: `python ray_data.py ens.wide rows.parquet scores`.

The rows have a column `x` with the input of one row. The scores have the mean and the deviation of the members.
Needs `pip install widepack "ray[data]"`.
"""

import argparse

import numpy as np
import ray
import torch

import widepack


class Score:
    """Loads the artifact once in each worker."""

    def __init__(self, artifact: str) -> None:
        self.ens = widepack.load(artifact, threads=1)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        x = torch.from_numpy(np.stack(list(batch["x"])))
        figures = self.ens.reduce(x, "mean", "std")
        return {name: value.numpy() for name, value in figures.items()}


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("artifact")
    options.add_argument("rows")
    options.add_argument("scores")
    options.add_argument("--workers", type=int, default=1)
    given = options.parse_args()
    workers = ray.data.ActorPoolStrategy(size=given.workers)
    arguments = {"fn_constructor_args": [given.artifact], "batch_size": 256, "compute": workers, "num_cpus": 1}
    ray.data.read_parquet(given.rows).map_batches(Score, **arguments).write_parquet(given.scores)
