"""The live view, as a front end shows it: `GET /view/events`."""
