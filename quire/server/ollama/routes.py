"""All of Ollama's endpoints that are here."""

from __future__ import annotations

from quire.server.ollama import answers, models

ROUTES = [*answers.ROUTES, *models.ROUTES]
