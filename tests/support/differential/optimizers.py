"""Every optimizer that MindSpore 2.10 runs on CPU, with an eps of about the gradients' size.

With a smaller one, the size of the gradient, and with it a wrong denominator, would not show in the parameters.
"""
import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.experimental import optim
from mindspore.mint import optim as mint_optim


def _options(eps):
    """What each optimizer is given beside parameters and learning rate."""
    return {
        # A decay (lambd) is multiplied by the rate, which undoes the size of the gradients.
        "nn.SGD": {"momentum": 0.9, "weight_decay": 0.1 * eps}, "nn.Momentum": {"momentum": 0.9},
        "nn.Adam": {"eps": eps}, "nn.AdamWeightDecay": {"eps": eps, "weight_decay": 0.01}, "nn.LazyAdam": {"eps": eps},
        "nn.AdamOffload": {"eps": eps}, "nn.ASGD": {"lambd": 0.1 * eps}, "nn.Rprop": {}, "nn.FTRL": {},
        "nn.RMSProp": {}, "nn.ProximalAdagrad": {}, "nn.Adagrad": {},
        "nn.AdaFactor": {"scale_parameter": False, "relative_step": False}, "nn.AdaMax": {"eps": eps},
        "nn.Adadelta": {"epsilon": eps}, "optim.SGD": {"momentum": 0.9}, "optim.Adam": {"eps": eps},
        "optim.AdamW": {"eps": eps}, "optim.Adamax": {"eps": eps}, "optim.NAdam": {"eps": eps},
        "optim.RAdam": {"eps": eps}, "optim.ASGD": {"lambd": 0.1 * eps}, "optim.Adadelta": {"eps": eps},
        "optim.Adagrad": {"eps": eps}, "optim.RMSprop": {"eps": eps}, "optim.Rprop": {},
        "mint.SGD": {"momentum": 0.9}, "mint.Adam": {"eps": eps},
    }


OPTIMIZERS = tuple(_options(1.0))
NN = tuple(name for name in OPTIMIZERS if name.startswith("nn."))
# Op by op, mint's optimizers do nothing and AdaFactor raises for some networks (MindSpore 2.10 on CPU).
COMPILED_ONLY = ("mint.SGD", "mint.Adam", "nn.AdaFactor")
# On CPU, they split their work among threads anew after some calls: the last bits depend on how often they were called.
LAST_BITS_VARY = ("nn.AdamOffload", "nn.RMSProp")
# What the update is proportional to: these take a learning rate that undoes the size of the gradients.
LINEAR = ("nn.SGD", "nn.Momentum", "nn.ASGD", "optim.SGD", "optim.ASGD", "mint.SGD")
_LIKE_LINEAR = (*LINEAR, "nn.Adadelta", "optim.Adadelta")  # with an eps of the gradients' size
# The size of the gradient does not show in the update at all; of a gradient of 0 only the rounding would.
SCALE_FREE = ("nn.Rprop", "nn.AdaFactor", "nn.RMSProp", "optim.Rprop")
RATES = {"nn.Rprop": 0.01, "optim.Rprop": 0.01, "nn.AdaFactor": 0.02, "nn.RMSProp": 0.02, "nn.FTRL": 0.05}


def build_optimizer(case, parameters, sharded=list):
    """The optimizer of a Case. `sharded`: what is done to parameters, or groups, before it gets them."""
    budget = case.accumulate_step if isinstance(case.accumulate_step, int) else 2
    # Half of a sequence may be masked. A window that weighs less than min_weight has a smaller gradient.
    thin = min(1.0, 0.5 * budget * max(case.sizes) / (case.min_weight or 1.0))
    size = (10.0 if case.loss == "mse" else 0.1) * case.factor * thin  # about that of a gradient
    rate = 0.01 / size if case.optimizer in _LIKE_LINEAR else RATES.get(case.optimizer, 0.05)
    if case.level == "half":
        rate *= 3  # a float16 parameter keeps 11 bits of it
    second = 0.5 * rate
    if case.rates == "list":
        rate = nn.exponential_decay_lr(rate, 0.8, 100, 1, 1)
    elif case.rates == "cell":
        rate = nn.ExponentialDecayLR(rate, 0.8, 1)
    if case.groups and case.optimizer != "nn.AdaFactor":  # MindSpore 2.10 does not compile it with groups
        parameters = [{"params": parameters[1::2], "lr": second}, {"params": parameters[0::2]}]
    library, name = case.optimizer.split(".")
    optimizer = getattr({"nn": nn, "optim": optim, "mint": mint_optim}[library], name)
    options = {"learning_rate" if library == "nn" else "lr": rate, **_options(size)[case.optimizer]}
    return optimizer(sharded(parameters), **options)


def multiply_rates(optimizer, factor):
    """Change the learning rates by what MindSpore offers: another way for each kind."""
    groups = getattr(optimizer, "param_groups", None)
    rates = optimizer.learning_rate if groups is None else [group["lr"] for group in groups]
    for rate in {id(rate): rate for rate in (rates if isinstance(rates, (list, tuple)) else [rates])}.values():
        ops.assign(rate, Tensor(float(rate) * factor, ms.float32))
    for group in groups or ():
        if "lr_float" in group:
            group["lr_float"] *= factor


def state_of(optimizer):
    """The state of an optimizer, in order: Parameters of the Cell, and those in lists, which a Cell does not see."""
    weights = {id(p) for p in optimizer.parameters}
    state = [p for p in optimizer.get_parameters() if id(p) not in weights]
    for name in ("mu", "eta", "mu_product"):
        listed = vars(optimizer).get(name)
        if isinstance(listed, (list, tuple)):
            state += [p for p in listed if id(p) not in {id(s) for s in state}]
    return state
