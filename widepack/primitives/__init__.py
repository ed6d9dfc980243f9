"""The primitives: one file an op family. Importing this package fills the registry."""

from . import attention as attention
from . import conv as conv
from . import dims as dims
from . import embedding as embedding
from . import linear as linear
from . import norm as norm
from . import pointwise as pointwise
from . import pool as pool
from . import shape as shape
