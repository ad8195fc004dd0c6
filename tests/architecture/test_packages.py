"""Packages that setuptools installs."""

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


def test_build_output_folders_are_not_packages(tmp_path):
    """setuptools lists packages before the build, which then deletes older build output."""
    for folder in ("engine_core/kv_cache", "engine_core/compiled_modules/0123abcd/engine_core"):
        (tmp_path / folder).mkdir(parents=True)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    rules = json.dumps(settings["packages"]["find"])
    command = [sys.executable, "-c", FIND, str(tmp_path), rules]  # setuptools patches distutils
    found = json.loads(subprocess.check_output(command))
    assert sorted(found) == ["engine_core", "engine_core.kv_cache"]
