from .counted.measurement import Measurement as Measurement
from .counted.measurement import payload as payload
from .errors import RankDied as RankDied
from .errors import RankFailed as RankFailed
from .errors import RankHung as RankHung
from .errors import WorldError as WorldError
from .world import World as World
