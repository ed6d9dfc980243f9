"""Chooses the strategy of each node and region of a member program, and records the reason in a plan.

| in | out | start reading |
|---|---|---|
| a member program, a device, the user's request | `Plan` | `plan.py`, `heuristics.py`, `cpu_plans.py` |

| file | what it does |
|---|---|
| `apply_choice.py` | Runs a node of the member program for all members, as a plan says |
| `batch_growth.py` | Computes how figures of a program grow with its batch: bytes of activations |
| `call_memory.py` | Predicts the memory that a call takes from the system anew |
| `chain_plans.py` | Plans for chains of small linear layers on a GPU: the strategy `chain` |
| `cpu_plans.py` | Makes the plans of a CPU by predicted times |
| `cpu_training_plans.py` | Makes the plans of a CPU for members that train: wide, or a loop |
| `cuda_plans.py` | Makes the plans of a CUDA device by predicted times |
| `expert_plans.py` | Plans for networks that select a matrix for each row: the strategy `experts` |
| `heuristics.py` | Makes plans without a device: it calls the files of each device and region |
| `loop_times.py` | Predicts the time of a loop over the members |
| `mask_plans.py` | Plans for attention with masks on a CPU: the strategy `blocks` |
| `packed_convs.py` | Finds the convolutions whose weights may be packed |
| `plan.py` | Defines the plan: the strategy of each region and node, with its reason |
| `plan_cache.py` | Stores plans that were measured on this machine in the user's cache |
| `regions.py` | Makes the wide plan and the loop plan of a member program |
| `request.py` | Parses the strategies that a user requests |
| `separate_layers.py` | Predicts the time of a chain's layers as separate nodes |
| `split_plans.py` | Plans for weights that are a base plus thin factors |
| `channels_last_plans.py` | Changes plans for members that train: convolutions in channels-last memory |
| `strategy_times.py` | Predicts the time of every strategy of every node, on torch's meta device |
| `time_reasons.py` | Writes predicted times as words, for the reasons of plans |
| `training_plans.py` | Changes plans for members that train: large linear layers run through oneDNN |
| `way_choice.py` | Chooses among wide and looped ways, strategies and forms of weights, by their times |
| `working_set.py` | Computes how many bytes of activations an op reads and writes |
"""
