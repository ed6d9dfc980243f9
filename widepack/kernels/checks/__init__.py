"""Checks the operands of ops whose kernels read or write outside of them.

torch checks the operands of most ops. The ops of `CHECKS` trust what their public functions check before,
or what another operand says: a forged program, or a call with unusual sizes, would read the memory of other
values, or end the process. A check has the parameters of its op and runs at every call, before the kernel.

| file | ops |
|---|---|
| `require.py` | Provides the error and the conditions that checks share, and keeps the checks by op |
| `images.py` | convolutions, pools, upsampling, sampling at a grid |
| `layers.py` | attention on a CPU, normalizations, recurrent layers |
| `values.py` | bags of embeddings, segments, CTC, solvers, Fourier transforms, loops of a given length |

`scripts/stress/fence` runs every op of the allow-list with drawn operands behind guard pages.
"""

from __future__ import annotations

from . import images as images  # these modules fill CHECKS
from . import layers as layers
from . import values as values
from .require import CHECKS as CHECKS
from .require import OF_SIZES as OF_SIZES
from .require import OF_VALUES as OF_VALUES
from .require import Check as Check
from .require import OperandError as OperandError
