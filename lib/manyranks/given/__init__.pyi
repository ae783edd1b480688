from . import (
    checkpointing as checkpointing,
)
from . import (
    context as context,
)
from . import (
    disk as disk,
)
from . import (
    failures as failures,
)
from . import (
    kernels as kernels,
)
from . import (
    mfu as mfu,
)
from . import (
    nd as nd,
)
from . import (
    pipeline as pipeline,
)
from . import (
    start_here as start_here,
)
from . import (
    tensor as tensor,
)
from . import (
    zero as zero,
)
