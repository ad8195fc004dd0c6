"""The application: routes, error bodies, the door, the key. Everything it needs is passed in."""

from fastapi import FastAPI

from api_server import errors, openapi
from api_server.app_state import Services
from api_server.metrics.counters import CountRequests
from api_server.middleware import OPEN_PATHS, KnowKeys, PassTheDoor, ShortWay, endpoints_of
from api_server.page.files import page_files
from api_server.routes import (
    admin,
    chat,
    completions,
    live_view,
    messages,
    responses,
    system,
    tokenizer,
)
from proto.security import read_api_keys


def create_app(services: Services) -> FastAPI:
    """The ASGI application over these services; raises ConfigError for keys that cannot be read."""
    app = FastAPI(title="tokend", version=system.daemon_version(), docs_url=None, redoc_url=None)
    app.state.services = services
    errors.install(app)
    generating = (completions, chat, responses, messages)
    routers = [module.router for module in generating]
    routers += [responses.stored_router, tokenizer.router, system.router, admin.router]
    files = page_files() if services.config.page else []
    if services.config.page:
        routers += [live_view.router, live_view.router_of(files)]
    for router in routers:
        app.include_router(router)
    openapi.install(app, services.config)
    endpoints = endpoints_of(*(module.router for module in generating))
    app.add_middleware(ShortWay, endpoints=endpoints)
    app.add_middleware(PassTheDoor)
    keys = read_api_keys(services.config)
    if keys:
        open_paths = frozenset(each.path for each in files)
        if services.config.metrics_open:
            open_paths |= {"/metrics"}
        app.add_middleware(KnowKeys, keys=keys, open_paths=OPEN_PATHS | open_paths)
    routes = [route for router in routers for route in router.routes]
    app.add_middleware(CountRequests, counters=services.metrics.count_http(routes))
    return app
