from . import (
    checkpoint as checkpoint,
)
from . import (
    config as config,
)
from . import (
    corpus as corpus,
)
from . import (
    fused as fused,
)
from . import (
    gpt as gpt,
)
from . import (
    initial as initial,
)
from . import (
    parallelize as parallelize,
)
from . import (
    progress as progress,
)
from . import (
    tensor_styles as tensor_styles,
)
from . import (
    trainer as trainer,
)
from . import (
    utilization as utilization,
)
from .config import GPTConfig as GPTConfig
from .config import TrainingConfig as TrainingConfig
from .fused import fuse as fuse
from .gpt import GPT as GPT
from .trainer import Trainer as Trainer
from .trainer import train as train
