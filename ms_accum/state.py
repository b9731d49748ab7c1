"""Parameters that are state."""
import mindspore as ms
from mindspore import Parameter
from mindspore.common.initializer import initializer


def empty_parameter(name: str, shape: tuple[int, ...], dtype: ms.Type, value: float = 0) -> Parameter:
    """Return a Parameter that is state and not trained, filled with `value`."""
    return Parameter(initializer(value, shape, dtype), name=name, requires_grad=False)
