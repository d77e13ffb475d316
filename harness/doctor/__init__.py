"""``harness doctor``: what this machine has for training, what is wrong with it, and what to type about that."""
