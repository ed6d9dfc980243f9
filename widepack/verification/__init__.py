"""Checks answers: the two comparisons of a build, the reference answers, and the probe.

Comparison (a) checks the captured program against the user's own module. Comparison (b) checks the wide
program against each member in float64. The bound is in `tolerance.py`.

| in | out | start reading |
|---|---|---|
| members, programs, modules | a record, or `VerificationError` | `tolerance.py`, `answers.py`, `wide.py` |
| a program of an artifact on another machine | a pass, or `ProbeError` | `record.py` and `probe.py` |

| file | what it does |
|---|---|
| `answers.py` | Computes the members' reference answers, and runs comparison (a) on the way |
| `approximation.py` | Measures what approximate weights change in the members' answers |
| `calls.py` | Makes the calls of a verification: their batches and sizes |
| `capture_causes.py` | Finds why a member's own module answers otherwise than the captured program |
| `coarse_eps.py` | Finds the coarsest dtype that each output of a program is computed through |
| `equivalent_runs.py` | Evaluates members again after a first comparison failed |
| `float64_members.py` | Estimates the rounding error of members in float64 |
| `module_run.py` | Runs the user's own module on one call, and restores its buffers afterwards |
| `near_ties.py` | Finds the answers of a member whose decisions rounding may change |
| `op_record.py` | Records what a module does in one call: each op with its literals |
| `own_module.py` | Runs comparison (a): the answers of the user's own modules against those |
| `parts.py` | Divides a wide program into parts of its members |
| `probe.py` | Makes the probe of an artifact, and checks a loaded program against it |
| `program_difference.py` | Compares the captures of two members, and says where their programs differ |
| `record.py` | Reads and writes the record of a build's verification, as the manifest stores it |
| `reference.py` | Computes the reference answers of an entry once, and checks wide programs |
| `root_mean_square.py` | Takes root mean squares of numbers of any size |
| `same_program.py` | Checks that all members are one program up to their weights, by looking |
| `rest_mode.py` | Runs the user's own module without its random draws |
| `small_sizes.py` | Finds out on the member itself what torch.export assumes about small sizes |
| `subject.py` | Describes what a verification runs: the members, their programs and modules |
| `term_sizes.py` | Measures the terms of answers whose sum is zero but for rounding |
| `tf32_bounds.py` | Widens the bounds of answers that a GPU computes in TF32 |
| `tolerance.py` | Measures errors of answers against float64, and defines the bound |
| `unsteady.py` | Finds out why a member gives other answers from run to run |
| `weight_error.py` | Measures what int8 weights change in the members' answers |
| `wide.py` | Runs comparison (b): wide programs against the members' float64 answers |
"""
