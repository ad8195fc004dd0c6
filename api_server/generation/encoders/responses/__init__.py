"""Responses of /v1/responses: encoded, running, stored, and in other front ends."""
