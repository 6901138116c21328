"""Samples: the elastic sampler, and the order of an epoch."""
