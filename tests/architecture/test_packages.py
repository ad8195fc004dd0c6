"""What is installed."""

import tomllib
from pathlib import Path

from setuptools import find_namespace_packages

ROOT = Path(__file__).parents[2]


def test_folders_that_a_build_makes_are_no_packages(tmp_path):
    """They are listed before the build, and a build removes those of the one before."""
    for folder in ("engine_core/kv_cache", "engine_core/compiled_modules/0123abcd/engine_core"):
        (tmp_path / folder).mkdir(parents=True)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = find_namespace_packages(
        str(tmp_path), **settings["tool"]["setuptools"]["packages"]["find"]
    )
    assert sorted(found) == ["engine_core", "engine_core.kv_cache"]
