"""Commands for running servers."""
