"""`widepack.optim`: SGD, Adam and AdamW with a learning rate and a weight decay for each member.

Start reading with `optimizers.py`. `rates.py` has `PerMember`, one number for each member.
"""

from .optimizers import SGD as SGD
from .optimizers import Adam as Adam
from .optimizers import AdamW as AdamW
from .rates import PerMember as PerMember
