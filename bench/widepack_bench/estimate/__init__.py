"""Estimates the time of programs that were not run: their kernels, at the sizes of a call, at rates of this
machine.

| module | what it does |
|---|---|
| `kernel_work.py` | the kind and the size of a kernel's work |
| `rates.py` | rates of a machine, and the time of a kernel at them |
| `calibration.py` | measures the rates of this machine, with kernels of general sizes |
| `call_time.py` | the time of a call of a wide program, and of the members in a loop |
"""
