"""Exact gradient accumulation for MindSpore, with one buffer for each parameter.

`core.window` adds gradients and updates on the device; `core.boundary` decides on the host when a window closes;
`steps` bring batches to them; `distributed` holds what ranks exchange. All other packages are optional, and do not
import each other.
"""
from .check.equivalence import check_equivalence as check_equivalence
from .check.groupnorm import batchnorm_to_groupnorm as batchnorm_to_groupnorm
from .checkpoint.checkpoint import load_checkpoint as load_checkpoint
from .checkpoint.checkpoint import save_checkpoint as save_checkpoint
from .checkpoint.file import CheckpointError as CheckpointError
from .checkpoint.weights import load_weights as load_weights
from .core.accumulator import Accumulator as Accumulator
from .core.length import by_epoch as by_epoch
from .core.length import until_weight as until_weight
from .core.length import updates_of as updates_of
from .core.stages import Stage as Stage
from .distributed.data_parallel import DataParallel as DataParallel
from .distributed.data_parallel import shard_parameters as shard_parameters
from .distributed.meeting import RanksDiffer as RanksDiffer
from .model.callbacks import FlushCallback as FlushCallback
from .model.callbacks import PerUpdate as PerUpdate
from .model.cell import TrainOneStepCell as TrainOneStepCell
from .model.log import WindowLog as WindowLog
from .runtime import avoid_busy_waiting as avoid_busy_waiting
from .steps.grad_cache import make_grad_cache_step as make_grad_cache_step
from .steps.train_step import make_train_step as make_train_step

__version__ = "0.4.0"
