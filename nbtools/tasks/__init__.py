"""Tasks: raw format → pack, model, loss, metrics, demo data; reached by name, imported by no module of nbtools."""
