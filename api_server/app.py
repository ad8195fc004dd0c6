"""The ASGI application: routes, error handlers and middleware over an AppState."""

from fastapi import FastAPI

from api_server import errors
from api_server.generation.app_state import AppState
from api_server.metrics.http_metrics import HttpMetricsMiddleware
from api_server.middleware import (
    AccessMiddleware,
    ClientMiddleware,
    DrainMiddleware,
    FastPath,
    SiteMiddleware,
    endpoints_of,
)
from api_server.page.files import page_files
from api_server.routes import (
    adapters,
    admin,
    chat,
    completions,
    infill,
    live_view,
    messages,
    openapi,
    pooling,
    responses,
    responses_websocket,
    sessions,
    system,
    tokenizer,
)
from proto.runtime.security import read_api_keys


def create_app(app_state: AppState) -> FastAPI:
    """Return the ASGI application; raise ConfigError for API keys that cannot be read."""
    app = FastAPI(title="tokend", version=system.daemon_version(), docs_url=None, redoc_url=None)
    app.state.app_state = app_state
    errors.install(app)
    computing = (completions, infill, chat, responses, messages, pooling)
    routers = [module.router for module in computing]
    routers += [
        sessions.router,
        responses_websocket.router,
        responses.stored_router,
        tokenizer.router,
        system.router,
        admin.router,
        adapters.router,
    ]
    files = page_files() if app_state.config.page else ()
    if app_state.config.page:
        routers += [live_view.router, live_view.page_router(files)]
    for router in (*routers, system.no_websocket_router):
        app.include_router(router)
    openapi.install(app, app_state.config)
    endpoints = endpoints_of(*(module.router for module in computing))
    app.add_middleware(FastPath, endpoints=endpoints)
    app.add_middleware(DrainMiddleware)
    app.add_middleware(ClientMiddleware)
    app.add_middleware(SiteMiddleware, config=app_state.config)
    app.add_middleware(
        AccessMiddleware,
        config=app_state.config,
        keys=read_api_keys(app_state.config),
        page_paths=frozenset(file.path for file in files),
    )
    routes = [route for router in routers for route in router.routes]
    http_metrics = app_state.metrics.register_http_metrics(routes)
    app.add_middleware(HttpMetricsMiddleware, metrics=http_metrics)
    return app
