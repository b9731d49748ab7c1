"""The window on the device: add microbatches, close, update. Every room but `distributed` may import it."""
