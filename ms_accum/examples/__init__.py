"""Programs that train with accumulation: `ms-accum mnist` and `ms-accum lm`. Only `__main__` imports them."""
