"""Triton implementations: the only place where triton is imported."""
