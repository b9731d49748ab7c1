"""Exact gradient accumulation for MindSpore, with one buffer for each parameter.

    batch - split -> microbatch - value_and_grad -> add - window closed? - no -> next microbatch
                                                     |         |
                                                     |        yes
                                                     v         v
                       reduce -> normalise -> clip -> optimizer -> reset
"""
from .accumulator import Accumulator as Accumulator
from .batch_size.adaptive import AdaptiveWindow as AdaptiveWindow
from .batch_size.noise_scale import GradientNoiseScale as GradientNoiseScale
from .batch_size.noise_scale import scale_adam as scale_adam
from .batch_size.noise_scale import scale_lr as scale_lr
from .batch_size.planning import PlanError as PlanError
from .batch_size.planning import plan_micro_batch as plan_micro_batch
from .batch_size.schedules import batch_ramp as batch_ramp
from .batch_size.schedules import seesaw as seesaw
from .callbacks import FlushCallback as FlushCallback
from .callbacks import PerUpdate as PerUpdate
from .callbacks import WindowLog as WindowLog
from .check.equivalence import check_equivalence as check_equivalence
from .check.groupnorm import batchnorm_to_groupnorm as batchnorm_to_groupnorm
from .checkpoint import load_checkpoint as load_checkpoint
from .checkpoint import save_checkpoint as save_checkpoint
from .checkpoint_file import CheckpointError as CheckpointError
from .contrastive import make_grad_cache_step as make_grad_cache_step
from .distributed.local import LocalUpdates as LocalUpdates
from .distributed.reducers import DataParallel as DataParallel
from .distributed.watch import ending_together as ending_together
from .model import TrainOneStepCell as TrainOneStepCell
from .runtime import avoid_busy_waiting as avoid_busy_waiting
from .train_step import make_train_step as make_train_step
from .window import by_epoch as by_epoch
from .window import until_weight as until_weight

__version__ = "0.2.0.dev0"
