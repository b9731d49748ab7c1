"""The window on the device: add microbatches, close, update. Every room except `distributed` may import it."""
