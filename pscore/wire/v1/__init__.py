"""Generated stubs of protocol version 1; tools/generate_stubs.py writes everything else in this folder."""
