"""Commands of the supervisor to a front end: health, drain, reload, aborts."""
