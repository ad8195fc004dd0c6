"""`python -m tests.benchmarks.products`: its JSON output."""

import json
from pathlib import Path

import pytest

from tests.benchmarks import products
from tests.benchmarks.command import run
from tests.fakes.devices import CPU
from tests.fakes.tiny_checkpoints import save_tiny
from tests.fakes.tiny_model_files import tokenizer_json
from worker.cpu.device import CpuDevice


@pytest.mark.skipif(not isinstance(CPU, CpuDevice), reason="no compiled kernels")
def test_json_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_tiny("llama", tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_bytes(tokenizer_json())
    file = tmp_path / "products.json"
    words = ["--rows", "1,3", "--rounds", "1", "--json", str(file)]
    flags = [str(tmp_path / "model"), "--kv-cache-memory", "64M", "--dtype", "float32"]
    assert run(products.main, [*words, "--", *flags]) == 0
    found = json.loads(file.read_text())
    assert found["rows"] == [1, 3]
    assert found["weights"] == "f32"
    assert all(each > 0 for each in found["layer_products_ms"] + found["head_product_ms"])
    read = found["weight_bytes"] / (1e6 * found["read_gb_per_s"])
    assert found["weights_read_ms"] == pytest.approx(read)
    shown = capsys.readouterr().out
    assert f"{found['head_product_ms'][1]:.2f}" in shown
