"""DataParallel."""
class DataParallel:
    pass
