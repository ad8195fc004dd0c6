"""The OpenAPI document matches the routes."""

import json

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from api_server.app import create_app
from api_server.routes import admin, openapi
from proto.settings.config import FrontEndConfig
from tests.api_server.test_bad_requests import BAD_FIELDS

COMPLETIONS = ("/v1/completions", "post")
CHAT = ("/v1/chat/completions", "post")


async def document_of(front_end, **headers) -> dict:
    return (await front_end.http.get("/openapi.json", headers=headers)).json()


def validator(document: dict, path: str, method: str, status: str = "") -> Draft202012Validator:
    """Return the schema of a request body, or of a response with this status."""
    described = document["paths"][path][method]
    part = described["responses"][status] if status else described["requestBody"]
    schema = part["content"]["application/json"]["schema"]
    return Draft202012Validator({**schema, "components": document["components"]})


async def test_every_operation_is_described(start):
    async with start() as front_end:
        document = await document_of(front_end)
        found = {(path, method) for path, item in document["paths"].items() for method in item}
        assert found == set(openapi.OPERATIONS)
        for path, item in document["paths"].items():
            for method, described in item.items():
                assert described["summary"], (path, method)
                assert set(described["responses"]) >= {"4XX", "5XX"}
        for name, schema in document["components"]["schemas"].items():
            Draft202012Validator.check_schema(schema)
            assert "$defs" not in json.dumps(schema), name


async def test_accepted_requests_match_the_document(start, scripted):
    async with start(scripted("!")) as front_end:
        document = await document_of(front_end)
        check = validator(document, *COMPLETIONS)
        for fields in (
            *({"prompt": each} for each in ("x", ["x", "y"], [5, 6], [[5], [6, 7]])),
            *({"prompt": "x", "stop": each} for each in ("a", ["a", "b"], [], None)),
            {"prompt": "x", "n": 2, "temperature": None, "model": "toy", "seed": -1},
        ):
            check.validate(fields)
            answer = await front_end.complete(**fields)
            assert answer.status_code == 200, answer.text
            validator(document, *COMPLETIONS, status="200").validate(answer.json())
        parts = ["a", {"type": "text", "text": "b"}]
        body = {"messages": [{"role": "user", "content": parts, "name": None}], "logprobs": True}
        validator(document, *CHAT).validate(body)
        answer = await front_end.chat(**body)
        validator(document, *CHAT, status="200").validate(answer.json())


async def test_requests_that_violate_the_document_are_refused(start):
    """The invalid fields of other tests, as far as the document describes them."""
    async with start() as front_end:
        check = validator(await document_of(front_end), *COMPLETIONS)
        bodies = [{"prompt": "x", **fields} for fields, _, _ in BAD_FIELDS]
        small = [body for body in bodies if len(str(body)) < 1000]
        wrong = [body for body in small if not check.is_valid(body)]
        assert len(wrong) > 30
        with pytest.raises(ValidationError):
            check.validate({"prompt": "x", "stop": ["a"] * 1025})


async def test_errors_match_the_document(start):
    async with start() as front_end:
        document = await document_of(front_end)
        for path, method in (COMPLETIONS, CHAT, ("/tokenize", "post"), ("/pause", "post")):
            answer = await front_end.http.request(method, f"{path}?mode=x", json={"x": 1})
            assert answer.status_code == 400
            validator(document, path, method, status="4XX").validate(answer.json())


@pytest.mark.parametrize("operators", [None, "op"])
@pytest.mark.parametrize("clients", [None, "k"])
async def test_security_schemes_are_on_protected_routes(start, clients, operators):
    config = FrontEndConfig(api_key=clients, admin_api_key=operators, metrics_open=True)
    async with start(config=config, accepts=True) as front_end:
        key = {"x-api-key": operators or clients or "none"}
        document = await document_of(front_end, **key)
        for path, item in document["paths"].items():
            for method, described in item.items():
                if path in ("/v1/completions", "/v1/chat/completions"):
                    continue
                answer = await front_end.http.request(method, path.replace("{name}", "toy"))
                assert ("security" in described) == (answer.status_code == 401), (method, path)


async def test_the_document_needs_the_key(start):
    async with start(config=FrontEndConfig(api_key="k")) as front_end:
        assert (await front_end.http.get("/openapi.json")).status_code == 401
        document = await document_of(front_end, **{"x-api-key": "k"})
        assert document["paths"]["/v1/completions"]["post"]["security"]
        assert "security" not in document["paths"]["/health"]["get"]


async def test_the_document_is_built_once_on_demand(start):
    async with start() as front_end:
        app = create_app(front_end.app_state)
        assert app.openapi_schema is None
        assert app.openapi() is app.openapi()
        assert {path for path, _ in openapi.OPERATIONS} >= {
            route.path for route in admin.router.routes
        }
