"""Fit the alphas: recipes, the loop, rows solved without steps, checkpoints of a run."""
