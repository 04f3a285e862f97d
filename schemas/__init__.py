"""What is written down: events, chunks, KV artifacts, settings, API bodies, errors. No torch, Beam or FastAPI."""
