"""The memory plan: equal to what a loaded model takes, and refusals with figures and flags."""

import json
import shlex
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from deploy import flags
from proto.errors import ConfigError
from proto.messages.prepared_model import PreparedModel, TensorEntry, TensorIndex
from proto.runtime import host_resources
from proto.settings.config import GIB, ServeConfig, memory_size
from tests.e2e.reference import packaged_model
from tests.fakes import tiny_checkpoints
from tests.fakes.gguf_models import prepared_gguf
from tests.fakes.prepared_models import prepare, prepare_checkpoint
from tests.fakes.simulated_gpu import device_of
from tests.fakes.tiny_checkpoints import CONFIGS, save_tiny
from tests.fakes.vision import VISION
from tests.worker.test_device import machine
from worker import loaded_model
from worker.cpu.device import CpuDevice
from worker.cpu.kernels import Kernels
from worker.host.device import STANDBY_ENGINE_BYTES, STANDBY_WORKER_BYTES
from worker.loaded_model import load
from worker.models.moe import MoeSpec
from worker.models.registry import model_spec, spec_from_config
from worker.parallel.group import RankGroup
from worker.plan.memory_plan import MemoryPlan, plan_memory
from worker.plan.memory_refusal import fitting_flags, refusal

MIB = 1 << 20
FAMILIES = (
    "llama",
    "llama-tied",
    "llama-biases",
    "mistral-window",
    "qwen2",
    "qwen3",
    "gemma3",
    "deepseek3",
    "qwen3next",
    "qwen35",
    "granitehybrid",
    "falconh1",
    "lfm2",
    "mamba2",
    "nemotronh",
)


_LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_head_dim": 88, "head_dim": 64}
"""Sizes for which there are GPU kernels."""


def prepared_latent(folder: Path, **sizes: int) -> PreparedModel:
    """Prepare a tiny DeepSeek-V3 in which these sizes are changed."""
    config = CONFIGS["deepseek3"]
    model = tiny_checkpoints.tiny_model(type(config)(**config.to_dict() | sizes))
    model.save_pretrained(folder)
    return prepare_checkpoint(folder, folder / "prepared")


def config_of(*words: str) -> ServeConfig:
    """The configuration of a command line."""
    return flags.build(flags.parse(words))


def cpu_of(config: ServeConfig, root: Path = Path("/")) -> CpuDevice:
    return CpuDevice(config.device, root, parallel=config.parallel)


def assert_planned(
    prepared: PreparedModel,
    config: ServeConfig,
    root: Path = Path("/"),
    *,
    expert_bytes: int = 0,
) -> MemoryPlan:
    """Check that weights and KV of all ranks take the bytes that the plan has for them.

    expert_bytes: of the experts that are kept for each token.
    """
    size = config.parallel.tensor_parallel_size
    plan = plan_memory(config, prepared, cpu_of(config, root))
    ranks = [
        load(config, prepared, cpu_of(config, root), RankGroup(rank, size), lambda message: None)
        for rank in range(size)
    ]
    assert plan.weights == sum((rank.weight_format.memory for rank in ranks), Counter())
    token_bytes = expert_bytes + sum(rank.geometry.bytes_per_token for rank in ranks)
    assert plan.block_bytes == token_bytes * config.cache.block_size
    return plan


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", ["int8", "bf16", "f32"])
def test_a_folder_takes_what_was_planned(
    family: str, weights: str, kernels: Kernels, tmp_path: Path
) -> None:
    save_tiny(family, tmp_path)
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    assert_planned(prepared, config_of("--cpu-weights", weights))


@pytest.mark.parametrize("kinds", [{}, {"v_proj": "Q8_0", "down_proj": "F16"}])
@pytest.mark.parametrize("weights", ["auto", "packed", "int8", "f32"])
@pytest.mark.parametrize("cpu", ["avx2", "avx512_bf16", "amx_bf16"])
def test_a_gguf_takes_what_was_planned(
    kinds: dict[str, str], weights: str, cpu: str, kernels: Kernels, tmp_path: Path
) -> None:
    prepared = prepared_gguf(tmp_path / "model", "Q4_0", kinds=kinds)
    assert_planned(prepared, config_of("--cpu-weights", weights), machine(tmp_path, flags=cpu))


