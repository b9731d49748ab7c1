"""Parameters that are state."""
import mindspore as ms
from mindspore import Parameter
from mindspore.common.initializer import initializer


def empty_parameter(name: str, shape: tuple[int, ...], dtype: ms.Type) -> Parameter:
    """Zeros that are state, and not trained."""
    return Parameter(initializer("zeros", shape, dtype), name=name, requires_grad=False)
