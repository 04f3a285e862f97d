"""The Beam pipelines: change events to chunks, vectors and KV, committed and retired."""
