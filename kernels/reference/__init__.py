"""PyTorch implementations: the specification, and what runs where there is no GPU."""
