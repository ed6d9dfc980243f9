"""Holds what kernels take on a machine: one table that plans and advice read.

| in | out | start reading |
|---|---|---|
| an op with its arguments on torch's meta device | its `CallTime` | `model.py`, `sources.py` |

| file | what it does |
|---|---|
| `calibration.py` | Measures the kernel times of this machine |
| `call_time.py` | Defines the time of a call |
| `cpu.py` | Predicts calls on a CPU from measured kernel times |
| `cuda.py` | Predicts calls on a CUDA device from the limits of its data sheet |
| `curves.py` | Gives times between measured sizes |
| `kernel_work.py` | Defines what the table needs to know of a kernel |
| `model.py` | Declares what both predictions have in common |
| `profile.py` | Defines the kernel times of a machine, and their JSON form |
| `profiles/` | Kernel times of machines that ship with the package |
| `program.py` | Predicts the call of a whole program |
| `sources.py` | Finds the kernel times of this machine |
| `work.py` | Describes a call by its kernels: kinds and sizes |
"""
