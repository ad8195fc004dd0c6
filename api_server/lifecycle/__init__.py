"""Commands of the supervisor to an API server: health, drain, reload, aborts."""
