"""Only for cli/files.py, until `as_json` stands there."""
from math import isfinite


def as_json(value: object) -> object:
    """`value` with None for every float that JSON cannot hold: NaN and infinity."""
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value
