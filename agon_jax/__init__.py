"""Agon in JAX: two policies learn by solving what the rival could not."""
