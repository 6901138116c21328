"""The same training job with other parameter servers of the PyTorch world."""
