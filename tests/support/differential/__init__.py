"""Random training runs, made with ms_accum and with plain MindSpore on undivided batches."""
