"""Samples: the elastic sampler, its leases, and the count of a step's samples."""
