"""Run metrics over methods and write the results as tables."""
