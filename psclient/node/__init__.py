"""Several processes of one host as one worker."""
