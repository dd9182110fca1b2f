"""Commands that use trained models: `models`, `generate`, `predict` and `evaluate`."""
