"""``python benchmarks/registry``."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # where the benchmarks import each other from

from registry.sweep import main  # noqa: E402

main()
