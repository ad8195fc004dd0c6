"""The application: routes, error bodies, the door, the key. Everything it needs is passed in."""

from fastapi import FastAPI

from api_server import errors, openapi
from api_server.http_counters import CountAnswers
from api_server.middleware import KnowKeys, PassTheDoor
from api_server.routes import (
    admin,
    chat,
    completions,
    messages,
    models,
    responses,
    stored_responses,
    system,
    tokenizer,
    view,
)
from api_server.services import Services
from api_server.short_way import ShortWay, endpoints_of
from proto.api_keys import read_api_keys


def create_app(services: Services) -> FastAPI:
    """The ASGI application over these services; raises ConfigError for keys that cannot be read."""
    app = FastAPI(title="tokend", version=system.daemon_version(), docs_url=None, redoc_url=None)
    app.state.services = services
    errors.install(app)
    generating = (completions, chat, responses, messages)
    modules = (*generating, stored_responses, models, tokenizer, system, admin)
    for module in modules:
        app.include_router(module.router)
    services.metrics.http.know(module.router for module in modules)
    if services.config.page:
        app.include_router(view.router)
    openapi.install(app, services.config)
    endpoints = endpoints_of(*(module.router for module in generating))
    app.add_middleware(ShortWay, endpoints=endpoints)
    app.add_middleware(PassTheDoor)
    keys = read_api_keys(services.config)
    if keys:
        app.add_middleware(KnowKeys, keys=keys, metrics_open=services.config.metrics_open)
    app.add_middleware(CountAnswers, counters=services.metrics.http)
    return app