@pytest.mark.parametrize("weights", ["int8", "f32"])
def test_ranks_together_take_what_was_planned(
    weights: str, kernels: Kernels, tmp_path: Path
) -> None:
    save_tiny("llama", tmp_path)
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    assert_planned(prepared, config_of("--cpu-weights", weights, "--tensor-parallel-size", "2"))


@pytest.mark.parametrize(
    ("flags", "sizes", "message", "parameter"),
    [
        (
            [],
            {},
            r"DeepseekV3.* has latent KV: .*latents of 512 with 64.* not",
            "attention_backend",
        ),
        (["--kv-cache-dtype", "f32"], _LATENTS, "has latent KV: .*not float32", "kv_cache_dtype"),
        (
            ["--cascade-attention-from", "2"],
            _LATENTS,
            "cascade.* is not supported with latent KV",
            "cascade_attention_from",
        ),
        (
            ["--max-num-batched-tokens", "600000"],
            _LATENTS,
            r"tokens 600000: with 4 heads .* at most \d{6}$",
            "max_num_batched_tokens",
        ),
    ],
)
def test_latent_kv_that_no_kernel_computes_is_refused_on_a_gpu(
    flags: list[str], sizes: dict[str, int], message: str, parameter: str, tmp_path: Path
) -> None:
    prepared = prepared_latent(tmp_path, **sizes)
    with pytest.raises(ConfigError, match=message) as raised:
        plan_memory(config_of(*flags), prepared, device_of(free=60 * GIB))
    assert raised.value.param == parameter


