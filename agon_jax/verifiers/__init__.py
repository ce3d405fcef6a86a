"""Verdicts on answers, on the host: model output is hostile, so worker processes judge it."""
