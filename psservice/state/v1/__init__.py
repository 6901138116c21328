"""Generated stubs of the journal's records; tools/generate_stubs.py writes everything else in this folder."""
