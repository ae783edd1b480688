from . import (
    automatic as automatic,
)
from . import (
    beside as beside,
)
from . import (
    dualpipe as dualpipe,
)
from . import (
    program as program,
)
from . import (
    runtime as runtime,
)
from . import (
    schedules as schedules,
)
from . import (
    split as split,
)
from . import (
    split_backward as split_backward,
)
from . import (
    verify as verify,
)
