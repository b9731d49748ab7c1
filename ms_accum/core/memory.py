"""Notice Parameters whose memory a script has replaced (`set_data`, `load_param_into_net`): graphs keep the old one.

    after the first microbatch    where are parameters, rates, and what else is used?
    after an update               where is the optimizer's state? It may have been moved to a device.
    at each epoch, flush, save and load, and after 1, 2, 4, 8, ... updates of a train step: still there?
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Optional
from warnings import warn
from zlib import crc32

from mindspore import Parameter, nn

from ..distributed.parallel_modes import shards
from ..mindspore_api import address_of
from ..tensors import as_array
from .optimizers import (
    assign_rates_of_groups,
    is_compiled,
    other_state_of,
    own_name,
    rates_in,
    rates_of,
    state_of,
)

if TYPE_CHECKING:
    from .window import Window

_REPLACED = ("{} was given new memory after the training had begun (by load_param_into_net or set_data), but compiled "
             "graphs keep the old one: what was trained since then is not in the network; load weights with "
             "ms_accum.load_weights, or assign them with ops.assign, and build the optimizer and the train step again")
_REPLACED_STATE = ("{} of the optimizer was given new memory after the training had begun (by load_param_into_net or "
                   "set_data), but compiled graphs keep the old one, so it had no effect; build the optimizer and the "
                   "train step again, and change it with ops.assign")
_STALE = ("{} was given new memory after the training had begun (by load_param_into_net or set_data); compiled graphs "
          "that use it keep its old values; copy new ones into it, with ms_accum.load_weights or ops.assign")
_CONSTANT = ("the buffer {} (register_buffer) has changed after the training had begun, but compiled graphs keep the "
             "values that it had in the first call; make it a Parameter with requires_grad=False, or give eager=True")
_MOVING = {"beta1_power", "beta2_power"}  # of nn.Adam and others, which give them new memory op by op themselves


class Memory:
    """Hold where the memory of what a step uses is, and what state of an optimizer is no Parameter.

    Args:
        window: The open window on the device.
        of_hook: Parameters of `after_update`.

    Attributes:
        used: Parameters that a train step or a cell was found to use.
        is_noted: Whether `note` was called, and MindSpore does not keep slices elsewhere.
    """

    def __init__(self, window: Window, of_hook: Sequence[Parameter]) -> None:
        self._window, self._optimizer, self._of_hook = window, window.optimizer, of_hook
        self._other_state = other_state_of(self._optimizer)  # as it was built
        self._first_update = 0  # the number of updates in the file that was loaded last
        self._trained: list[tuple[str, Parameter, int]] = []  # and rates
        self._state: list[tuple[str, Parameter, int]] = []
        self._others: list[tuple[Parameter, int]] = []
        self._rates: list[Parameter] = []  # that the optimizer held
        self._buffers: list[tuple[str, nn.Cell, int]] = []  # of layers, with checksums: graphs hold them as constants
        self.used: list[Parameter] = []
        self.is_noted = False

    def note_used(self, layers: Sequence[nn.Cell], parameters: Sequence[Parameter]) -> None:
        """Note which layers and Parameters are used, before the first graph is compiled."""
        self.used += parameters
        buffers = {id(held): (name, layer) for layer in layers for name, held in layer.named_buffers(recurse=False)}
        self._buffers += [(name, layer, _checksum(layer, name)) for name, layer in buffers.values()]

    def note_load(self) -> None:
        """Note that a checkpoint was loaded."""
        self._first_update = int(self._window.update_step)

    def note(self) -> None:
        """Note where all is, after the first microbatch."""
        if shards():
            return
        self.is_noted = True
        weights = [(parameter.name, parameter) for parameter in self._window.weights]
        self._trained = [(name, parameter, address_of(parameter))
                         for name, parameter in (*weights, *rates_of(self._optimizer).items())]
        self._rates = [rate for rate in rates_in(self._optimizer) if isinstance(rate, Parameter)]
        trained = {id(parameter) for parameter in self._window.weights}
        # Not of what has no memory yet.
        self._others = [(p, address_of(p)) for p in self.used if id(p) not in trained and address_of(p)]

    def require_same(self, eager: bool, has_own_graphs: bool) -> None:
        """Raise RuntimeError if a trained parameter, or state of the optimizer, has new memory, which no graph knows.

        Warn if another Parameter has, such as one of a target network, or a statistic; but the graph of a cell sees it.
        Op by op (`eager`), only the optimizer may be compiled.
        """
        if not eager or is_compiled(self._optimizer):
            optimizer = self._optimizer
            assign_rates_of_groups(optimizer)
            held = {id(rate) for rate in rates_in(optimizer)}  # another Parameter may be in the place of a rate
            replaced = [name for name, parameter, address in self._trained if address_of(parameter) != address]
            replaced += [own_name(optimizer, rate.name) for rate in self._rates if id(rate) not in held]
            if replaced:
                raise RuntimeError(_REPLACED.format(replaced[0]))
            if self.is_noted and not self._state and int(self._window.update_step) > self._first_update:
                self._state = [(own_name(optimizer, name), parameter, address_of(parameter))
                               for name, parameter in state_of(optimizer) if own_name(optimizer, name) not in _MOVING]
                self._others += [(parameter, address_of(parameter)) for parameter in self._of_hook]
            for name, parameter, address in self._state:
                if address_of(parameter) != address:
                    raise RuntimeError(_REPLACED_STATE.format(name))
        if not eager and has_own_graphs:
            for i, (parameter, address) in enumerate(self._others):
                if address_of(parameter) != address:
                    self._others[i] = parameter, address_of(parameter)  # warn of each value once
                    warn(_STALE.format(parameter.name), UserWarning, stacklevel=3)
        changed = [] if eager else [f"{type(layer).__name__}.{name}" for name, layer, checksum in self._buffers
                                    if _checksum(layer, name) != checksum]
        if changed:
            self._buffers = []  # warn once
            warn(_CONSTANT.format(changed[0]), UserWarning, stacklevel=3)

    def unsaved_state(self) -> Optional[str]:
        """Return the place of state of a user's own optimizer that no file holds, if something has changed any."""
        before = self._other_state
        return next((place for place, held in other_state_of(self._optimizer).items() if not (
            held is before.get(place) or (type(held) in (int, float) and held == before.get(place)))), None)


def _checksum(layer: nn.Cell, name: str) -> int:
    held = getattr(layer, name, None)
    return 0 if held is None else crc32(as_array(held).tobytes())
