"""`ms-accum lm`: a small language model, trained on documents of different lengths.

    data, network -> train
"""
