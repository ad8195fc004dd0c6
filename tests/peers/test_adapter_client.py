"""vLLM's routes for adapters through hud's client for them, and adapters by OpenAI's own client."""

import importlib.util
import logging
import sys
import types
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.daemon import Daemon
from tests.peers.packages import HUD, unpack_package
from tests.peers.story_model import PROMPT, TEXTS, story_model

pytestmark = [pytest.mark.suite("peers"), pytest.mark.timeout(300)]


def client_of(url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return hud's VLLMAdapter. Its console, which needs other packages, is a logger instead."""
    console = types.ModuleType("hud.utils.hud_console")
    console.HUDConsole = lambda logger: logger  # type: ignore[attr-defined]
    for name in ("hud", "hud.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, console.__name__, console)
    path = unpack_package(HUD) / "hud" / "rl" / "vllm_adapter.py"
    spec = importlib.util.spec_from_file_location("vllm_adapter", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.VLLMAdapter(f"{url}/v1", "any key")


def test_adapters_are_loaded_used_and_unloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in reinforcement learning: a new name for each version, the older one is unloaded."""
    caplog.set_level(logging.INFO)
    story = story_model(tmp_path)
    flags = (str(story.folder), "--served-model-name", "base", "--enable-lora")
    with Daemon(*flags) as daemon:
        adapters = client_of(daemon.url, monkeypatch)
        server = openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="x", max_retries=0)

        def names() -> list[str]:
            return [model.id for model in server.models.list()]

        def text_of(name: str) -> str:
            answer = server.completions.create(
                model=name, prompt=PROMPT, max_tokens=12, temperature=0
            )
            assert answer.model == name
            return answer.choices[0].text

        assert names() == ["base"]
        for version, path in enumerate((story.adapter, story.gguf), 1):
            assert adapters.load_adapter(f"version-{version}", str(path))
            assert adapters.get_current() == f"version-{version}"
            assert text_of(f"version-{version}").startswith(TEXTS[1.0])
        assert text_of("base").startswith(TEXTS[0.0])
        assert names() == ["base", "version-1", "version-2"]
        assert server.models.retrieve("version-2").model_extra["parent"] == "base"  # type: ignore[index]
        assert adapters.unload_adapter("version-1")
        assert names() == ["base", "version-2"]
        with pytest.raises(openai.NotFoundError):
            text_of("version-1")
        assert not adapters.unload_adapter("version-1")
        assert "404" in caplog.text
