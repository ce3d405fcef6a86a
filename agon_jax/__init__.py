"""Agon in JAX: two policies learn on the same problems, each graded by solving what the other could not."""
