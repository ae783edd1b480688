from . import (
    formulas as formulas,
)
from . import (
    rules as rules,
)
from . import (
    tokens as tokens,
)
from .sends import calls as calls
from .sends import payload as payload
from .states import of_rank as of_rank
from .twin import Twin as Twin
from .twin import twin as twin
from .verdict import check as check
