"""Which samples of which epoch belong to which worker."""
