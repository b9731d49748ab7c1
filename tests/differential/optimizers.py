"""Every optimizer that MindSpore 2.10 runs on CPU, with an eps of about the gradients' size: with a smaller one, the size of the gradient,
and with it a wrong denominator, would not show in the parameters."""
from mindspore import nn
from mindspore.experimental import optim
from mindspore.mint import optim as mint_optim

# name: (parameters, learning rate as given, eps) -> optimizer. `rate` is 1 times what suits the optimizer.
NN = {
    # The decay is multiplied by the rate, which undoes the size of the gradients.
    "nn.SGD": lambda p, rate, eps: nn.SGD(p, rate, momentum=0.9, weight_decay=0.1 * eps),
    "nn.Momentum": lambda p, rate, eps: nn.Momentum(p, rate, 0.9),
    "nn.Adam": lambda p, rate, eps: nn.Adam(p, rate, eps=eps),
    "nn.AdamWeightDecay": lambda p, rate, eps: nn.AdamWeightDecay(p, rate, eps=eps, weight_decay=0.01),
    "nn.LazyAdam": lambda p, rate, eps: nn.LazyAdam(p, rate, eps=eps),
    "nn.AdamOffload": lambda p, rate, eps: nn.AdamOffload(p, rate, eps=eps),
    "nn.ASGD": lambda p, rate, eps: nn.ASGD(p, rate),
    "nn.Rprop": lambda p, rate, eps: nn.Rprop(p, rate),
    "nn.FTRL": lambda p, rate, eps: nn.FTRL(p, learning_rate=rate),
    "nn.RMSProp": lambda p, rate, eps: nn.RMSProp(p, rate),
    "nn.ProximalAdagrad": lambda p, rate, eps: nn.ProximalAdagrad(p, learning_rate=rate),
    "nn.Adagrad": lambda p, rate, eps: nn.Adagrad(p, learning_rate=rate),
    "nn.AdaFactor": lambda p, rate, eps: nn.AdaFactor(p, learning_rate=rate, scale_parameter=False, relative_step=False),
    "nn.AdaMax": lambda p, rate, eps: nn.AdaMax(p, rate, eps=eps),
    "nn.Adadelta": lambda p, rate, eps: nn.Adadelta(p, rate, epsilon=eps),
}
EXPERIMENTAL = {
    "optim.SGD": lambda p, rate, eps: optim.SGD(p, rate, momentum=0.9),
    "optim.Adam": lambda p, rate, eps: optim.Adam(p, rate, eps=eps),
    "optim.AdamW": lambda p, rate, eps: optim.AdamW(p, rate, eps=eps),
    "optim.Adamax": lambda p, rate, eps: optim.Adamax(p, rate, eps=eps),
    "optim.NAdam": lambda p, rate, eps: optim.NAdam(p, rate, eps=eps),
    "optim.RAdam": lambda p, rate, eps: optim.RAdam(p, rate, eps=eps),
    "optim.ASGD": lambda p, rate, eps: optim.ASGD(p, rate),
    "optim.Adadelta": lambda p, rate, eps: optim.Adadelta(p, rate, eps=eps),
    "optim.Adagrad": lambda p, rate, eps: optim.Adagrad(p, rate, eps=eps),
    "optim.RMSprop": lambda p, rate, eps: optim.RMSprop(p, rate, eps=eps),
    "optim.Rprop": lambda p, rate, eps: optim.Rprop(p, rate),
}
MINT = {
    "mint.SGD": lambda p, rate, eps: mint_optim.SGD(p, rate, momentum=0.9),
    "mint.Adam": lambda p, rate, eps: mint_optim.Adam(p, rate, eps=eps),
}
# Op by op, mint's optimizers do nothing and AdaFactor raises for some networks (MindSpore 2.10 on CPU).
COMPILED_ONLY = (*MINT, "nn.AdaFactor")
OPTIMIZERS = {**NN, **EXPERIMENTAL, **MINT}
# What the update is proportional to: these take a learning rate that undoes the size of the gradients.
LINEAR = ("nn.SGD", "nn.Momentum", "nn.ASGD", "optim.SGD", "optim.ASGD", "mint.SGD")
_LIKE_LINEAR = (*LINEAR, "nn.Adadelta", "optim.Adadelta")  # with an eps of the gradients' size
# The size of the gradient does not show in the update at all; of a gradient of 0 only the rounding would.
SCALE_FREE = ("nn.Rprop", "nn.AdaFactor", "nn.RMSProp", "optim.Rprop")
RATES = {"nn.Rprop": 0.01, "optim.Rprop": 0.01, "nn.AdaFactor": 0.02, "nn.RMSProp": 0.02, "nn.FTRL": 0.05}


def build_optimizer(case, parameters):
    size = (10.0 if case.loss == "mse" else 0.1) * case.factor  # about that of a gradient
    if case.optimizer in _LIKE_LINEAR:
        rate = 0.01 / size
    else:
        rate = RATES.get(case.optimizer, 0.05)
    if case.level == "half":
        rate *= 3  # a float16 parameter keeps 11 bits of it
    second = 0.5 * rate
    if case.rates == "list":
        rate = nn.exponential_decay_lr(rate, 0.8, 100, 1, 1)
    elif case.rates == "cell":
        rate = nn.ExponentialDecayLR(rate, 0.8, 1)
    if case.groups:
        parameters = [{"params": parameters[1::2], "lr": second}, {"params": parameters[0::2]}]
    return OPTIMIZERS[case.optimizer](parameters, rate, size)


def state_of(optimizer):
    """Arrays of an optimizer's state, in order: Parameters of the Cell, and those in Python lists, where a Cell does not see them."""
    weights = {id(p) for p in optimizer.parameters}
    state = [p for p in optimizer.get_parameters() if id(p) not in weights]
    for name in ("mu", "eta", "mu_product"):
        listed = vars(optimizer).get(name)
        if isinstance(listed, (list, tuple)):
            state += [p for p in listed if id(p) not in {id(s) for s in state}]
    return state
