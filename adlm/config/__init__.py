"""Config options of a run: their definitions (schema) and the resolution of presets and overrides (load)."""
