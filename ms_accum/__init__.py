"""Exact gradient accumulation for MindSpore, with one buffer for each parameter.

    batch ─ pieces ─► piece ─ differentiate ─► add ─ full? ─ no ─► next microbatch
                                                │ yes
                                                ▼
       exchange ─► unscale ─► judge ─► normalise ─► clip ─► optimizer ─► clear

Files: step, microbatch, pieces; differentiate; accumulator, adding, buffers; window, boundary;
distributed/exchange; loss_scale; nonfinite; update; in_place.
"""
from .accumulator import Accumulator as Accumulator
from .callbacks import FlushCallback as FlushCallback
from .callbacks import PerUpdate as PerUpdate
from .callbacks import WindowLog as WindowLog
from .check.equivalence import check_equivalence as check_equivalence
from .check.groupnorm import batchnorm_to_groupnorm as batchnorm_to_groupnorm
from .checkpoint import load_checkpoint as load_checkpoint
from .checkpoint import save_checkpoint as save_checkpoint
from .checkpoint_file import CheckpointError as CheckpointError
from .contrastive import make_grad_cache_step as make_grad_cache_step
from .distributed.exchange import DataParallel as DataParallel
from .model import TrainOneStepCell as TrainOneStepCell
from .runtime import avoid_busy_waiting as avoid_busy_waiting
from .train_step import make_train_step as make_train_step
from .window import by_epoch as by_epoch
from .window import until_weight as until_weight
from .window import updates_of as updates_of

__version__ = "0.2.0.dev0"
