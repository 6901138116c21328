"""Following a run without training in it: a module or a directory always has one whole version of the model."""