def test_a_model_that_reads_images_is_refused_on_a_gpu(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    prepared = replace(prepare_checkpoint(tmp_path, tmp_path / "prepared"), vision=VISION)
    with pytest.raises(ConfigError, match=r"LlavaFor.* reads images.*--limit-mm-per") as raised:
        plan_memory(config_of(), prepared, device_of(free=60 * GIB))
    assert raised.value.param == "device"


def test_latent_kv_is_planned_on_a_gpu(tmp_path: Path) -> None:
    """Each rank has the latents of all heads."""
    gpu = device_of(free=60 * GIB)
    flags = ("--tensor-parallel-size", "2", "--max-num-batched-tokens", "600000")
    plan = plan_memory(config_of(*flags), prepared_latent(tmp_path, **_LATENTS), gpu)
    assert plan.block_bytes == plan.block_size * 3 * 576 * 2


@pytest.mark.parametrize(
    ("family", "flags", "message"),
    [
        ("llama", ["--tensor-parallel-size", "2"], "sums over GPUs .*; --tensor-parallel-size 1"),
        ("llama", ["--cascade-attention-from", "2"], "cascade attention depends"),
        ("mixtral", [], "experts have as many rows as tokens choose"),
        ("llama", ["--device", "cpu", "--cpu-weights", "f32"], "f32 products are chosen"),
        ("llama", ["--device", "cpu", "--kv-cache-dtype", "int8"], "reads int8 pages otherwise"),
        ("llama", ["--device", "cpu", "--cpu-weights", "packed+int8"], "packed.int8 products"),
        ("llama", ["--device", "cpu", "--model-impl", "transformers"], "runs on transformers"),
    ],
)
def test_what_depends_on_the_batch_is_refused_where_bits_shall_not(
    family: str, flags: list[str], message: str, kernels: Kernels, tmp_path: Path
) -> None:
    save_tiny(family, tmp_path)
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    config = config_of("--batch-invariant", *flags)
    device = cpu_of(config, machine(tmp_path)) if "cpu" in flags else device_of(free=60 * GIB)
    with pytest.raises(ConfigError, match=f"--batch-invariant: .*{message}") as raised:
        plan_memory(config, prepared, device)
    assert raised.value.param == "batch_invariant"


def test_a_connector_without_states_is_refused_before_a_weight_is_read(
    kernels: Kernels, tmp_path: Path
) -> None:
    save_tiny("granitehybrid", tmp_path)
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    shared = {
        "kv_connector": "SharedStorageConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    several = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [shared]},
    }
    device = cpu_of(config_of("--device", "cpu"), machine(tmp_path))
    for connector in (shared, several):
        config = config_of("--device", "cpu", "--kv-transfer-config", json.dumps(connector))
        with pytest.raises(ConfigError, match="SharedStorageConnector does not copy rec") as raised:
            plan_memory(config, prepared, device)
        assert raised.value.param == "kv_transfer_config"


def test_cascade_attention_on_a_cpu_is_refused(kernels: Kernels, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    config = config_of("--device", "cpu", "--cascade-attention-from", "2")
    with pytest.raises(ConfigError, match="--cascade-attention-from needs --device cuda") as raised:
        plan_memory(config, prepared, cpu_of(config, machine(tmp_path)))
    assert raised.value.param == "cascade_attention_from"


def test_a_batch_invariant_model_is_planned_as_numbers_on_a_gpu(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    gpu = device_of(free=60 * GIB)
    plan = plan_memory(config_of("--batch-invariant"), prepared, gpu)
    assert plan.weights == plan_memory(config_of(), prepared, gpu).weights


def test_experts_that_are_kept_are_part_of_the_pool(kernels: Kernels, tmp_path: Path) -> None:
    save_tiny("mixtral", tmp_path)
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    flags = ("--enable-return-routed-experts", "--tensor-parallel-size", "2")
    config = config_of(*flags, "--kv-cache-memory", "1M")
    mixtures = [layer.mlp for layer in model_spec(prepared, config).layers]
    experts = sum(each.router.top_k for each in mixtures if isinstance(each, MoeSpec))
    assert experts > 0
    plan = assert_planned(prepared, config, expert_bytes=experts)
    assert MIB - plan.block_bytes < plan.pool_bytes <= MIB


def test_the_packaged_model_takes_what_was_planned(kernels: Kernels) -> None:
    plan = assert_planned(packaged_model(), config_of("--kv-cache-memory", "64M"))
    assert 64 * MIB - plan.block_bytes < plan.pool_bytes <= 64 * MIB


LIMITS = {
    "version 1": (
        "3:memory:/a\n",
        "memory/a/memory.limit_in_bytes",
        "memory/a/memory.usage_in_bytes",
    ),
    "version 2": ("0::/a\n", "a/memory.max", "a/memory.current"),
}


@pytest.mark.parametrize("version", LIMITS)
def test_the_default_pool_respects_the_container(version: str, tmp_path: Path) -> None:
    """It takes three quarters of what weights and work space leave of the container's limit."""
    own, limit, used = LIMITS[version]
    root = machine(tmp_path / "root", free=16 * GIB)
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text(own)
    for name, size in ((limit, 5 * GIB), (used, GIB)):
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{size}\n")
    prepared = tiny_model(tmp_path)
    config = config_of()
    plan = plan_memory(config, prepared, cpu_of(config, root))
    assert (plan.free, plan.device) == (4 * GIB, "memory of this container")
    assert plan.table()[-1] == (
        "  free            4.00 GiB  now, of 5.00 GiB: memory of this container"
    )
    assert plan.to_dict()["total_bytes"] == 5 * GIB
    assert 0 <= plan.left * 3 // 4 - plan.pool_bytes < plan.block_bytes
    (root / "sys/fs/cgroup" / limit).write_text("max\n")
    plan = plan_memory(config, prepared, cpu_of(config, root))
    assert (plan.free, plan.device) == (16 * GIB, "memory of this machine")


def tiny_model(folder: Path) -> PreparedModel:
    save_tiny("llama", folder)
    return prepare_checkpoint(folder, folder / "prepared")


def huge_model(folder: Path) -> PreparedModel:
    """An 8B shape whose weights are a hole in a file: only the sizes exist."""
    config = CONFIGS["llama"].to_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    entries, offset = [], 0
    for weight in spec_from_config(config).weights().values():
        num_bytes = 2
        for size in weight.shape:
            num_bytes *= size
        entries.append(TensorEntry(weight.hugging_face, "BF16", weight.shape, 0, offset, num_bytes))
        offset += num_bytes
    file = folder / "model.safetensors"
    folder.mkdir(exist_ok=True)
    with file.open("wb") as stream:
        stream.truncate(offset)
    index = TensorIndex("safetensors", (str(file),), tuple(entries))
    return prepare(folder / "prepared", config, index, name="huge")


@pytest.mark.parametrize(
    ("words", "free", "names"),
    [
        (["--cpu-weights", "bf16"], 12, "--cpu-weights int8"),
        (["--cpu-weights", "bf16", "--kv-cache-memory", "9G"], 20, "--kv-cache-memory"),
        (["--cpu-weights", "bf16", "--max-model-len", "8192"], 15.5, "--max-model-len"),
        (["--cpu-weights", "int8", "--max-num-seqs", "100000"], 10, "--max-num-seqs"),
        (["--cpu-weights", "int8", "--num-gpu-blocks-override", "9999"], 13, "--num-gpu-blocks"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_the_sum_and_flags_that_fit(
    words: list[str],
    free: float,
    names: str,
    kernels: Kernels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared = huge_model(tmp_path / "model")
    root = machine(tmp_path / "root", free=int(free * GIB))
    config = config_of(*words)
    monkeypatch.setattr(loaded_model, "load_model", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(ConfigError) as raised:
        load(config, prepared, cpu_of(config, root), RankGroup(), lambda message: None)
    first, *table, last = str(raised.value).splitlines()
    assert first == "huge does not fit into the memory of this machine"
    figures = {line[:12].strip(): line[12:].split()[:2] for line in table}
    assert list(figures) == ["weights", "KV cache", "work space", "needed", "free"]
    assert figures["free"] == [f"{free:.2f}", "GiB"]
    assert float(figures["needed"][0]) > free
    parts = sum(float(figures[name][0]) for name in ("weights", "KV cache", "work space"))
    assert abs(parts - float(figures["needed"][0])) < 0.03
    assert names in last
    ways = last.removeprefix("it fits with ").split(" or ")
    for way in ways:
        smaller = config_of(*words, *shlex.split(way))
        assert plan_memory(smaller, prepared, cpu_of(smaller, root)).fits, way


def test_a_worker_that_replaces_another_loads_although_memory_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared, root = tiny_model(tmp_path), machine(tmp_path / "root", free=MIB)
    config = config_of("--device", "cpu")
    model = load(
        config, prepared, cpu_of(config, root), RankGroup(), lambda message: None, must_fit=False
    )
    assert not model.plan.fits
    assert "does not fit into the memory of this machine" in caplog.text


def test_a_model_that_no_flag_makes_fit_names_the_missing_bytes(
    kernels: Kernels, tmp_path: Path
) -> None:
    prepared, root = huge_model(tmp_path / "model"), machine(tmp_path / "root", free=2 * GIB)
    config = config_of()
    plan = plan_memory(config, prepared, cpu_of(config, root))
    assert not plan.fits
    last = str(refusal(plan, config, prepared, cpu_of(config, root))).splitlines()[-1]
    assert last == f"no flag makes it fit: {memory_size(plan.shortfall)} more must be free"


def test_a_pool_that_is_too_small_for_the_longest_request_is_refused(tmp_path: Path) -> None:
    prepared, config = (
        tiny_model(tmp_path),
        config_of("--num-gpu-blocks-override", "3", "--max-model-len", "100"),
    )
    plan = plan_memory(config, prepared, cpu_of(config))
    message = str(refusal(plan, config, prepared, cpu_of(config)))
    assert message.startswith("the KV pool of 3 blocks of 16 tokens is too small: 8 are needed")
    assert message.endswith("it fits with --num-gpu-blocks-override 8 or --max-model-len 32")


@pytest.mark.parametrize(
    ("words", "is_limited"),
    [(("2",), True), (("500",), False), (("2", "--max-model-len", "16"), False)],
)
def test_a_plan_says_that_the_pool_limits_requests(
    words: tuple[str, ...], is_limited: bool, tmp_path: Path
) -> None:
    prepared = tiny_model(tmp_path)
    config = config_of("--num-gpu-blocks-override", *words)
    plan = plan_memory(config, prepared, cpu_of(config))
    assert plan.fits
    text = "\n".join(plan.table())
    assert ("requests are limited to them, the model takes " in text) is is_limited


def test_a_second_generation_on_a_gpu_needs_a_pool_of_a_fixed_size(tmp_path: Path) -> None:
    """A share of the GPU is taken already by the generation that serves."""
    prepared, share = huge_model(tmp_path), ("--gpu-memory-utilization", "0.45")
    alone = device_of(free=80 * GIB)
    taken = plan_memory(config_of(*share), prepared, alone)
    assert taken.fits
    beside = device_of(free=80 * GIB - taken.weights.total() - taken.pool_bytes)
    config = config_of(*share)
    plan = plan_memory(config, prepared, beside)
    refused = str(refusal(plan, config, prepared, beside))
    assert refused.startswith("huge does not fit into the memory of the GPU")
    fixed = config_of("--kv-cache-memory", "8G")
    plan = plan_memory(fixed, prepared, beside)
    assert plan.fits
    assert 0 <= 8 * GIB - plan.pool_bytes < plan.block_bytes


@pytest.mark.parametrize(("utilization", "fits"), [("0.9", True), ("0.05", False)])
def test_the_plan_of_a_gpu_follows_its_utilization(
    utilization: str, fits: bool, tmp_path: Path
) -> None:
    prepared, device = huge_model(tmp_path), device_of(free=78 * GIB)
    config = config_of("--gpu-memory-utilization", utilization)
    plan = plan_memory(config, prepared, device)
    assert plan.fits is fits
    assert plan.device == "memory of the GPU"
    if fits:
        assert 0 <= plan.left - plan.pool_bytes < plan.block_bytes
    else:
        assert "--gpu-memory-utilization 0.95" in fitting_flags(plan, config, prepared, device)


@pytest.mark.parametrize(("num_threads", "share"), [(2, 0.5), (9, 0.25)])
def test_engines_of_a_memory_node_have_a_copy_of_the_weights(
    num_threads: int, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers on two nodes have two copies; those that are bound to none have one."""
    nodes = {0: [[each] for each in range(8)], 1: [[each] for each in range(8, 16)]}
    monkeypatch.setattr(host_resources, "cores_by_node", lambda root: nodes)
    config = config_of("--data-parallel-size", "4", "--cpu-threads", str(num_threads))
    assert cpu_of(config, machine(tmp_path)).weight_share(0) == share


def test_ranks_on_nodes_of_their_own_have_a_copy_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 of both engines is on node 0, rank 1 on node 1."""
    nodes = {0: [[0], [1]], 1: [[2], [3]]}
    monkeypatch.setattr(host_resources, "cores_by_node", lambda root: nodes)
    words = ("--tensor-parallel-size", "2", "--data-parallel-size", "2", "--cpu-threads", "1")
    config = config_of(*words)
    device = cpu_of(config, machine(tmp_path))
    assert [device.weight_share(rank) for rank in range(2)] == [0.5, 0.5]


def test_engines_share_the_memory_and_the_cores_of_a_machine(
    kernels: Kernels, tmp_path: Path
) -> None:
    """A pool of a given size is that of each engine."""
    save_tiny("llama", tmp_path)
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    root = machine(tmp_path / "machine", free=8 * GIB)
    one = config_of("--max-num-seqs", "8")
    four = config_of("--max-num-seqs", "8", "--data-parallel-size", "4")
    alone, shared = (plan_memory(each, prepared, cpu_of(each, root)) for each in (one, four))
    assert shared.free == alone.free // 4
    assert shared.weights == alone.weights
    assert shared.pool_bytes < alone.pool_bytes / 4
    assert "memory of this machine for each of 4 engines" in "\n".join(shared.table())
    later = CpuDevice(four.device, root, parallel=four.parallel, starts_alone=True)
    assert plan_memory(four, prepared, later).free == alone.free, "the others have theirs"
    assert alone.elsewhere == 0
    packed = sum(size for form, size in shared.weights.items() if form != "f32")
    assert shared.elsewhere == packed * 3 // 4 > 0
    rest = shared.weights.total() - packed + shared.work.total()
    assert 4 * (shared.left + rest) == pytest.approx(alone.free - packed, abs=16)
    (line,) = (line for line in shared.table() if line.startswith("  shared "))
    assert "this part of them counts for other engines" in line
    assert shared.to_dict()["weights_of_other_engines_bytes"] == shared.elsewhere
    assert "weights_of_other_engines_bytes" not in alone.to_dict()
    late = machine(tmp_path / "late", free=8 * GIB - packed)
    later = plan_memory(four, prepared, cpu_of(four, late), loaded_bytes=packed)
    assert later.free == pytest.approx(shared.free, abs=1024)
    dense = config_of("--cpu-weights", "f32", "--data-parallel-size", "4")
    assert plan_memory(dense, prepared, cpu_of(dense, root)).elsewhere == 0
    sized = config_of("--data-parallel-size", "4", "--kv-cache-memory", "1G")
    plan = plan_memory(sized, prepared, cpu_of(sized, root))
    assert GIB - plan.block_bytes < plan.pool_bytes <= GIB
    too_large = config_of("--data-parallel-size", "4", "--kv-cache-memory", "3G")
    assert not plan_memory(too_large, prepared, cpu_of(too_large, root)).fits


@pytest.mark.parametrize("flags", [["--cpu-weights", "f32"], ["--model-impl", "transformers"]])
def test_standby_workers_need_weights_that_workers_share(
    flags: list[str], kernels: Kernels, tmp_path: Path
) -> None:
    save_tiny("llama", tmp_path)
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    config = config_of("--standby-workers", "1", *flags)
    message = "--standby-workers needs weights that workers share in memory, and those of Llama"
    with pytest.raises(ConfigError, match=message) as raised:
        plan_memory(config, prepared, cpu_of(config, machine(tmp_path)))
    assert raised.value.param == "standby_workers"


def test_standby_processes_take_memory_of_the_pool(kernels: Kernels, tmp_path: Path) -> None:
    """A worker has for itself what it does not share: here norms and the like."""
    prepared, root = packaged_model(), machine(tmp_path)

    def planned(*words: str) -> MemoryPlan:
        config = config_of("--cpu-weights", "packed", *words)
        return plan_memory(config, prepared, cpu_of(config, root))

    alone = planned()
    assert "standby processes" not in alone.work
    engine, both = planned("--standby-engines", "1"), planned("--standby-workers", "2")
    assert engine.work["standby processes"] == STANDBY_ENGINE_BYTES
    own = both.work["standby processes"] // 2 - STANDBY_WORKER_BYTES
    assert 0 <= own < alone.weights.total() / 10
    assert both.num_blocks < engine.num_blocks < alone.num_blocks
    shared = planned("--standby-engines", "1", "--data-parallel-size", "2", "--cpu-threads", "1")
    assert shared.work["standby processes"] == STANDBY_ENGINE_BYTES // 2
