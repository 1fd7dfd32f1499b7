"""What is written to disk: filters, model cards, exported graphs."""
