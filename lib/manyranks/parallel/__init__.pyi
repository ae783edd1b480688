from . import (
    boxes as boxes,
)
from . import (
    checkpoint_plan as checkpoint_plan,
)
from . import (
    checkpointing as checkpointing,
)
from . import (
    collectives as collectives,
)
from . import (
    context as context,
)
from . import (
    data_parallel as data_parallel,
)
from . import (
    expert as expert,
)
from . import (
    fsdp as fsdp,
)
from . import (
    mesh as mesh,
)
from . import (
    offload as offload,
)
from . import (
    pipeline as pipeline,
)
from . import (
    precision as precision,
)
from . import (
    recompute_policy as recompute_policy,
)
from . import (
    saving as saving,
)
from . import (
    sharded as sharded,
)
from . import (
    tensor as tensor,
)
from . import (
    zero as zero,
)
from .checkpointing import checkpoint as checkpoint
from .checkpointing import checkpoint_modules as checkpoint_modules
from .context import ContextParallel as ContextParallel
from .data_parallel import DataParallel as DataParallel
from .data_parallel import OverlappedDataParallel as OverlappedDataParallel
from .expert import ExpertParallel as ExpertParallel
from .fsdp import FullyShardedDataParallel as FullyShardedDataParallel
from .mesh import Mesh as Mesh
from .pipeline.runtime import Pipeline as Pipeline
from .tensor import parallelize as parallelize
from .zero import Zero3 as Zero3
from .zero import ZeroOptimizer as ZeroOptimizer
