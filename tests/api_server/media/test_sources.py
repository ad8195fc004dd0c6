"""Data URIs and files of images, and their limits."""

import base64
import os
from pathlib import Path

import pytest

from api_server.media.sources import INLINE_CHARACTERS, ImageSources
from proto.errors import InvalidRequestError
from proto.settings.config import MediaConfig


def sources(**settings) -> ImageSources:
    return ImageSources(MediaConfig(**settings))


async def error(images: ImageSources, url: str) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        await images.read(url)
    return caught.value.message


@pytest.mark.parametrize("size", [0, 1, 2, 3, INLINE_CHARACTERS])
async def test_a_data_uri_is_decoded(size: int) -> None:
    content = os.urandom(size)
    text = base64.b64encode(content).decode()
    for header in ("data:image/png;base64", "DATA:;Base64", "data:text/html;charset=x;base64"):
        assert await sources().read(f"{header},{text}") == content


@pytest.mark.parametrize(
    "url",
    [
        *("data:", "data:,", "data:image/png,abc", "data:image/png;base64", "data:;base64x,AAAA"),
        *("data:;base64,AAA", "data:;base64,AA AA", "data:;base64,A*==", "data:;base64,é"),
        *("", "x", "ftp://images.example/", "javascript:1", "/etc/passwd", "image.png", "blob:x"),
    ],
)
async def test_what_is_no_image_is_refused(url: str) -> None:
    assert "image" in await error(sources(allowed_media_domains=("*",)), url)


@pytest.mark.parametrize("url", ["http://images.example/", "HTTPS://images.example/"])
async def test_without_allowed_hosts_no_url_is_fetched(url: str) -> None:
    assert "--allowed-media-domains" in await error(sources(), url)


async def test_bytes_of_a_data_uri_have_a_limit() -> None:
    images = sources(max_image_bytes=10)
    for size, fits in [(9, True), (10, True), (11, False), (12, False), (13, False), (100, False)]:
        url = "data:;base64," + base64.b64encode(bytes(size)).decode()
        if fits:
            assert await images.read(url) == bytes(size)
        else:
            assert "more than 10 bytes" in await error(images, url)


class Tree:
    """An allowed folder and its surroundings."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "allowed"
        (self.root / "inner").mkdir(parents=True)
        (self.root / "inner" / "a b.png").write_bytes(b"image")
        (folder / "secret.png").write_bytes(b"secret")
        (folder / "allowed-not").mkdir()
        (folder / "allowed-not" / "secret.png").write_bytes(b"secret")
        (self.root / "out").symlink_to(folder / "secret.png")
        (self.root / "outer").symlink_to(folder)
        (self.root / "in").symlink_to(self.root / "inner" / "a b.png")
        (self.root / "circle").symlink_to(self.root / "circle")
        os.mkfifo(self.root / "fifo")
        self.images = sources(allowed_local_media_path=str(self.root), max_image_bytes=10)

    def url(self, path: str) -> str:
        return f"file://{self.root}/{path}"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.mark.parametrize("path", ["inner/a%20b.png", "./inner/../inner/a%20b.png", "in"])
async def test_files_below_the_allowed_folder_are_read(tree: Tree, path: str) -> None:
    assert await tree.images.read(tree.url(path)) == b"image"


@pytest.mark.parametrize(
    "path",
    [
        *("../secret.png", "%2e%2e/secret.png", "..%2Fsecret.png", "../allowed-not/secret.png"),
        *("out", "outer/secret.png", "outer/allowed-not/secret.png", "inner/../../secret.png"),
        *("..", "", ".", "../../../../../../etc/passwd", "../../../../../../dev/zero"),
    ],
)
async def test_files_outside_are_not_read(tree: Tree, path: str) -> None:
    message = await error(tree.images, tree.url(path))
    assert "--allowed-local-media-path" in message
    assert str(tree.root.parent) not in message


@pytest.mark.parametrize("path", ["fifo", "inner", "none", "circle", "%00", "a" * 5000])
async def test_what_is_no_file_is_not_read(tree: Tree, path: str) -> None:
    assert "the file of the image" in await error(tree.images, tree.url(path))


async def test_bytes_of_a_file_have_a_limit(tree: Tree) -> None:
    (tree.root / "large").write_bytes(bytes(11))
    assert "more than 10 bytes" in await error(tree.images, tree.url("large"))


async def test_a_folder_that_is_a_link_itself_is_allowed(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tree.root)
    images = sources(allowed_local_media_path=str(tmp_path / "link"))
    url = f"file://{tmp_path}/link/inner/a%20b.png"
    assert await images.read(url) == b"image"


async def test_a_link_that_is_changed_after_its_check_reaches_nothing(
    tree: Tree, monkeypatch
) -> None:
    """The folder becomes a link to one outside between the check and the opening."""
    real = os.open

    def change(path, flags, *rest, **named):
        if str(path).endswith("a b.png"):
            (tree.root / "inner").rename(tree.root / "before")
            (tree.root.parent / "allowed-not" / "a b.png").write_bytes(b"secret")
            (tree.root / "inner").symlink_to(tree.root.parent / "allowed-not")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", change)
    assert "cannot be read" in await error(tree.images, tree.url("inner/a%20b.png"))


async def test_without_a_folder_no_file_is_read(tree: Tree) -> None:
    assert "--allowed-local-media-path" in await error(sources(), tree.url("in"))
