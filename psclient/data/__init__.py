"""Samples: the elastic sampler, what has become of its samples, and the count of a step's samples."""
