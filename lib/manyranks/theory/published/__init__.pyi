from . import context as context
from . import conversions as conversions
from . import error_bars as error_bars
from . import expert as expert
from . import failures as failures
from . import fit as fit
from . import layers as layers
from . import layouts as layouts
from . import mfu as mfu
from . import one_gpu as one_gpu
from . import steps as steps
from .error_bars import confidence as confidence

def rows(name: str) -> list[dict[str, str]]: ...
def value(text: str) -> int | bool | str: ...
def pairs(text: str) -> dict[str, str]: ...
