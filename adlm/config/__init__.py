"""Every knob of a run: what there is (schema) and how presets and overrides become one checked Config (load)."""
