"""Notice parameters and rates whose memory a script has replaced (`set_data`, `load_param_into_net`)."""
from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Parameter

from ..mindspore_api import address_of
from .optimizers import assign_rates_of_groups, own_name, rates_of

if TYPE_CHECKING:
    from .window import Window

_REPLACED = ("{} was given new memory after the training had begun (by load_param_into_net or set_data), but compiled "
             "graphs keep the old one: what was trained since then is not in the network; load weights with "
             "ms_accum.load_weights, or assign them with ops.assign, and build the optimizer and the train step again")


def addresses_of(window: Window) -> list[tuple[Parameter, int]]:
    """Return the trained parameters and the rates, and where their memory is."""
    held = (*window.weights, *rates_of(window.optimizer).values())
    return [(parameter, address_of(parameter)) for parameter in held]


def require_same(before: list[tuple[Parameter, int]], window: Window) -> None:
    """Raise RuntimeError if one of them has other memory, or another Parameter is in the place of a rate."""
    assign_rates_of_groups(window.optimizer)
    now = {id(parameter): address for parameter, address in addresses_of(window)}
    for parameter, address in before:
        if now.get(id(parameter)) != address:
            raise RuntimeError(_REPLACED.format(own_name(window.optimizer, parameter.name)))
