"""The reference run on text: a byte-level transformer, trained on documents of different lengths.

    data (pydoc_data.topics | a file) -> train (settings, network) -> ms_accum.reference
"""
