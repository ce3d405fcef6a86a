"""Language models as pure functions of (base, adapter, tokens), and their published weights."""
