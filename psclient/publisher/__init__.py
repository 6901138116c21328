"""Publishing a model that is trained elsewhere: whatever trains it hands its tensors over, version by version."""
