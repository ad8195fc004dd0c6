"""Shared memory for metrics: all front ends inherit it, and it outlives them."""

import mmap
import os
import sys
import tempfile

from deploy.supervisor.epochs import EpochCounter
from deploy.supervisor.processes import Child, WeightFiles
from proto import PROTOCOL_VERSION
from proto.messages.lifecycle import ProcessBoot
from proto.messages.prepared_model import PreparedModel
from proto.messages.stats import METRIC_CELLS, metric_bytes
from proto.settings.config import FrontEndConfig, ServeConfig

MODEL = PreparedModel(
    folder="/f",
    name="fake",
    source="/s",
    architecture="A",
    vocab_size=256,
    max_position=8192,
    weights_sample="",
)
COUNT = """
import os, sys
from api_server.server import make_metric_sheet
from proto.codec import MessageDecoder
from proto.messages.lifecycle import ProcessBoot

with os.fdopen(int(sys.argv[2]), "rb") as stream:
    stream.seek(0)
    boot = MessageDecoder(ProcessBoot).decode(stream.read())
make_metric_sheet(boot).add_to_cell(3)
"""


def test_weights_have_a_file_for_each_generation_rank_and_memory_node() -> None:
    files = WeightFiles()
    keys = [(1, 0, None), (1, 1, None), (1, 0, 0), (1, 0, 1), (2, 0, None)]

    def inodes() -> list[int]:
        return [os.fstat(files.descriptor(*key)).st_ino for key in keys]

    first = inodes()
    assert len(set(first)) == len(keys)
    assert inodes() == first
    files.close(but={2})
    second = inodes()
    assert not set(first[:4]) & set(second)
    assert second[4] == first[4]
    files.close()
    assert not set(second) & set(inodes())
    files.close()


def test_every_front_end_counts_in_its_row_of_the_shared_memory() -> None:
    death, alive = os.pipe()
    descriptor = os.memfd_create("metrics")
    os.ftruncate(descriptor, 2 * metric_bytes(1))
    with tempfile.TemporaryDirectory(prefix="t-") as run_dir:
        template = ProcessBoot(
            protocol_version=PROTOCOL_VERSION,
            role="engine_core",
            index=0,
            incarnation=0,
            epoch=1,
            worker_epoch=1,
            run_dir=run_dir,
            death_fd=death,
            config=ServeConfig(frontend=FrontEndConfig(api_server_count=2)),
            model=MODEL,
            metrics_fd=descriptor,
        )
        epochs = EpochCounter(template, ())
        assert epochs.make_boot("engine_core", 0).metrics_fd is None
        for index in (1, 0, 1):
            boot = epochs.make_boot("api_server", index)
            child = Child(boot, [sys.executable, "-c", COUNT], os.environ)
            child.wait()
            assert child.exit_status == 0
            child.close()
    cells = memoryview(mmap.mmap(descriptor, 2 * metric_bytes(1))).cast("d")
    assert [cells[3], cells[METRIC_CELLS + 3]] == [1, 2]
    for each in (death, alive, descriptor):
        os.close(each)
