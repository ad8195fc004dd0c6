"""What is installed."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIND = """
import json, setuptools, sys
print(json.dumps(setuptools.find_namespace_packages(sys.argv[1], **json.loads(sys.argv[2]))))
"""


def test_folders_that_a_build_makes_are_no_packages(tmp_path):
    """They are listed before the build, and a build removes those of the one before."""
    for folder in ("engine_core/kv_cache", "engine_core/compiled_modules/0123abcd/engine_core"):
        (tmp_path / folder).mkdir(parents=True)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    rules = json.dumps(settings["packages"]["find"])
    command = [sys.executable, "-c", FIND, str(tmp_path), rules]  # it replaces parts of Python
    found = json.loads(subprocess.check_output(command))
    assert sorted(found) == ["engine_core", "engine_core.kv_cache"]
