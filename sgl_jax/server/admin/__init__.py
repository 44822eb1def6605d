"""Routes of operators: health, settings, calls to the engine, the OpenAPI description."""
