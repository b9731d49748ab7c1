"""`ms-accum selftest`: test on this device whether accumulation is exact, and measure its cost."""
