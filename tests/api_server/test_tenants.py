"""The tenant of a request, from its key or the header of a trusted proxy."""

import pytest

from api_server.http.tenants import DEFAULT_TENANT, MAX_TENANT_CHARACTERS, TENANT_HEADER
from proto.settings.config import FrontEndConfig

PATHS = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("alice a1\nalice a2\nbob b1\n")
    return str(path)


async def tenant(front_end, path="/v1/completions", key=None, **headers):
    """Return the engine's request, or the response if the engine gets none."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if key is not None:
        given["authorization"] = f"Bearer {key}"
    response = await front_end.http.post(path, json=PATHS[path], headers=given)
    if response.status_code != 200:
        return response
    return (await front_end.engine.requests.get()).tenant


async def test_without_keys_all_requests_have_one_tenant(start, scripted):
    async with start(scripted("!")) as front_end:
        assert await tenant(front_end) == DEFAULT_TENANT
        assert await tenant(front_end, x_tenant_id="alice") == DEFAULT_TENANT
        assert await tenant(front_end, x_tenant_id="no name") == DEFAULT_TENANT


@pytest.mark.parametrize("path", PATHS)
async def test_a_name_of_the_key_file_is_a_tenant(start, scripted, keys, path):
    config = FrontEndConfig(api_key="k", api_key_file=keys)
    async with start(scripted("!"), config=config) as front_end:
        found = {key: await tenant(front_end, path, key) for key in ("k", "a1", "a2", "b1")}
        assert found["k"] == DEFAULT_TENANT
        assert found["a1"] == found["a2"]
        assert len(set(found.values())) == 3
        assert all(0 <= each < 1 << 64 for each in found.values())
        assert await tenant(front_end, path, "a1", x_tenant_id="bob") == found["a1"]
        assert (await tenant(front_end, path, "b2")).status_code == 401
        assert (await tenant(front_end, path)).status_code == 401


async def test_an_x_api_key_names_its_tenant(start, scripted, keys):
    async with start(scripted("!"), config=FrontEndConfig(api_key_file=keys)) as front_end:
        assert await tenant(front_end, x_api_key="b1") == await tenant(front_end, key="b1")


@pytest.mark.parametrize("path", PATHS)
async def test_a_trusted_header_names_the_tenant(start, scripted, path):
    async with start(scripted("!"), config=FrontEndConfig(tenant_by="header")) as front_end:
        assert await tenant(front_end, path) == DEFAULT_TENANT
        alice = await tenant(front_end, path, x_tenant_id="alice@example.org")
        bob = await tenant(front_end, path, x_tenant_id="bob")
        assert len({DEFAULT_TENANT, alice, bob}) == 3
        assert await tenant(front_end, path, x_tenant_id="bob") == bob


async def test_header_values_are_separate_for_every_key(start, scripted, keys):
    config = FrontEndConfig(api_key_file=keys, tenant_by="header")
    async with start(scripted("!"), config=config) as front_end:
        found = [
            await tenant(front_end, key=key, **header)
            for key in ("a1", "b1")
            for header in ({}, {"x_tenant_id": "carol"}, {"x_tenant_id": "dave"})
        ]
        assert len(set(found)) == 6


async def test_tenant_numbers_are_the_same_in_all_front_ends(start, scripted):
    """The numbers must not change between starts, or a restart would mix up tenants."""
    async with start(scripted("!"), config=FrontEndConfig(tenant_by="header")) as front_end:
        assert await tenant(front_end, x_tenant_id="alice") == 1433568293330041613


async def test_tenants_can_be_disabled(start, scripted, keys):
    config = FrontEndConfig(api_key_file=keys, tenant_by="none")
    async with start(scripted("!"), config=config) as front_end:
        assert await tenant(front_end, key="a1", x_tenant_id="x") == DEFAULT_TENANT
        assert await tenant(front_end, key="b1") == DEFAULT_TENANT


@pytest.mark.parametrize("name", ["", "two words", "a,b", "é", "x" * (MAX_TENANT_CHARACTERS + 1)])
async def test_an_invalid_header_is_a_400_that_names_it(start, name):
    async with start(config=FrontEndConfig(tenant_by="header")) as front_end:
        response = await front_end.http.post(
            "/v1/completions",
            json={"prompt": "hello"},
            headers={TENANT_HEADER: name.encode("latin-1")},
        )
        assert response.status_code == 400
        assert response.json()["error"]["param"] == TENANT_HEADER
        assert TENANT_HEADER in response.json()["error"]["message"]
        longest = await front_end.http.post(
            "/v1/completions", json={}, headers={TENANT_HEADER: "x" * MAX_TENANT_CHARACTERS}
        )
        assert TENANT_HEADER not in longest.text


async def test_duplicate_tenant_headers_are_refused(start):
    """With a proxy that appends instead of replacing, clients could choose their tenant."""
    async with start(config=FrontEndConfig(tenant_by="header")) as front_end:
        headers = [(TENANT_HEADER, "alice"), (TENANT_HEADER, "bob")]
        response = await front_end.http.post(
            "/v1/completions", json={"prompt": "hello"}, headers=headers
        )
        assert response.status_code == 400
