"""Engines with a fake connector, for tests of external KV."""

from engine_core.request import RequestStatus
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.kv_connector import FakeConnector

WAITS = RequestStatus.WAITING_FOR_REMOTE_KVS


def prompt(num_tokens, seed=0):
    return [(seed * 131 + 7 * i + 1) % 900 for i in range(num_tokens)]


def num_free(engine):
    return engine.kv_cache.num_available_blocks


def num_hashed(engine, request):
    (table,) = engine.kv_cache.block_ids(request.seq_id)
    return sum(1 for block in table if engine.kv_cache.pool.hashes[block] is not None)


def engine_with(answer, **options):
    connector_options = {name: options.pop(name) for name in ("fails", "delays") if name in options}
    return EngineHarness(connector=FakeConnector(answer, **connector_options), **options)


def finish(engine):
    """Run to the end; loads finish immediately."""
    for _ in range(10_000):
        for seq_id in list(engine.connector.under_way):
            engine.report(engine.connector.finish(seq_id, engine.runner))
        if not engine.scheduler.num_unfinished and not engine.scheduler.has_work:
            while engine.in_flight:
                engine.collect(engine.in_flight.popleft())
            return
        engine.step()
    raise AssertionError("it never ends")


def losing(*indices):
    """Return a function that leaves blocks of a load invalid, by their index."""
    return lambda load, blocks: {blocks[index] for index in indices if index < len(blocks)}
