"""The paper's tables: runs that fill their cells, and the tables themselves."""
