"""Replace BatchNorm layers, which use the whole batch, by GroupNorm layers, which use one sample at a time."""
from __future__ import annotations

from mindspore import nn

from ..arguments import instance_of, whole_number

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

# Two trainings that differed only by rounding, on 32 channels of one value each, were 30 % apart after 10 updates with
# 16 groups, and 5e-7 with 4 groups.
_VALUES = 8


def batchnorm_to_groupnorm(network: nn.Cell, num_groups: int = 32) -> list[str]:
    """Replace every BatchNorm in a network, in place, by a GroupNorm with the same gamma and beta.

    GroupNorm normalises each sample by its own mean and variance over groups of channels, so accumulation is exact. Its
    outputs differ from those of BatchNorm: train or fine-tune the network. Gamma and beta stay the same Parameters, so
    optimizers and checkpoints still fit; the moving statistics are dropped. Call this before the network is compiled.

    Args:
        network: Any tree of cells. `nn.BatchNorm1d`, `nn.BatchNorm2d`, `nn.BatchNorm3d`, `nn.SyncBatchNorm` and their
            subclasses are replaced; a shared layer stays shared. Layers built with `use_batch_statistics=False` are
            kept.
        num_groups: Number of groups of channels in a layer. If it does not divide the number of channels, the largest
            smaller number is used that divides it and leaves two channels in a group. For a BatchNorm1d, where a
            channel may be one value, a group has at least 8 channels: two values would become almost +1 and -1.

    Returns:
        The names of the replaced layers, as in `network.cells_and_names()`; a shared layer has several.

    Raises:
        TypeError: If `network` is not a Cell, or `num_groups` is not an int.
        ValueError: If `num_groups` < 1, `network` is itself a BatchNorm, or a layer cannot be replaced (one channel in
            a BatchNorm1d, channels last). Then nothing is replaced.

    Source: Wu and He, "Group Normalization", 2018 (https://arxiv.org/abs/1803.08494); 32 groups are its default.

    Example:
        >>> from mindspore import nn
        >>> from ms_accum import batchnorm_to_groupnorm
        >>> network = nn.SequentialCell(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48), nn.ReLU())
        >>> print(batchnorm_to_groupnorm(network), network[1].num_groups)
        ['1'] 24
    """
    if isinstance(instance_of("network", network, nn.Cell, "a mindspore.nn.Cell"), BATCH_NORMS):
        raise ValueError(f"network is itself a {type(network).__name__}, which cannot be replaced in place; give the "
                         "cell that holds it, or use nn.GroupNorm")
    num_groups = whole_number("num_groups", num_groups, "give the groups of channels, e.g. 32")
    # `name_cells()` would leave out the second name of a shared layer.
    places = [(parent, place, name, child, f"{path}.{name}" if path else name)
              for path, parent in network.cells_and_names() if not isinstance(parent, BATCH_NORMS)
              for place, (name, child) in enumerate(vars(parent)["_cells"].items())
              if isinstance(child, BATCH_NORMS) and statistics_of(child).use_batch_statistics is not False]
    # All layers are made before the first is replaced, so an error replaces nothing.
    layers = {child: _group_norm(path, child, num_groups) for *_, child, path in places[::-1]}
    for parent, place, name, child, _ in places:
        if isinstance(parent, (nn.SequentialCell, nn.CellList, nn.CellDict)):
            parent[name if isinstance(parent, nn.CellDict) else place] = layers[child]
        else:
            setattr(parent, name, layers[child])
    for *_, child, _ in places:  # only now, because a parent renames the parameters of a new child
        layers[child].gamma, layers[child].beta = statistics_of(child).gamma, statistics_of(child).beta
    return [path for *_, path in places]


def statistics_of(layer: nn.Cell) -> nn.Cell:
    """Return the layer that holds a BatchNorm's statistics: BatchNorm3d wraps a BatchNorm2d."""
    return layer.bn2d if isinstance(layer, nn.BatchNorm3d) else layer


def _group_norm(path: str, layer: nn.Cell, num_groups: int) -> nn.GroupNorm:
    inner, alone = statistics_of(layer), isinstance(layer, nn.BatchNorm1d)
    if inner.format != "NCHW":
        raise ValueError(f"{path} has data_format={inner.format!r}, expected 'NCHW'; GroupNorm takes channels first")
    if alone and inner.num_features == 1:
        raise ValueError(f"{path} is a BatchNorm1d of 1 channel, for which GroupNorm would return 0, because it would "
                         "normalise single values; remove or replace the layer")
    groups = groups_for(inner.num_features, num_groups, alone)
    group_norm = nn.GroupNorm(groups, inner.num_features, eps=float(inner.eps))
    group_norm.add_flags(**layer.get_flags())
    group_norm.training = layer.training
    return group_norm


def groups_for(channels: int, num_groups: int, alone: bool) -> int:
    """Return the number of groups for `channels` channels, each a single value if `alone`."""
    least = _VALUES if alone else 2
    return max([g for g in range(1, min(num_groups, channels) + 1) if channels % g == 0
                and (channels // g >= least or (g == num_groups and not alone))], default=1)
