"""For networks that MindSpore shards: no exchange of ms_accum, and buffers that are cut like their parameters."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import finalize

from mindspore import Parameter

from ..mindspore_api import isconstant, jit_class
from .exchange import OneDevice
from .parallel_modes import require_compiled, require_whole_gradients, shards

if TYPE_CHECKING:
    from ..tensors import Gradients, Numbers, Scalar
    from .buckets import AccumulatedParameters


@jit_class
class Slices(OneDevice):
    """Exchange nothing, for graphs that MindSpore may shard: its own collectives are in the backward pass.

    Args:
        accumulated: What is accumulated.
        features: Names of features that need whole gradients. They raise an error when a graph with slices is compiled.

    Source: the clones are those of MindSpore's tutorial on gradient accumulation.
    """

    def __init__(self, accumulated: AccumulatedParameters, features: tuple[str, ...]) -> None:
        super().__init__(accumulated)
        self.parameters, self.features = accumulated.parameters, features

    def buffers(self, prefix: str) -> tuple[Parameter, ...]:
        """See `OneDevice`. Return clones of the parameters: MindSpore gives a clone the layout of its original."""
        buffers = tuple(parameter.clone(init="zeros") for parameter in self.parameters)
        for buffer, parameter, dtype in zip(buffers, self.parameters, self.dtypes):
            buffer.name, buffer.requires_grad = f"{prefix}.{parameter.name}", False
            if buffer.dtype != dtype:
                buffer.set_dtype(dtype)
        # A parameter keeps a list of its clones, so they would live as long as the parameter.
        finalize(self, _unlist, tuple(p.param_info for p in self.parameters), buffers)
        return buffers

    def give_back(self, buffers: tuple[Parameter, ...]) -> None:
        """See `OneDevice`. Clones fit only their originals."""

    def microbatch(self, gradients: Gradients, numbers: Numbers, measured: Numbers, held: Any
                   ) -> tuple[Gradients, Numbers, Numbers]:
        """See `OneDevice`. Raise ValueError when a graph is compiled, if a feature would get slices, and op by op."""
        # While a graph is compiled, no value is known. Gradients that were added before are None.
        # While a graph is compiled, no value is known. Gradients that were added before are None.
        require_compiled(gradients is None or isconstant(gradients[0]))
        require_whole_gradients(self.features)
        return gradients, numbers, measured

    def window(self, buffers: Gradients, unit: Scalar, numbers: Numbers, measured: Numbers
               ) -> tuple[Gradients, Scalar, Numbers]:
        """See `OneDevice` and `microbatch`."""
        require_whole_gradients(self.features)
        return buffers, unit, measured

    def require_whole_state(self) -> None:
        """See `OneDevice`."""
        if shards() or any(parameter.sliced for parameter in self.parameters):
            raise ValueError("MindSpore has cut the parameters into slices, and this rank holds only its own, so one "
                             "file cannot hold the run; save and load with mindspore.save_checkpoint and "
                             "load_checkpoint, with one file for each rank, after flush() has closed the window")


def _unlist(infos: tuple, clones: tuple[Parameter, ...]) -> None:
    for info, clone in zip(infos, clones):
        info.cloned_obj = [other for other in info.cloned_obj if other is not clone]
