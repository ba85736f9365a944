"""HTTP: a client of engines, a server of ASGI apps, and server-sent events."""
