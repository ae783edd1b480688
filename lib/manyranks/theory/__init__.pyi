from . import (
    activations as activations,
)
from . import (
    architecture as architecture,
)
from . import (
    batch as batch,
)
from . import (
    blocks as blocks,
)
from . import (
    calibration as calibration,
)
from . import (
    calls as calls,
)
from . import (
    checkpointing as checkpointing,
)
from . import (
    checks as checks,
)
from . import (
    cluster as cluster,
)
from . import (
    collectives as collectives,
)
from . import (
    communicate as communicate,
)
from . import (
    compute as compute,
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
    failures as failures,
)
from . import (
    flops as flops,
)
from . import (
    hardware as hardware,
)
from . import (
    hybrid as hybrid,
)
from . import (
    kernels as kernels,
)
from . import (
    layer as layer,
)
from . import (
    memory as memory,
)
from . import (
    nd as nd,
)
from . import (
    network as network,
)
from . import (
    offloading as offloading,
)
from . import (
    optimal_checkpoints as optimal_checkpoints,
)
from . import (
    pace as pace,
)
from . import (
    pipeline as pipeline,
)
from . import (
    planner as planner,
)
from . import (
    published as published,
)
from . import (
    replay_costs as replay_costs,
)
from . import (
    roofline as roofline,
)
from . import (
    sharding as sharding,
)
from . import (
    stacks as stacks,
)
from . import (
    stages as stages,
)
from . import (
    states as states,
)
from . import (
    step as step,
)
from . import (
    tensor as tensor,
)
from . import (
    written as written,
)
from .architecture import LatentAttention as LatentAttention
from .architecture import ModelShape as ModelShape
from .calibration import calibrate as calibrate
from .cluster import Cluster as Cluster
from .cluster import clusters as clusters
from .hardware import Accelerator as Accelerator
from .hardware import Link as Link
from .hardware import accelerators as accelerators
from .hardware import links as links
from .huggingface import from_hf_config as from_hf_config
from .hybrid import HybridShape as HybridShape
from .plan import Plan as Plan
from .replay_costs import ClusterCosts as ClusterCosts
from .shapes import hybrids as hybrids
from .shapes import models as models
