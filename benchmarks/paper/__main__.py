"""``python benchmarks/paper``."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # where the benchmarks import each other from

from paper.run import main  # noqa: E402

main()
