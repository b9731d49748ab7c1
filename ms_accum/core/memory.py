"""Notice Parameters whose memory a script has replaced (`set_data`, `load_param_into_net`): graphs keep the old one.

    after the first microbatch    where are parameters and rates?
    after an update               where is the optimizer's state? It may have been moved to a device.
    at each epoch, flush, save and load, and after 1, 2, 4, 8, ... updates of a train step: still there?
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Parameter

from ..mindspore_api import address_of
from .optimizers import (
    assign_rates_of_groups,
    is_compiled,
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
_MOVING = {"beta1_power", "beta2_power"}  # of nn.Adam and others, which give them new memory op by op themselves


class Memory:
    """Hold where the memory of what a step trains is.

    Args:
        window: The open window on the device.

    Attributes:
        is_noted: Whether `note` was called.
    """

    def __init__(self, window: Window) -> None:
        self._window, self._optimizer = window, window.optimizer
        self._first_update = 0  # the number of updates in the file that was loaded last
        self._trained: list[tuple[str, Parameter, int]] = []  # and rates
        self._state: list[tuple[str, Parameter, int]] = []
        self._rates: list[Parameter] = []  # that the optimizer held
        self.is_noted = False

    def note_load(self) -> None:
        """Note that a checkpoint was loaded."""
        self._first_update = int(self._window.update_step)

    def note(self) -> None:
        """Note where all is, after the first microbatch."""
        self.is_noted = True
        weights = [(parameter.name, parameter) for parameter in self._window.weights]
        self._trained = [(name, parameter, address_of(parameter))
                         for name, parameter in (*weights, *rates_of(self._optimizer).items())]
        self._rates = [rate for rate in rates_in(self._optimizer) if isinstance(rate, Parameter)]

    def require_same(self, eager: bool) -> None:
        """Raise RuntimeError if a trained parameter, or state of the optimizer, has new memory, which no graph knows.

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
            for name, parameter, address in self._state:
                if address_of(parameter) != address:
                    raise RuntimeError(_REPLACED_STATE.format(name))
