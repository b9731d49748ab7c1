"""A train step as a Cell, and callbacks, for `mindspore.train.Model`. Only the public names come from here."""
