from . import (
    formulas as formulas,
)
from . import (
    rules as rules,
)
from . import (
    tokens as tokens,
)
from .holds import of_rank as of_rank
from .sends import calls as calls
from .sends import payload as payload
from .twin import Twin as Twin
from .twin import twin as twin
from .verdict import check as check
