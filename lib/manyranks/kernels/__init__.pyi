from . import compiled as compiled
from .attention import flash_attention as flash_attention
from .copying import copy as copy
from .copying import transpose as transpose
from .losses import cross_entropy as cross_entropy
from .rows import softmax as softmax
from .tiles import product as product
