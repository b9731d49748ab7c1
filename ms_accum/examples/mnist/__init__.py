"""`ms-accum mnist`: the network of MindSpore's gradient accumulation tutorial, trained on real digits.

    data (embedded | folder | fetch), network -> train
"""
