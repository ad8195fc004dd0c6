"""The application: routes, error bodies, the door, the key. Everything it needs is passed in."""

from fastapi import FastAPI

from api_server import errors
from api_server.middleware import PassTheDoor, RequireApiKey
from api_server.routes import admin, chat, completions, models, system
from api_server.services import Services


def create_app(services: Services) -> FastAPI:
    """The ASGI application over these services."""
    app = FastAPI(title="tokend", version=system.daemon_version(), docs_url=None, redoc_url=None)
    app.state.services = services
    errors.install(app)
    for module in (completions, chat, models, system, admin):
        app.include_router(module.router)
    app.add_middleware(PassTheDoor)
    key = services.config.api_key
    if key is not None:
        app.add_middleware(RequireApiKey, key=key)
    return app
