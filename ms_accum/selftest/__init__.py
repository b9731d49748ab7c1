"""`ms-accum selftest`: prove on the device at hand that accumulation is exact, and measure what it costs."""
