"""Which images are kept, for whom, and when their memory is free again."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from starlette.requests import ClientDisconnect

from api_server.media.pixel_store import MAX_UUIDS
from api_server.media.processing import MediaProcess, NoSpaceError
from api_server.media.reader import ImageSource, LoadedImage, MediaReader
from api_server.media.sources import ImageSources
from api_server.turns import CLIENT, Client, Turns
from proto.errors import InvalidRequestError, ModelError, OverloadedError, TimeLimitError
from proto.messages.multimodal import MM_HASH_BYTES
from proto.messages.prepared_model import PreparedModel
from proto.runtime.run_directory import pixels_folder
from tests.fakes.media import (
    data_uri,
    encode_image,
    open_reader,
    read_pixels,
    source,
    vision_folder,
)
from tests.fakes.tiny_vision import random_image

pytestmark = pytest.mark.suite("long")

SIZE = 4 * 3 * 24 * 24
"""Bytes of the pixels of an image."""


def image_bytes(seed: int) -> bytes:
    return encode_image(random_image(seed, 20, 20))


class Case:
    """A reader, and what it has processed."""

    def __init__(self, reader: MediaReader, run_dir: Path) -> None:
        self.reader = reader
        self.run_dir = run_dir
        self.num_processed = 0

    async def read(
        self, *sources: ImageSource, tenant: int = 0, salt: str | None = None
    ) -> list[LoadedImage]:
        return await self.reader.read(sources, tenant, salt)

    async def load(
        self, seed: int | None, tenant: int = 0, salt: str | None = None, **fields
    ) -> LoadedImage:
        content = None if seed is None else image_bytes(seed)
        (image,) = await self.read(source(content, **fields), tenant=tenant, salt=salt)
        return image

    async def use(self, seeds: Sequence[int]) -> None:
        """Read images, one request after the other."""
        for seed in seeds:
            (await self.load(seed)).lease.release()

    @property
    def files(self) -> set[str]:
        return set(os.listdir(pixels_folder(str(self.run_dir))))


@pytest.fixture
def model(tmp_path: Path) -> PreparedModel:
    return vision_folder("llava siglip", tmp_path / "m")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files of all images that are processed."""
    names: list[str] = []
    process = MediaProcess.process

    async def count(self: MediaProcess, encoded: bytes, name: str, *rest: str):
        names.append(name)
        return await process(self, encoded, name, *rest)

    monkeypatch.setattr(MediaProcess, "process", count)
    return names


@pytest.fixture
async def case(model: PreparedModel, tmp_path: Path) -> AsyncIterator[Case]:
    async with open_reader(
        model, tmp_path / "run", media_memory=3 * SIZE, limit_mm_per_prompt='{"image": 4}'
    ) as reader:
        yield Case(reader, tmp_path / "run")


async def test_the_same_image_again_is_not_processed(case: Case, counted: list[str]) -> None:
    first = await case.load(1)
    again, other = await case.read(source(image_bytes(1)), source(image_bytes(2)))
    assert (again.mm_hash, again.pixels) == (first.mm_hash, first.pixels)
    assert other.mm_hash != first.mm_hash
    assert len(first.mm_hash) == MM_HASH_BYTES
    assert [first.pixels.name, other.pixels.name] == counted
    assert case.files == set(counted)
    assert case.reader.num_bytes == 2 * SIZE


