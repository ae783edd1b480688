from manyranks.theory.tables import rows as rows

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
from . import peaks as peaks
from . import steps as steps
from .error_bars import confidence as confidence
from .error_bars import peak_confidence as peak_confidence
