"""Rules that take a number and answer yes, no or how much: admission, staleness, reply mode."""
