"""One rank of an island: model, batches, DeepSpeed engine and its slices of the canonical form; no Ray here."""
