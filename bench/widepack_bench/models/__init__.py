"""Reference networks of the suite, written plainly: what a person would write, in the sizes of the suite's rows.

Every file has factories that `widepack build --model widepack_bench.models.<file>:<factory>` takes. Weights are random (`weights.py`): nothing is trained.
"""
