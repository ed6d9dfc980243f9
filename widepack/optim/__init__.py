"""`widepack.optim`: optimizers, schedulers and gradient clipping for each member.

| file | what it does |
|---|---|
| `optimizers.py` | SGD, ASGD, Rprop, Adadelta, Adagrad and RMSprop: the place to start reading |
| `adam.py` | Adam, AdamW, Adamax, NAdam and RAdam |
| `member_wise.py` | Their base: options of N numbers, state dicts, frozen members |
| `rates.py` | `PerMember`, one number for each member |
| `schedulers.py` | `PerMemberScheduler`: a scheduler of torch for each member |
| `removal.py` | Removes members from optimizers and schedulers, for `Fused.remove` |
| `clipping.py` | `clip_grad_norm_`: clips by each member's own norm |
"""

from .adam import Adam as Adam
from .adam import Adamax as Adamax
from .adam import AdamW as AdamW
from .adam import NAdam as NAdam
from .adam import RAdam as RAdam
from .clipping import clip_grad_norm_ as clip_grad_norm_
from .optimizers import ASGD as ASGD
from .optimizers import SGD as SGD
from .optimizers import Adadelta as Adadelta
from .optimizers import Adagrad as Adagrad
from .optimizers import RMSprop as RMSprop
from .optimizers import Rprop as Rprop
from .rates import PerMember as PerMember
from .schedulers import PerMemberScheduler as PerMemberScheduler
