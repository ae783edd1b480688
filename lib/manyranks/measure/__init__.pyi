from . import (
    budget as budget,
)
from . import (
    flops as flops,
)
from . import (
    kernel as kernel,
)
from . import (
    memory as memory,
)
from . import (
    meta as meta,
)
from . import (
    parity as parity,
)
from . import (
    profile as profile,
)
from . import (
    timing as timing,
)
from .calls import Call as Call
from .calls import Recorder as Recorder
from .divergence import first_divergence as first_divergence
