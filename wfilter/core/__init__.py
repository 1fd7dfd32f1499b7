"""Attach filters to a model and run it: targets, gates, rules, inspection, the filtered model."""
