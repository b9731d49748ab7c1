"""Exact gradient accumulation for MindSpore, with one buffer for each parameter.

    batch - split -> microbatch - value_and_grad -> add - window closed? - no -> next microbatch
                                                     |         |
                                                     |        yes
                                                     v         v
                       reduce -> normalise -> clip -> optimizer -> reset
"""
from .accumulator import Accumulator as Accumulator
from .callbacks import FlushCallback as FlushCallback
from .callbacks import PerUpdate as PerUpdate
from .callbacks import WindowLog as WindowLog
from .checkpoint import load_checkpoint as load_checkpoint
from .checkpoint import save_checkpoint as save_checkpoint
from .distributed import DataParallel as DataParallel
from .equivalence import check_equivalence as check_equivalence
from .grad_cache import make_grad_cache_step as make_grad_cache_step
from .groupnorm import batchnorm_to_groupnorm as batchnorm_to_groupnorm
from .model import TrainOneStepCell as TrainOneStepCell
from .noise_scale import GradientNoiseScale as GradientNoiseScale
from .noise_scale import scale_lr as scale_lr
from .planning import plan_micro_batch as plan_micro_batch
from .runtime import avoid_busy_waiting as avoid_busy_waiting
from .train_step import make_train_step as make_train_step
from .window import by_epoch as by_epoch

__version__ = "0.1.0"
