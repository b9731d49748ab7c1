"""The window on the device, and the boundary on the host, which decides when it closes."""
