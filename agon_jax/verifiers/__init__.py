"""Verdicts on answers, given on the host: model output is hostile and is judged in worker processes."""
