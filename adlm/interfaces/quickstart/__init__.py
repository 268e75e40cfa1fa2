"""A first run, whole: text, two models, their bounds, samples, a report. Each file does one of these."""