async def test_the_same_data_uri_again_is_not_decoded(
    case: Case, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except for another tenant or salt, and when its image is no longer kept."""
    num_decoded, read = 0, ImageSources.read

    async def count(self: ImageSources, url: str) -> bytes:
        nonlocal num_decoded
        num_decoded += 1
        return await read(self, url)

    monkeypatch.setattr(ImageSources, "read", count)
    monkeypatch.setattr("api_server.media.reader.INLINE_CHARACTERS", 64)
    first = await case.load(1)
    again = await case.load(1, uuid="cat")
    assert (again.mm_hash, again.pixels) == (first.mm_hash, first.pixels)
    named = await case.load(None, uuid="cat")
    assert named.mm_hash == first.mm_hash
    assert num_decoded == len(counted) == 1
    (other,) = await case.read(source(data_uri(image_bytes(1), "image/webp")))
    assert (other.mm_hash, num_decoded, len(counted)) == (first.mm_hash, 2, 1), "the same bytes"
    for image in (first, again, named, other):
        image.lease.release()
    for tenant, salt in [(1, None), (0, "a")]:
        (await case.load(1, tenant=tenant, salt=salt)).lease.release()
    assert (num_decoded, len(counted)) == (4, 3)
    await case.use([2, 3, 4])
    assert len(case.reader._store._by_uri) == 3, "those of kept images"
    await case.use([1])
    assert (num_decoded, len(counted)) == (8, 7)


async def test_tenants_and_salts_share_no_image(case: Case, counted: list[str]) -> None:
    hashes = {
        (await case.load(1, tenant=tenant, salt=salt)).mm_hash
        for tenant, salt in [(0, None), (1, None), (0, "a")]
    }
    assert (len(hashes), len(counted)) == (3, 3)


async def test_digests_depend_on_the_settings_of_the_processor(case: Case, tmp_path: Path) -> None:
    before = (await case.load(1)).mm_hash
    changed = vision_folder("llava siglip", tmp_path / "n", resample=2)
    async with open_reader(changed, tmp_path / "run") as reader:
        assert (await Case(reader, tmp_path / "run").load(1)).mm_hash != before


async def test_detail_matters_where_a_processor_has_two(tmp_path: Path, case: Case) -> None:
    model = vision_folder("smolvlm", tmp_path / "n")
    async with open_reader(model, tmp_path / "run") as reader:
        tiled = Case(reader, tmp_path / "run")
        images = {detail: await tiled.load(1, detail=detail) for detail in ("low", "high", "auto")}
        assert images["high"].mm_hash == images["auto"].mm_hash != images["low"].mm_hash
        assert (images["low"].grid, images["high"].grid) == ((0, 0), (2, 2))
        await tiled.load(1, detail="low", uuid="cat")
        for detail in ("low", "high", "auto"):
            again = await tiled.load(None, detail=detail, uuid="cat")
            assert again.pixels == images["low"].pixels, "as it was sent"
        assert images["low"].num_embeds * 5 == images["high"].num_embeds
    hashes = {(await case.load(1, detail=detail)).mm_hash for detail in images}
    assert len(hashes) == 1


async def test_the_least_recently_used_image_goes(case: Case, counted: list[str]) -> None:
    await case.use([1, 2, 3, 1, 4])  # 2 goes
    assert case.reader.num_bytes == 3 * SIZE
    await case.use([1, 3, 4])
    assert len(counted) == 4
    await case.use([2])
    assert len(counted) == 5
    assert len(case.files) == 3


async def test_an_image_in_use_stays(case: Case, counted: list[str]) -> None:
    held = await case.load(1)
    await case.use([2, 3, 4, 5, 6])
    assert read_pixels(held, case.run_dir).any()
    assert (await case.load(1)).pixels == held.pixels
    assert len(counted) == 6


async def test_an_image_waits_for_memory_until_leases_end(case: Case) -> None:
    held = [await case.load(seed) for seed in (1, 2, 3)]
    waiting = asyncio.create_task(case.load(4))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    held[0].lease.release()
    held[0].lease.release()  # without an effect
    held.append(await waiting)
    assert case.files == {image.pixels.name for image in held[1:]}
    assert case.reader.num_bytes == 3 * SIZE


async def test_an_image_without_memory_is_refused_in_the_end(case: Case, monkeypatch) -> None:
    monkeypatch.setattr("api_server.media.reader.SPACE_SECONDS", 0.1)
    held = [await case.load(seed) for seed in (1, 2, 3)]
    with pytest.raises(OverloadedError, match="take all memory"):
        await case.load(4)
    assert case.files == {image.pixels.name for image in held}


async def test_images_that_wait_for_memory_let_others_be_processed(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api_server.media.reader.WAIT_SECONDS", 2.0)
    monkeypatch.setattr("api_server.media.reader.SPACE_SECONDS", 4.0)
    held = [await case.load(seed) for seed in (1, 2, 3)]
    waiting = [asyncio.create_task(case.load(seed)) for seed in (4, 5)]
    await asyncio.sleep(0.2)
    with pytest.raises(InvalidRequestError, match="not an image"):
        await case.read(source(b"not an image"))
    assert case.files == {image.pixels.name for image in held}
    held[0].lease.release()
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert {each.pixels.name for each in [*held[1:], done.pop().result()]} == case.files
    (error,) = [
        each
        for each in await asyncio.gather(*waiting, return_exceptions=True)
        if isinstance(each, Exception)
    ]
    assert isinstance(error, OverloadedError)
    assert "take all memory" in error.message


async def test_unused_images_go_when_the_machine_has_no_memory(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it has memory for two images."""
    process = MediaProcess.process

    async def fill(self: MediaProcess, encoded: bytes, name: str, detail: str):
        if len(case.files) >= 2:
            raise NoSpaceError("there is no memory for the pixels of the image")
        return await process(self, encoded, name, detail)

    monkeypatch.setattr(MediaProcess, "process", fill)
    held = [await case.load(1)]
    await case.use([2])
    held.append(await case.load(3))
    assert case.files == {image.pixels.name for image in held}
    with pytest.raises(OverloadedError, match="no memory for the pixels"):
        await case.load(4)
    held[0].lease.release()
    await case.use([4])


async def test_pixels_take_half_of_the_shared_memory_at_most(
    model: PreparedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statvfs = os.statvfs

    def small(path: str) -> os.statvfs_result:
        fields = list(statvfs(path))
        fields[1:3] = 1, 4 * SIZE  # f_frsize, f_blocks
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", small)
    async with open_reader(model, tmp_path / "run") as reader:
        case = Case(reader, tmp_path / "run")
        await case.use([1, 2, 3])
        assert reader.num_bytes == 2 * SIZE
        with pytest.raises(InvalidRequestError, match=f"the limit of {2 * SIZE} "):
            await case.read(*(source(image_bytes(seed)) for seed in (1, 2, 3)))


async def test_images_of_one_request_beyond_the_memory_are_its_own_fault(case: Case) -> None:
    sources = [source(image_bytes(seed), param=f"part {seed}") for seed in range(4)]
    with pytest.raises(InvalidRequestError, match="--media-memory") as caught:
        await case.read(*sources)
    assert caught.value.param == "part 3"
    assert len(await case.read(*sources[1:])) == 3  # the leases have ended


async def test_a_failed_request_keeps_no_image(case: Case) -> None:
    with pytest.raises(InvalidRequestError):
        await case.read(source(image_bytes(1)), source(image_bytes(2)), source(b"not an image"))
    await case.use([3, 4, 5])
    held = [await case.load(seed) for seed in (6, 7, 8)]
    assert case.files == {image.pixels.name for image in held}


async def test_the_number_of_images_has_a_limit(case: Case) -> None:
    sources = [source(b"", param=f"part {number}") for number in range(10_001)]
    with pytest.raises(InvalidRequestError, match=r"at most 4 images.*got 10001") as caught:
        await case.read(*sources)
    assert caught.value.param == "part 4"
    assert caught.value.message.startswith("part 4: ")


async def test_urls_of_other_hosts_name_the_part(model: PreparedModel, tmp_path: Path) -> None:
    async with open_reader(
        model, tmp_path / "run", allowed_media_domains=("images.example",)
    ) as reader:
        with pytest.raises(InvalidRequestError, match=r"^part: .*not among") as caught:
            await reader.read([source("http://169.254.169.254/", param="part")], 0, None)
        assert caught.value.param == "part"


async def test_fetched_images_that_wait_to_be_processed_have_a_limit(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has half of the bytes that an image may have, and of the limit for all of them."""
    size, fetched = 10_000, 0

    async def fetch(url: str) -> bytes:
        nonlocal fetched
        fetched += 1
        await asyncio.sleep(0)
        return image_bytes(int(url[-1])).ljust(size // 2, b"x")

    monkeypatch.setattr(case.reader, "_held_bytes", Turns(2 * size))
    monkeypatch.setattr(
        case.reader, "_config", msgspec.structs.replace(case.reader._config, max_image_bytes=size)
    )
    monkeypatch.setattr(case.reader._sources, "read", fetch)
    await case.reader._turns.take()  # no image is processed
    waiting = [asyncio.create_task(case.read(source(f"http://a.example/{n}"))) for n in range(8)]
    await asyncio.sleep(0.2)
    assert fetched == 3
    waiting[0].cancel()
    await asyncio.sleep(0.2)
    assert fetched == 3, "the image is still processed"
    case.reader._turns.give_back()
    for task in waiting[1:]:
        (image,) = await task
        image.lease.release()
    await case.reader._held_bytes.take(2 * size)


async def test_the_images_of_a_request_have_a_time_limit_together(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fetch(url: str) -> bytes:
        await asyncio.sleep(0.3)
        return image_bytes(1)

    (await case.load(1)).lease.release()
    monkeypatch.setattr("api_server.media.reader.QUEUE_SECONDS", 0.0)
    monkeypatch.setattr(
        case.reader, "_config", msgspec.structs.replace(case.reader._config, media_timeout=0.4)
    )
    monkeypatch.setattr(case.reader._sources, "read", fetch)
    sources = [source("http://a.example/", param=f"part {number}") for number in range(4)]
    (held,) = await case.read(sources[0])
    with pytest.raises(TimeLimitError, match=r"^part 2: .*within 0.8 s") as caught:
        await case.read(*sources)
    assert caught.value.param == "part 2"
    held.lease.release()
    case.reader._store.evict_unleased()
    assert case.files == set(), "no lease is left"


async def test_pixels_without_a_lease_are_dropped_on_demand(case: Case, counted: list[str]) -> None:
    (await case.load(1, uuid="cat")).lease.release()
    used = await case.load(2)
    case.reader.forget_unused()
    assert case.files == {used.pixels.name}
    with pytest.raises(InvalidRequestError, match="no image is kept"):
        await case.load(None, uuid="cat")
    await case.use([1, 2])
    assert len(counted) == 3


async def test_a_uuid_finds_the_image_of_its_tenant_and_salt(
    case: Case, counted: list[str]
) -> None:
    first = await case.load(1, uuid="cat", salt="s")
    again = await case.load(None, uuid="cat", salt="s")
    assert (again.mm_hash, again.pixels) == (first.mm_hash, first.pixels)
    for tenant, salt, uuid in [(1, "s", "cat"), (0, None, "cat"), (0, "s", "dog")]:
        with pytest.raises(InvalidRequestError, match="no image is kept"):
            await case.load(None, tenant=tenant, salt=salt, uuid=uuid)
    with pytest.raises(InvalidRequestError, match="no image is kept"):
        await case.load(None)
    assert len(counted) == 1


async def test_a_url_counts_more_than_a_uuid(case: Case) -> None:
    first = await case.load(1, uuid="cat")
    second = await case.load(2, uuid="cat")
    assert second.mm_hash != first.mm_hash
    assert (await case.load(None, uuid="cat")).mm_hash == second.mm_hash
    assert (await case.load(1, uuid="cat")).mm_hash == first.mm_hash


async def test_uuids_go_with_their_image_and_have_limits(case: Case) -> None:
    for number in range(MAX_UUIDS + 1):
        (await case.load(1, uuid=str(number))).lease.release()
    with pytest.raises(InvalidRequestError, match="no image is kept"):
        await case.load(None, uuid="0")
    (await case.load(None, uuid=str(MAX_UUIDS))).lease.release()
    await case.use([2, 3, 4])
    with pytest.raises(InvalidRequestError, match="no image is kept"):
        await case.load(None, uuid=str(MAX_UUIDS))
    assert case.reader._store._by_uuid == {}


async def test_requests_with_the_same_new_image_have_it_processed_once(
    case: Case, counted: list[str]
) -> None:
    images = await asyncio.gather(*(case.load(1) for _ in range(8)))
    assert len(counted) == 1
    assert {image.pixels.name for image in images} == set(counted)


async def test_a_request_that_is_cancelled_takes_no_image_from_another(
    case: Case, counted: list[str]
) -> None:
    await case.use([9])
    first = asyncio.create_task(case.load(1))
    second = asyncio.create_task(case.load(1))
    await asyncio.sleep(0.01)
    first.cancel()
    image = await second
    assert (image.pixels.name, len(counted)) == (counted[1], 2)


async def test_a_request_whose_client_has_left_takes_no_image_from_another(case: Case) -> None:
    """Its task ends when it has its turn; the other request has the image processed itself."""

    class GoneClient(Client):
        def check_goes_on(self) -> None:
            raise ClientDisconnect

    async def load_for_gone() -> LoadedImage:
        CLIENT.set(GoneClient())
        return await case.load(1)

    busy = asyncio.create_task(case.load(2))
    await asyncio.sleep(0.01)
    gone = asyncio.create_task(load_for_gone())
    await asyncio.sleep(0.01)
    other = asyncio.create_task(case.load(1))
    await busy
    assert read_pixels(await other, case.run_dir).any()
    with pytest.raises(ClientDisconnect):
        await gone


async def test_memory_is_flat_for_100_different_images(
    model: PreparedModel, tmp_path: Path
) -> None:
    """By eight clients, each of which ends before its next image."""
    rng = np.random.default_rng(0)
    async with open_reader(model, tmp_path / "run", media_memory=8 * SIZE) as reader:
        case = Case(reader, tmp_path / "run")

        async def client(seeds: Sequence[int]) -> None:
            for seed in seeds:
                encoded = encode_image(random_image(seed, *map(int, rng.integers(200, 900, 2))))
                (image,) = await case.read(source(encoded))
                await asyncio.sleep(0)
                image.lease.release()

        async def clients(first: int, number: int) -> None:
            groups = (range(first + each, first + number, 8) for each in range(8))
            await asyncio.gather(*map(client, groups))

        def memory() -> int:
            children = psutil.Process().children()
            return sum(each.memory_info().rss for each in (psutil.Process(), *children))

        await clients(0, 40)
        before = memory()
        await clients(1000, 100)
        assert memory() - before < 24 << 20
        assert len(case.files) <= 8
        assert reader.num_bytes <= 8 * SIZE


async def test_a_closed_reader_frees_images_as_their_requests_end(
    model: PreparedModel, tmp_path: Path
) -> None:
    async with open_reader(model, tmp_path / "run") as reader:
        case = Case(reader, tmp_path / "run")
        held = await case.load(1)
        await case.use([2])
        await reader.close()
        assert case.files == {held.pixels.name}
        held.lease.release()
        assert case.files == set()


async def test_an_image_that_is_ready_when_its_reader_is_closed_leaves_no_file(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = MediaProcess.process

    async def close_after(self: MediaProcess, encoded: bytes, name: str, detail: str):
        done = await process(self, encoded, name, detail)
        case.reader._store.close()
        return done

    monkeypatch.setattr(MediaProcess, "process", close_after)
    with pytest.raises(OverloadedError, match="no longer read"):
        await case.load(1)
    assert case.files == set()


async def test_a_folder_of_another_user_is_refused(
    model: PreparedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    os.symlink(tmp_path, pixels_folder(str(tmp_path / "run")))
    with pytest.raises(ModelError, match="belongs to another user"):
        async with open_reader(model, tmp_path / "run"):
            pass


async def test_names_of_files_tell_their_front_end(case: Case) -> None:
    image = await case.load(1)
    assert image.pixels.name.startswith("0.0.")
    mode = os.stat(Path(pixels_folder(str(case.run_dir)), image.pixels.name)).st_mode
    assert mode & 0o777 == 0o600
    assert os.stat(pixels_folder(str(case.run_dir))).st_mode & 0o777 == 0o700
