"""The live view: what the page is shown of running requests."""
