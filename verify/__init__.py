"""Real processes, broken on purpose: what was acknowledged must be there, once, bit for bit."""
