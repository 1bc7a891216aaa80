"""Data: preprocessing, splits, batches and loaders."""
