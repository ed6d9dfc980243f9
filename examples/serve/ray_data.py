"""Scores a data set with Ray Data: `python ray_data.py ens.wide rows.parquet scores`.

The rows have a column `id`, and a column `x` with the input of one row. The scores have the `id`, and the
mean and the deviation of the members' answers. Needs `pip install widepack "ray[data]"`.
"""

import sys

import numpy as np
import ray
import torch

import widepack

WORKERS = 1


class Score:
    """Loads the artifact once in each worker."""

    def __init__(self, artifact: str) -> None:
        self.ens = widepack.load(artifact, threads=1)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        x = torch.from_numpy(np.stack(list(batch["x"])))
        figures = self.ens.reduce(x, "mean", "std")
        # Ray Data does not keep the order of the rows, so that the id goes with them.
        return {"id": batch["id"], **{name: value.numpy() for name, value in figures.items()}}


if __name__ == "__main__":
    artifact, rows, scores = sys.argv[1:]
    workers = ray.data.ActorPoolStrategy(size=WORKERS)
    options = {"fn_constructor_args": [artifact], "compute": workers, "num_cpus": 1}
    ray.data.read_parquet(rows).map_batches(Score, batch_size=256, **options).write_parquet(scores)
