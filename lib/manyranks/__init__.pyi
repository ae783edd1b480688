from . import (
    few_ranks as few_ranks,
)
from . import (
    given as given,
)
from . import (
    grade as grade,
)
from . import (
    kernels as kernels,
)
from . import (
    measure as measure,
)
from . import (
    parallel as parallel,
)
from . import (
    show as show,
)
from . import (
    theory as theory,
)
from . import (
    timeline as timeline,
)
from . import (
    training as training,
)
from . import (
    world as world,
)
from .lesson import attempt as attempt
from .scores import my_progress as my_progress
from .world import RankDied as RankDied
from .world import RankFailed as RankFailed
from .world import RankHung as RankHung
from .world import World as World
from .world import WorldError as WorldError

__version__: str

def load_ipython_extension(shell) -> None: ...
