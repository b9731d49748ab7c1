"""The reference run: the network of MindSpore's gradient accumulation tutorial, trained on real digits.

    embedded | folder | fetch -> idx -> data -> train (network) -> report, plot
                                          command.py runs them for `ms-accum mnist`
"""
