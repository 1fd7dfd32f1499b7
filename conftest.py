"""Modules that need an extra are not collected for their examples where it is not installed."""

import importlib.util

collect_ignore_glob = []
if importlib.util.find_spec("fastapi") is None:
    needing = ("application", "bodies", "engine", "playground", "service", "settings", "web")
    collect_ignore_glob += [f"wfilter/serve/{name}.py" for name in needing]
    collect_ignore_glob += ["wfilter/cli/serving.py"]
