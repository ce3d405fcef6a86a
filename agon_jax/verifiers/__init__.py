"""Verdicts on answers, given on the host: model output is hostile, and worker processes judge it."""
