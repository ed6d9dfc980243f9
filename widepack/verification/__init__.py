"""Checks answers: the two comparisons of a build, the reference answers, and the probe.

Comparison (a) checks the captured program against the user's own module. Comparison (b) checks the wide
program against each member in float64. The bound is in `tolerance.py`.

| in | out | start reading |
|---|---|---|
| members, programs, modules | a record, or `VerificationError` | `tolerance.py`, `reference.py` |
| a program of an artifact on another machine | a pass, or `ProbeError` | `record.py` and `probe.py` |

| file | what it does |
|---|---|
| `answers.py` | Computes the members' reference answers, and runs comparison (a) on the way |
| `approximation.py` | Measures what approximate weights change in the members' answers |
| `calls.py` | Makes the calls of a verification: their batches and sizes |
| `entries.py` | Defines the entries whose programs are verified |
| `equivalent_runs.py` | Evaluates members again after a first comparison failed |
| `module_run.py` | Runs the user's own module on one call, with or without its random draws |
| `own_module.py` | Runs comparison (a): the answers of the user's own modules, and causes of differences |
| `parts.py` | Divides a wide program into parts of its members |
| `probe.py` | Makes the probe of an artifact, and checks a loaded program against it |
| `record.py` | Reads and writes the record of a build's verification, as the manifest stores it |
| `reference.py` | Computes the reference answers of an entry once, and runs comparison (b) |
| `rounding.py` | Measures the rounding error of answers that cancel, and of members in float64 |
| `same_program.py` | Checks that all members are one program up to their weights, by looking |
| `small_sizes.py` | Finds out on the member itself what torch.export assumes about small sizes |
| `subject.py` | Describes what a verification runs: the members, their programs and modules |
| `tf32_bounds.py` | Widens the bounds of answers that a GPU computes in TF32 |
| `tolerance.py` | Measures errors of answers against float64, and defines the bound |
| `weight_error.py` | Measures what int8 weights change in the members' answers |
"""
