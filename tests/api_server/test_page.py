"""The files of the web page: content types, security policy, caching and access."""

import json
import re

import pytest

from api_server.page.files import ASSETS, PAGES, page_files
from proto.settings.config import FrontEndConfig

FILES = page_files()
HASHES = r"( 'sha256-[\w+/=]{44}')+"


async def test_every_file_has_its_content_type_and_security_policy(start):
    types = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8"}
    types |= {"css": "text/css; charset=utf-8", "svg": "image/svg+xml"}
    types |= {"txt": "text/plain; charset=utf-8"}
    async with start() as front_end:
        for each in FILES:
            response = await front_end.http.get(each.path)
            assert response.status_code == 200
            assert response.content == each.content
            suffix = "html" if each.path in PAGES.values() else each.path.rpartition(".")[2]
            assert response.headers["content-type"] == types[suffix]
            policy = response.headers["content-security-policy"].split("; ")
            sources = [f"script-src 'self'{HASHES}", f"style-src 'self'{HASHES}"]
            if each.path not in PAGES.values():
                sources = ["script-src 'self'", "style-src 'self'"]
            assert all(re.fullmatch(*pair) for pair in zip(sources, policy[1:3], strict=True))
            assert policy[0] == "default-src 'none'"
            assert {"connect-src 'self'", "img-src 'self' data:"} <= set(policy)
            assert "frame-ancestors 'none'" in policy
            assert response.headers["x-content-type-options"] == "nosniff"
            head = await front_end.http.head(each.path)
            assert (head.status_code, head.content) == (200, b"")
        names = {each.path.removeprefix("/page/") for each in FILES} - {*PAGES.values()}
        assert {path.name for path in ASSETS.iterdir()} == names | PAGES.keys()


async def test_the_files_are_sent_compressed_to_clients_that_accept_it(start):
    async with start() as front_end:
        for each in FILES:
            plain = await front_end.http.get(each.path, headers={"accept-encoding": "identity"})
            assert "content-encoding" not in plain.headers
            packed = await front_end.http.get(each.path, headers={"accept-encoding": "br, gzip"})
            assert packed.headers["content-encoding"] == "gzip"
            assert packed.headers["vary"] == "accept-encoding"
            assert int(packed.headers["content-length"]) == len(each.compressed)
            assert packed.content == plain.content == each.content


def test_all_files_of_the_page_together_are_small(capsys):
    """As sent, in gzip; the sizes are printed."""
    sizes = {each.path: len(each.compressed) for each in FILES}
    total = sum(sizes.values())
    with capsys.disabled():
        largest = sorted(sizes.items(), key=lambda item: -item[1])[:4]
        listed = ", ".join(f"{path} {size:,}" for path, size in largest)
        print(f"\nfiles of the page as sent, in gzip: {total:,} bytes; {listed}")
    assert total < 400_000


async def test_cached_files_are_not_sent_again(start):
    async with start() as front_end:
        first = await front_end.http.get("/")
        assert first.headers["cache-control"] == "no-cache"
        tag = {"if-none-match": first.headers["etag"]}
        again = await front_end.http.get("/", headers=tag)
        assert (again.status_code, again.content) == (304, b"")
        other = await front_end.http.get("/page/main.js", headers=tag)
        assert other.status_code == 200


async def test_only_the_page_needs_no_key(start):
    async with start(config=FrontEndConfig(api_key="k")) as front_end:
        assert (await front_end.http.get("/")).status_code == 200
        assert (await front_end.http.get("/page/main.js")).status_code == 200
        assert (await front_end.http.get("/docs")).status_code == 200
        assert (await front_end.http.get("/openapi.json")).status_code == 401
        for path in ("/page", "/page/", "/page/nowhere.js", "/page/../metrics", "/view/events"):
            assert (await front_end.http.get(path)).status_code == 401, path
        key = {"authorization": "Bearer k"}
        for path in ("/page/nowhere.js", "/page/__init__.py", "/page/%2e%2e/files.py"):
            assert (await front_end.http.get(path, headers=key)).status_code == 404, path


async def test_the_files_of_the_page_have_one_label(start):
    async with start() as front_end:
        for file in FILES:
            assert (await front_end.http.get(file.path)).status_code == 200
        text = (await front_end.http.get("/metrics")).text
    counted = re.findall(r'^http_requests_total{handler="([^"]*)".*} ([0-9.]+)$', text, re.M)
    assert counted == [("/", "1.0"), ("/docs", "1.0"), ("/page/", f"{len(FILES) - 2}.0")]


async def test_the_page_is_served_during_a_drain(start):
    async with start() as front_end:
        front_end.app_state.health.start_drain()
        assert (await front_end.http.get("/v1/models")).status_code == 503
        assert (await front_end.http.get("/")).status_code == 200


@pytest.mark.parametrize("key", [None, "k"])
async def test_the_page_can_be_disabled(start, key):
    async with start(config=FrontEndConfig(page=False, api_key=key)) as front_end:
        for path in ("/", "/docs", "/page/main.js"):
            status = (await front_end.http.get(path)).status_code
            assert status == (404 if key is None else 401), path


def test_the_bundle_has_the_pinned_versions_and_licences():
    """Fails if `make page` was not run after a change of a version."""
    package = json.loads((ASSETS.parent / "vendor" / "package.json").read_text())
    pinned = package["devDependencies"].items()
    bundle = (ASSETS / "vendor.js").read_text().split("*/")[0]
    licences = (ASSETS / "vendor-licenses.txt").read_text()
    for name, version in pinned:
        if name != "esbuild":
            assert f"{name} {version} (" in bundle
            assert f"{name} {version} (" in licences


def test_no_external_resources_and_no_html_injection():
    """Checks beyond the security policy of the browser."""
    served = {each.path.removeprefix("/") for each in FILES}
    for path in ASSETS.iterdir():
        if path.name.startswith("vendor"):
            continue
        text = path.read_text()
        addresses = set(re.findall(r"https?://[^\s\"']+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, path
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in text, (path, way)
        for name in re.findall(r'from "\./([\w.]+)"', text):
            assert f"page/{name}" in served, (path, name)
        for name in re.findall(r'(?:src|href)="(page/[\w.]+)"', text):
            assert name in served, (path, name)
        assert not re.search(r"\son\w+=|\sstyle=|<style|<script>", text), path


def test_every_script_and_style_sheet_begins_with_a_comment():
    for each in FILES:
        if each.path.endswith((".js", ".css")):
            assert re.match(r"(// |/\* )", each.content.decode()), each.path
