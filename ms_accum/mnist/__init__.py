"""The reference run: the network of MindSpore's gradient accumulation tutorial, trained on real digits.

    data (embedded | folder | fetch) -> train (settings, network) -> ms_accum.reference
"""
