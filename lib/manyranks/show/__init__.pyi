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
    drawings as drawings,
)
from . import (
    expert as expert,
)
from . import (
    failures as failures,
)
from . import (
    hardware as hardware,
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
    tensor as tensor,
)
from . import (
    zero as zero,
)
from .explorer import Explorer as Explorer
from .explorer import choice as choice
from .explorer import log_slider as log_slider
from .explorer import slider as slider
from .explorer import value_slider as value_slider
from .gantt import Gantt as Gantt
from .gantt import timeline as timeline
from .guessed import guess as guess
from .lines import curves as curves
from .listing import changes as changes
from .listing import source as source
from .tables import axes as axes
from .tables import reconcile as reconcile
from .tables import table as table
from .units import duration as duration
from .units import flop_rate as flop_rate
from .units import flops as flops
from .units import rate as rate
from .units import size as size
