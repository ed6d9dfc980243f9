"""`widepack.optim`: optimizers, schedulers and gradient clipping for each member.

| file | what it does |
|---|---|
| `optimizers.py` | SGD, Adam, AdamW and Adadelta: the place to start reading |
| `scaled_optimizers.py` | RMSprop, Adagrad and Adamax |
| `nadam.py`, `radam.py`, `rprop.py`, `asgd.py` | The optimizer of this name |
| `member_wise.py` | Their base: options of N numbers, state dicts, frozen members |
| `rates.py` | `PerMember`, one number for each member |
| `schedulers.py` | `PerMemberScheduler`: a scheduler of torch for each member |
| `removal.py` | Removes members from optimizers and schedulers, for `Fused.remove` |
| `clipping.py` | `clip_grad_norm_`: clips by each member's own norm |
"""

from .asgd import ASGD as ASGD
from .clipping import clip_grad_norm_ as clip_grad_norm_
from .nadam import NAdam as NAdam
from .optimizers import SGD as SGD
from .optimizers import Adadelta as Adadelta
from .optimizers import Adam as Adam
from .optimizers import AdamW as AdamW
from .radam import RAdam as RAdam
from .rates import PerMember as PerMember
from .rprop import Rprop as Rprop
from .scaled_optimizers import Adagrad as Adagrad
from .scaled_optimizers import Adamax as Adamax
from .scaled_optimizers import RMSprop as RMSprop
from .schedulers import PerMemberScheduler as PerMemberScheduler
