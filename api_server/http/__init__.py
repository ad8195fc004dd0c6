"""HTTP below the routes: connections and their limits, middleware, tenants, OpenAPI."""
