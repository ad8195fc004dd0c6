"""The refusal of a model that does not fit into memory, with flags that would make it fit.

Start at refusal. Flags are found by planning again with each smaller setting.
"""

from typing import Final

from proto.codec import changed
from proto.errors import ConfigError, TokendError
from proto.messages.prepared_model import PreparedModel
from proto.settings.config import ServeConfig, flag_name, memory_size
from proto.settings.config_checks import validate
from worker.device import Device
from worker.plan.memory_plan import MemoryPlan, plan_memory

_MIB: Final = 1 << 20


def refusal(
    plan: MemoryPlan,
    config: ServeConfig,
    prepared: PreparedModel,
    device: Device,
    rank: int = 0,
    draft: PreparedModel | None = None,
) -> ConfigError:
    """Return the error about a model that does not fit: the sum, and flags that make it fit."""
    if plan.shortfall > 0:
        what = f"{plan.model} does not fit into the {plan.device}"
    else:
        what = (
            f"the KV pool of {plan.num_blocks} blocks of {plan.block_size} tokens is too small: "
            f"{plan.least_blocks} are needed"
        )
    flags = fitting_flags(plan, config, prepared, device, rank, draft)
    if flags:
        way = f"it fits with {' or '.join(flags)}"
    else:
        way = f"no flag makes it fit: {memory_size(plan.shortfall)} more must be free"
    return ConfigError("\n".join((what, *plan.table(), way)), config.cache.pool_setting)


def fitting_flags(
    plan: MemoryPlan,
    config: ServeConfig,
    prepared: PreparedModel,
    device: Device,
    rank: int = 0,
    draft: PreparedModel | None = None,
) -> list[str]:
    """Return flags each of which alone makes the model fit; else those that do so together."""

    def attempt(settings: ServeConfig) -> MemoryPlan | None:
        try:
            validate(settings)
            return plan_memory(settings, prepared, device, rank, draft=draft)
        except TokendError:
            return None

    found = _pool_flags(plan, config, device)
    best, together, words = plan, config, []
    for section, field, values in device.smaller_settings():
        for value in values:
            tried = attempt(_with_setting(config, section, field, value))
            if tried is not None and tried.fits:
                found.append(f"{flag_name(field)} {value}")
                break
        smaller = _with_setting(together, section, field, values[-1])
        tried = attempt(smaller)
        if tried is not None and tried.shortfall < best.shortfall:
            best, together = tried, smaller
            words.append(f"{flag_name(field)} {values[-1]}")
    if not found and best.fits:
        return [" ".join(words)]
    return found


def _pool_flags(plan: MemoryPlan, config: ServeConfig, device: Device) -> list[str]:
    """Return sizes of the pool, and lengths of requests, for which the rest leaves memory."""
    found: list[str] = []
    if not plan.block_bytes:
        return found
    least = plan.least_blocks * plan.block_bytes
    if least <= plan.left:
        pool = max(least, min(plan.pool_bytes, device.default_pool_bytes(plan.left)))
        if config.cache.kv_cache_memory is not None:
            found.append(f"--kv-cache-memory {-(-pool // _MIB)}M")
        if config.cache.num_gpu_blocks_override is not None:
            found.append(f"--num-gpu-blocks-override {pool // plan.block_bytes}")
    most_blocks = min(plan.num_blocks, plan.left // plan.block_bytes)
    tokens = (most_blocks - 1) // plan.num_groups * plan.block_size
    if most_blocks < plan.least_blocks and tokens > 0:
        found.append(f"--max-model-len {tokens}")
    return found


def _with_setting(config: ServeConfig, section: str, field: str, value: object) -> ServeConfig:
    return changed(config, **{section: changed(getattr(config, section), **{field: value})})
