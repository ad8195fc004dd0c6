"""HTTP below the routes: connections and their limits, access, tenants, the log of requests."""
