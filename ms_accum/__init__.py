from .core.accumulator import Accumulator as Accumulator
from .core.length import by_epoch as by_epoch
from .core.length import until_weight as until_weight
from .core.stages import Stage as Stage
from .steps.train_step import make_train_step as make_train_step
__version__ = "0.3.0"
