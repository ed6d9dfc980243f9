"""Derives what a call costs from a program: FLOP, bytes, kernels and peak memory, as formulas over its dims.

| in | out | start reading |
|---|---|---|
| a program, the kinds of its slots, example sizes | `widepack_artifacts.costs.Costs` | `derive.py` |

| file | what it does |
|---|---|
| `amounts.py` | Adds the kernels of a program up: rows by module, op and line, states of the memory |
| `at_sizes.py` | Counts the kernels of a program at given sizes, one by one |
| `block_sums.py` | Counts pairs below lines and stairs by closed formulas |
| `counts.py` | Counts one kernel: FLOP, other operations and bytes, from the sizes of its tensors |
| `data_regions.py` | Describes pairs that are given as data by a region |
| `derive.py` | Derives the costs of a program: one row for each op of a module, totals, and the peak |
| `expressions.py` | Turns sizes into formulas over named dims, and formulas into text |
| `live_storages.py` | Tracks the memory that is live after each kernel, as formulas |
| `mask_data.py` | Finds out what the data of a weight are as a mask |
| `mask_indices.py` | Holds whole numbers that follow from indices, such as `i // 4` |
| `mask_operands.py` | Describes one node of a program, as the rules of masks read it |
| `mask_steps.py` | Follows one op of a program that makes masks: says what is known of its result |
| `mask_values.py` | Holds what is known of a value of which a mask is made, and combines such values |
| `mask_views.py` | Follows the views of a program that makes masks |
| `mask_weights.py` | Finds the weights of a program that may be masks |
| `masked_pairs.py` | Finds which pairs of query and key the masks of a program forbid |
| `other_ops.py` | Counts operations of ops without a FLOP formula: elementwise ops, reductions |
| `pair_boxes.py` | Describes a set of pairs (query, key) by inequalities, and counts it |
| `pair_regions.py` | Combines sets of pairs by `and`, `or` and `not`, and counts them |
| `pair_tables.py` | Holds sets of pairs that are no boxes, as data |
| `recorder.py` | Runs a program on symbolic tensors, and records every kernel that it starts |
"""
